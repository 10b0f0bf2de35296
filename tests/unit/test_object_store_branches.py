"""Branches of a run whose checkpoints go to an object store: what is brought there after a rollback."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest

from megatron_datastates import stores
from megatron_datastates.errors import StorageError
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.mcore.training import tracker_writing
from megatron_datastates.mcore.training.tracker_recovery import wrap_read_metadata
from megatron_datastates.pipeline.near.holdings import resumable
from megatron_datastates.pipeline.runs.branches import Origin, origin_in
from megatron_datastates.pipeline.runs.jobs import JOBS_NAME
from tests.support.object_store import RUN, UNAVAILABLE, ObjectStore
from tests.unit import test_object_store as of_stores
from tests.unit.test_near_branches import STUCK, A, B, Job, resume

store = of_stores.store  # the fixture


class StoreJob(Job):
    """A job on two nodes whose far side is the object store."""

    def __init__(self, tmp: Path, run_id: int, resumed: int | None = None, **changes: object) -> None:
        super().__init__(tmp, run_id, **changes)
        self.run = stores.path_of(RUN)
        self.origin = Origin() if resumed is None else origin_in(self.directory(resumed), resumed)

    def track(self, iteration: int) -> None:
        self.close()
        stores.write(self.run / TRACKER_NAME, str(iteration).encode())


def tracked(job: Job) -> str:
    return stores.read_whole(job.run / TRACKER_NAME).decode()


@pytest.fixture
def away(store: ObjectStore, tmp_path: Path) -> Path:
    """The near tier of a node that has 8 of job A, whole, while the store has 5 of it."""
    first = StoreJob(tmp_path, A)
    first.save(5)
    first.track(5)
    again = StoreJob(tmp_path, A, where="away", faults=STUCK)
    for saver in again.ranks.savers:
        saver.session._ordinal = 5
    again.save(8)
    again.end_whole(8)
    for name in ("near0", "near1", "away1"):
        shutil.rmtree(tmp_path / name)
    return tmp_path / "away0"


def test_a_rollback_of_what_is_in_the_store(store: ObjectStore, tmp_path: Path) -> None:
    first = StoreJob(tmp_path, A)
    for iteration in (5, 10):
        first.save(iteration)
    first.track(10)
    job = StoreJob(tmp_path, B, resumed=5, faults=STUCK)
    job.save(7)
    job.end_whole(7)
    assert tracked(job) == "10"
    iteration, said = resume(job, job.roots[0])
    assert iteration == 7 and tracked(job) == "7", said
    assert resume(job, job.roots[1])[0] is None, "it is there now"


@pytest.mark.long
@pytest.mark.parametrize("is_saved_again", [False, True])
def test_what_another_node_uploads_again_is_not_deleted_where_few_checkpoints_are_kept(
    is_saved_again: bool, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's drain publishes 7 late: another node's has already uploaded its part of 10."""
    monkeypatch.setattr(tracker_writing, "_tracked", {})
    first = StoreJob(tmp_path, A)
    for iteration in (5, 10):
        first.save(iteration)
    first.track(10)
    uploaded = first.directory(10) / SaveId(B, 2).data_file_name(1)
    if is_saved_again:
        stores.write(uploaded, b"part")
    tracker_writing._track(first.run, 7, SaveId(B, 1), 1000, 1, False)
    assert tracked(first) == "7" and first.directory(10).exists() == uploaded.exists() == is_saved_again


@pytest.mark.long
def test_a_rollback_that_a_node_has_not_seen(store: ObjectStore, tmp_path: Path, away: Path) -> None:
    job = StoreJob(tmp_path, B, resumed=5)
    job.save(7)
    job.track(7)
    iteration, said = resume(job, away)
    assert iteration is None and tracked(job) == "7" and "is skipped" in said


@pytest.mark.long
@pytest.mark.parametrize("name", [f"iter_0000010/{MANIFEST_NAME}", JOBS_NAME])
def test_what_the_store_refuses_for_a_moment_is_not_taken_for_missing(
    name: str, store: ObjectStore, tmp_path: Path, away: Path
) -> None:
    job = StoreJob(tmp_path, B, resumed=5)
    job.save(10)
    job.track(10)
    store.fail(f"(HEAD|GET) .*{name}", UNAVAILABLE)
    with pytest.raises(StorageError):
        resume(job, away)
    store.heal()
    assert tracked(job) == "10"


def test_a_damaged_tracker_is_not_taken_for_an_older_checkpoint_while_the_newest_does_not_answer(
    store: ObjectStore, tmp_path: Path
) -> None:
    job = StoreJob(tmp_path, A)
    for iteration in (5, 10):
        job.save(iteration)
    job.track(10)
    stores.write(job.run / TRACKER_NAME, b"")
    assert resumable(job.run) == 10
    store.fail(f"HEAD .*iter_0000010/{MANIFEST_NAME}", UNAVAILABLE)
    with pytest.raises(StorageError, match=f"{job.directory(10)}/{MANIFEST_NAME} cannot be looked at: "):
        resumable(job.run)
    read = functools.partial(
        wrap_read_metadata, lambda name: (int(Path(name).read_text().replace("release", "0")), False)
    )
    with pytest.raises(OSError, match="status_code: 503"):
        read(str(job.run / TRACKER_NAME))
    store.heal()
    assert read(str(job.run / TRACKER_NAME)) == (10, False)
