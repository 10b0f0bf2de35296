"""Near tiers: what cannot be read when a job looks what to resume from is an error, and never an answer.

While a checkpoint is loaded, what cannot be read there is read from the checkpoint's own directory instead.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.config import Options
from megatron_datastates.engine.reader import Reader
from megatron_datastates.errors import OptionError, StorageError
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.near import recovery
from megatron_datastates.pipeline.near.holdings import require_readable_tracked
from megatron_datastates.pipeline.near.nodes import NODES_NAME
from megatron_datastates.pipeline.near.places import manifest_in, near_folder, near_root, near_run
from megatron_datastates.pipeline.runs.jobs import JOBS_NAME
from tests.unit import test_near_branches as branches
from tests.unit.test_near_branches import A, B, Job, resume, tracked
from tests.unit.test_near_tier import Nodes

away = branches.away  # the fixture


def fail_to_read(
    monkeypatch: pytest.MonkeyPatch, text: str, calls: Sequence[str] = ("stat", "open", "listdir", "scandir")
) -> None:
    """Lets all files fail whose path has a text, as a file system's server does that restarts."""

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and text in os.fspath(path):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), os.fspath(path))
            return original(path, *rest, **options)

        return call

    for name in calls:
        monkeypatch.setattr(os, name, failing(getattr(os, name)))


@pytest.mark.parametrize("calls", [("stat", "open", "listdir", "scandir"), ("open",)])
@pytest.mark.parametrize("text", ["far/run/iter_0000010", f"far/run/{JOBS_NAME}", f"far/run/{TRACKER_NAME}"])
def test_what_cannot_be_read_for_a_moment_is_not_taken_for_missing(
    text: str, calls: Sequence[str], tmp_path: Path, away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, A)
    job.save(10)
    job.track(10)
    with monkeypatch.context() as patched:
        fail_to_read(patched, text, calls)
        with pytest.raises(StorageError, match="Stale file handle"):
            resume(job, away)
    assert tracked(job) == "10"


def test_ranks_that_choose_nothing_look_whether_they_can_read_what_is_tracked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, A)
    job.save(10)
    job.track(10)
    require_readable_tracked(tmp_path / "far" / "run")
    fail_to_read(monkeypatch, "far/run/iter_0000010")
    with pytest.raises(StorageError, match=r"iter_0000010 cannot be looked at: Stale file handle"):
        require_readable_tracked(tmp_path / "far" / "run")


def test_a_wanted_checkpoint_that_cannot_be_read_is_not_replaced(
    tmp_path: Path, away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, B, resumed=5)
    job.save(10)
    job.track(10)
    with monkeypatch.context() as patched:
        fail_to_read(patched, "far/run/iter_0000010")
        with pytest.raises(StorageError, match="Stale file handle"):
            resume(job, away, wanted=10)
    job.check(10)
    assert manifest_of(job, 10) == B


def manifest_of(job: Nodes, iteration: int) -> int:
    manifest = manifest_in(job.directory(iteration))
    assert manifest is not None
    return manifest.save_id.run_id


def test_a_link_to_what_is_away_ends_no_job(tmp_path: Path, away: Path) -> None:
    job = Job(tmp_path, A)
    (job.run / "iter_0000099").symlink_to(job.run / "iter_0000099")
    assert resume(job, away)[0] == 10


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("name", ["mp_rank_00", ".metadata"])
def test_a_tracked_checkpoint_in_another_format_of_megatrons(
    name: str, is_over: bool, tmp_path: Path, away: Path
) -> None:
    job = Job(tmp_path, B)
    (job.directory(11) / name).mkdir(parents=True)
    if is_over:  # a save of ours that was killed there
        (job.directory(11) / SaveId(B, 1).data_file_name(0)).touch()
    (job.run / TRACKER_NAME).write_text("11")
    assert resume(job, away)[0] is None and tracked(job) == "11"


@pytest.mark.parametrize("content", [b'{"own":0,"nodes":[["\xff",[0,1]]]}', b"[" * 100_000, b""])
def test_a_damaged_list_of_nodes_is_left_out(content: bytes, tmp_path: Path, away: Path) -> None:
    (path,) = away.rglob(NODES_NAME)
    path.write_bytes(content)
    assert resume(Job(tmp_path, B), away)[0] == 10


def test_an_error_that_nobody_expected_fails_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def held_in(folder: Path) -> list[Any]:
        raise ZeroDivisionError

    monkeypatch.setattr(recovery, "held_in", held_in)
    (near_run(tmp_path / "near0", tmp_path / "far" / "run") / "iter_0000001").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"rank 0: .*what to resume from: ZeroDivisionError"):
        resume(Nodes(tmp_path), tmp_path / "near0")


def test_a_variable_that_is_not_set_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resume(Nodes(tmp_path), Path("$NOT_SET"))[0] is None
    assert "a variable in this near tier's name is not set" in caplog.text


def test_an_error_of_any_rank_fails_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(self: object) -> list[recovery.Node]:
        return [recovery.Node(), recovery.Node(error="the tracker cannot be read: Stale file handle")]

    monkeypatch.setattr(recovery._Recovery, "look", look)
    with pytest.raises(StorageError, match="Stale file handle"):
        resume(Nodes(tmp_path), tmp_path / "near0")


def test_a_near_tier_is_in_a_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE", "msc://store")
    with pytest.raises(OptionError, match="the near tier msc://store/near is in an object store"):
        near_root("$NODE/near")
    monkeypatch.setenv("NODE", "/disk")
    assert near_root("$NODE/near") == Path("/disk/near")
    monkeypatch.setenv("HOME", "/home/user")  # a shell leaves it to programs after `--datastates-near=`
    assert near_root("~/near") == Path("/home/user/near")
    monkeypatch.setenv("NODE", "")
    with pytest.raises(OptionError, match=r"the near tier \$NODE \(--datastates-near\) is an empty path"):
        near_root("$NODE")


# -- in the middle of a load --------------------------------------------------------------------------------

WANTED = torch.arange(1000.0)


@pytest.fixture
def half_near(tmp_path: Path) -> Checkpoint:
    """An open checkpoint whose data file is in its own directory and in the near tier."""
    far, options = tmp_path / "run" / "iter_0000001", Options(near=str(tmp_path / "near"))
    ds.save({"w": WANTED}, far)
    near = near_folder(near_root(options.near), far)
    near.mkdir(parents=True)
    for path in far.glob("data-*"):
        shutil.copy(path, near)
    return Checkpoint.open(far, options)


def test_a_near_file_that_fails_during_a_load_is_read_from_the_checkpoint_instead(
    half_near: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, tried = Reader.read, []

    def failing(self: Reader, sources: Sequence[Any], *rest: Any, **options: Any) -> Any:
        tried.append([Path(path).is_relative_to(tmp_path / "near") for path, _ in sources])
        if any(tried[-1]):
            raise StorageError("Input/output error in the near tier")
        return read(self, sources, *rest, **options)

    monkeypatch.setattr(Reader, "read", failing)
    assert torch.equal(half_near.read_tensor("w"), WANTED)
    assert f"Input/output error in the near tier; reading from {half_near.directory} instead" in caplog.text
    assert torch.equal(half_near.read_tensor("w"), WANTED)
    assert tried == [[True], [False], [False]], "the near file is not tried again"


def test_a_near_tier_that_cannot_be_looked_at_is_read_from_the_checkpoint_instead(
    half_near: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_to_read(monkeypatch, str(tmp_path / "near"))
    assert torch.equal(half_near.read_tensor("w"), WANTED)
    assert f"; reading it from {half_near.directory}" in caplog.text


def test_a_near_file_whose_bytes_are_damaged_is_read_from_the_checkpoint_instead(
    half_near: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = (tmp_path / "near").rglob("data-*")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert torch.equal(half_near.read_tensor("w"), WANTED)
    assert f"reading from {half_near.directory} instead" in caplog.text


def test_threads_that_meet_a_damaged_near_file_at_once_all_read_the_checkpoint_instead(
    half_near: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = (tmp_path / "near").rglob("data-*")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    read, have_read = Reader.read, threading.Barrier(4)

    def reading(self: Reader, sources: Sequence[Any], *rest: Any, **options: Any) -> Any:
        outcome = read(self, sources, *rest, **options)
        if any(Path(path).is_relative_to(tmp_path / "near") for path, _ in sources):
            have_read.wait(60.0)
        return outcome

    monkeypatch.setattr(Reader, "read", reading)
    half_near.footer(0)
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(half_near.read_tensor, ["w"] * 4):
            assert torch.equal(found, WANTED)
    assert f"reading from {half_near.directory} instead" in caplog.text


def test_a_near_file_of_another_save_is_read_from_the_checkpoint_instead(
    half_near: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ds.save({"w": -WANTED}, tmp_path / "other")
    (near,) = (tmp_path / "near").rglob("data-*")
    (other,) = (tmp_path / "other").glob("data-*")
    shutil.copy(other, near)
    assert torch.equal(half_near.read_tensor("w"), WANTED)
    assert f"; reading it from {half_near.directory}" in caplog.text
