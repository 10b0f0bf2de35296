"""Near tiers and branches of a run: what is brought home follows what the run has been resumed from.

Job A has 5 in --save, and 10 in near tiers alone. What later jobs do decides whether a node that was away
may bring back 10.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
from pathlib import Path

import pytest

from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import StorageError
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.manifest import Ancestor
from megatron_datastates.format.values import SaveId
from megatron_datastates.mcore.training.tracker_recovery import mend
from megatron_datastates.pipeline.near import job_notes
from megatron_datastates.pipeline.near.holdings import resumable
from megatron_datastates.pipeline.near.places import manifest_in
from megatron_datastates.pipeline.near.recovery import recover_newest
from megatron_datastates.pipeline.publication import Publication
from megatron_datastates.pipeline.runs.branches import Origin, Point, origin_in, point_in
from megatron_datastates.pipeline.runs.history import has_later_save
from megatron_datastates.pipeline.runs.jobs import JOBS_NAME, jobs_in
from megatron_datastates.pipeline.upkeep.fallback import _older as older_than
from tests.unit.states import OPTIONS
from tests.unit.test_near_tier import Nodes, abandon

STUCK = "drain write:0:EIO"  # nothing gets to --save
A, B, C = 0xA, 0xB, 0xC


class Job(Nodes):
    """A job on two nodes, which has resumed from an iteration in --save."""

    def __init__(
        self,
        tmp: Path,
        run_id: int,
        resumed: int | None = None,
        where: str = "near",
        near: bool = True,
        **changes: object,
    ) -> None:
        super().__init__(tmp)
        self.ranks.close()
        self.roots = [tmp / f"{where}0", tmp / f"{where}1"]
        own = [{"near": str(root) if near else ""} for root in self.roots]
        self.ranks = type(self.ranks)(2, own, **changes)
        for saver in self.ranks.savers:
            saver.session._run_id = run_id
        self.origin = Origin() if resumed is None else origin_in(self.directory(resumed), resumed)

    def save(self, iteration: int, origin: Origin | None = None) -> Publication:
        return super().save(iteration, origin or self.origin)

    def track(self, iteration: int) -> None:
        """Lets the tracker name what this job has published far."""
        self.close()
        (self.run / TRACKER_NAME).write_text(str(iteration))

    def lose(self) -> None:
        """Ends the job with all that its nodes have."""
        abandon(self)
        for root in self.roots:
            shutil.rmtree(root)

    def end_whole(self, iteration: int) -> None:
        """Ends the job; each node has an iteration's files of the other, as with copies."""
        abandon(self)
        for own, other in ((0, 1), (1, 0)):
            for path in self.near(own, iteration).glob("data-*"):
                shutil.copy(path, self.near(other, iteration))


def resume(job: Nodes, root: Path, wanted: int | None = None) -> tuple[int | None, str]:
    said: list[str] = []
    options = dataclasses.replace(OPTIONS, near=str(root))
    return recover_newest(job.run, options, said.append, wanted=wanted), "\n".join(said)


def tracked(job: Nodes) -> str:
    return (job.run / TRACKER_NAME).read_text()


@pytest.fixture
def away(tmp_path: Path) -> Path:
    """The near tier of a node that has 10 of job A, whole, and is away when the next job begins."""
    first = Job(tmp_path, A)
    first.save(5)
    first.track(5)
    for root in first.roots:
        shutil.rmtree(root)
    again = Job(tmp_path, A, faults=STUCK)
    for saver in again.ranks.savers:
        saver.session._ordinal = 5
    again.save(10)
    again.end_whole(10)
    shutil.move(tmp_path / "near1", tmp_path / "away")
    shutil.rmtree(tmp_path / "near0")
    return tmp_path / "away"


# -- what follows what -----------------------------------------------------------------------------------


def test_a_manifest_names_what_its_job_has_resumed_from(tmp_path: Path) -> None:
    first = Job(tmp_path, A)
    first.save(5)
    first.close()
    second = Job(tmp_path, B, resumed=5)
    second.save(7)
    second.close()
    third = Job(tmp_path, C, resumed=7)
    third.save(9)
    third.close()
    points = [point_in(first.directory(n), n) for n in (5, 7, 9)]
    assert all(point is not None for point in points)
    five, seven, nine = filter(None, points)
    assert five.ancestors == () and seven.ancestors == (Ancestor(5, str(SaveId(A, 1))),)
    assert nine.ancestors == (*seven.ancestors, Ancestor(7, str(SaveId(B, 1))))
    assert nine.follows(five) and nine.follows(seven) and seven.follows(five)
    assert not five.follows(nine) and not seven.follows(nine) and not nine.follows(nine)
    assert has_later_save(second.directory(7), SaveId(A, 1))
    assert not has_later_save(second.directory(7), SaveId(C, 1))
    assert not has_later_save(tmp_path, SaveId(A, 1)), "no checkpoint is there"


def test_a_later_save_of_the_job_that_was_resumed_from_is_not_followed() -> None:
    resumed = Point(7, SaveId(B, 1), (Ancestor(5, str(SaveId(A, 1))),))
    assert resumed.follows(Point(5, SaveId(A, 1), ()))
    assert not resumed.follows(Point(6, SaveId(A, 2), ()))
    assert not Point(6, SaveId(A, 2), ()).follows(resumed)


def test_checkpoints_of_another_format_are_known_by_their_iterations() -> None:
    after = Point(7, SaveId(B, 1), (Ancestor(5),))
    assert after.follows(Point(5, None, None)) and not after.follows(Point(6, None, None))


# -- rollbacks that a node has not seen ------------------------------------------------------------------


def test_without_a_rollback_it_is_brought_back(tmp_path: Path, away: Path) -> None:
    job = Job(tmp_path, B)
    assert resume(job, away)[0] == 10 and tracked(job) == "10"
    job.close()


@pytest.mark.parametrize("near", [True, False], ids=["with near tiers", "without"])
def test_a_rollback_whose_job_has_saved_far(near: bool, tmp_path: Path, away: Path) -> None:
    job = Job(tmp_path, B, resumed=5, near=near)
    job.save(7)
    job.save(8)
    job.track(8)
    iteration, said = resume(job, away)
    assert iteration is None and tracked(job) == "8"
    assert "iter_0000010 in a near tier is skipped" in said and "--ckpt-step 10 loads it" in said


def test_a_rollback_in_another_format(tmp_path: Path, away: Path) -> None:
    job = Job(tmp_path, B)
    directory = job.directory(7)
    directory.mkdir()
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (directory / ".metadata").write_bytes(b"x")
    job.track(7)
    iteration, said = resume(job, away)
    assert iteration is None and "does not follow iteration 7" in said


@pytest.mark.parametrize("damage", ["removed", "emptied", "cut", "zeros"])
def test_lists_of_jobs_are_not_needed_for_that(
    damage: str, tmp_path: Path, away: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, B, resumed=5)
    job.save(7)
    job.track(7)
    for path in tmp_path.rglob(JOBS_NAME):
        content = path.read_bytes()
        if damage == "removed":
            path.unlink()
        else:
            path.write_bytes({"emptied": b"", "cut": content[:-20], "zeros": bytes(40)}[damage])
    assert resume(job, away)[0] is None and tracked(job) == "7"
    assert ("is damaged" in caplog.text) == (damage != "removed")


def test_a_rollback_whose_job_could_not_be_noted(
    tmp_path: Path, away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(job_notes, "note_job", failing)
    job = Job(tmp_path, B, resumed=5)
    job.save(7)
    job.track(7)
    assert job.is_far(7), "the drain goes on"
    assert resume(job, away)[0] is None


@pytest.mark.parametrize("first", [7, 12])
def test_a_rollback_whose_saves_are_lost(first: int, tmp_path: Path, away: Path) -> None:
    job = Job(tmp_path, B, resumed=5, faults=STUCK)
    job.save(first)
    job.lose()
    iteration, said = resume(job, away)
    assert iteration is None and tracked(job) == "5"
    assert "a later job continued from iteration 5 without it" in said


def test_a_rollback_of_what_is_far(tmp_path: Path) -> None:
    first = Job(tmp_path, A)
    for iteration in (5, 10):
        first.save(iteration)
    first.track(10)
    job = Job(tmp_path, B, resumed=5, faults=STUCK)
    job.save(12)
    job.end_whole(12)
    iteration, said = resume(job, job.roots[0])
    assert iteration == 12 and tracked(job) == "12", said


def test_a_rollback_whose_saves_are_lost_is_not_undone_in_silence(tmp_path: Path) -> None:
    first = Job(tmp_path, A)
    for iteration in (5, 10):
        first.save(iteration)
    first.track(10)
    job = Job(tmp_path, B, resumed=5, faults=STUCK)
    job.save(12)
    job.lose()
    iteration, said = resume(job, job.roots[0])
    assert iteration is None and "--ckpt-step 5 begins there again" in said


def test_two_jobs_that_began_at_the_same_checkpoint(tmp_path: Path, away: Path) -> None:
    job = Job(tmp_path, B, resumed=5, faults=STUCK)
    job.save(10)
    job.end_whole(10)
    shutil.copytree(next(job.roots[0].iterdir()), next(away.iterdir()), dirs_exist_ok=True)
    manifest = manifest_in(next(away.iterdir()) / "iter_0000010")
    assert manifest is not None and manifest.save_id.run_id == B
    assert resume(job, away)[0] == 10
    job.check(10)


def test_more_jobs_than_the_list_keeps(tmp_path: Path, away: Path) -> None:
    for n in range(102):
        job_notes.note_job(away.parent / "far" / "run", SaveId(0x1000 + n, 1), 5)
    assert len(jobs_in(tmp_path / "far" / "run")) == 100
    iteration, said = resume(Job(tmp_path, B), away)
    assert iteration is None and "is skipped" in said


def test_a_copy_of_the_run_that_went_another_way_and_was_copied_back(tmp_path: Path, away: Path) -> None:
    run = tmp_path / "far" / "run"
    shutil.copytree(run, tmp_path / "copy")
    other = Job(tmp_path, B, resumed=5, where="other")
    other.run = tmp_path / "copy"
    other.save(6)
    other.save(9)
    other.track(9)
    shutil.rmtree(run)
    shutil.copytree(other.run, run)
    assert resume(Job(tmp_path, C), away)[0] is None


# -- which branch is the present one ----------------------------------------------------------------------


def together(one: Path, other: Path, tmp: Path) -> Path:
    """Returns a near tier with what two have: as if a node of each were in the next job."""
    both = tmp / "both"
    for root in (one, other):
        for folder in root.iterdir():
            shutil.copytree(folder, both / folder.name, dirs_exist_ok=True)
    return both


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_job_that_was_killed_before_the_run_names_it(is_noted: bool, tmp_path: Path, away: Path) -> None:
    job = Job(tmp_path, B, resumed=5, where="new", faults=STUCK)
    job.save(7)
    job.end_whole(7)
    (job.run / JOBS_NAME).unlink()
    Job(tmp_path, A, where="unused")
    if not is_noted:
        for path in job.roots[0].rglob(JOBS_NAME):
            path.unlink()
    both = together(away, job.roots[0], tmp_path)
    assert resume(job, both)[0] == 7, "its manifest says that it resumed from a save of job A"


def test_a_job_that_went_on_from_a_later_step_of_an_older_branch(tmp_path: Path) -> None:
    first = Job(tmp_path, A)
    for iteration in (5, 10):
        first.save(iteration)
    first.track(10)
    left = Job(tmp_path, B, resumed=5, where="left")
    left.save(7)
    left.track(7)
    again = Job(tmp_path, B, resumed=7, where="left", faults=STUCK)
    for saver in again.ranks.savers:
        saver.session._ordinal = 5
    again.save(9)
    again.end_whole(9)
    last = Job(tmp_path, C, resumed=10, faults=STUCK)
    last.save(12)
    last.lose()
    iteration, said = resume(last, left.roots[0])
    assert iteration == 9, "as 7, which the tracker names, was left as well"
    assert "iteration 9 in" in said and "a later job continued from iteration 10 without it" in said
    assert "--ckpt-step 10 begins there again" in said


def test_a_job_counts_from_the_beginning_of_its_first_save(tmp_path: Path, away: Path) -> None:
    job = Job(tmp_path, B, resumed=5, where="new", faults="write:1:EIO,drain write:0:EIO")
    with contextlib.suppress(StorageError):
        job.save(7)
    abandon(job)
    assert [(one.run_id, one.origin) for one in jobs_in(job.run)] == [(A, 0), (B, 5)]
    iteration, said = resume(job, away)
    assert iteration is None and "a later job continued from iteration 5 without it" in said


def test_a_job_that_was_begun_after_the_tracker_was_set_back(tmp_path: Path) -> None:
    first = Job(tmp_path, A)
    for iteration in (5, 8):
        first.save(iteration)
    first.track(8)
    (first.run / TRACKER_NAME).write_text("5")
    job = Job(tmp_path, C, resumed=8, faults=STUCK)
    job.save(10)
    job.end_whole(10)
    assert resume(job, job.roots[0])[0] == 10


def test_a_damaged_tracker_stays_on_the_present_branch(tmp_path: Path) -> None:
    first = Job(tmp_path, A)
    for iteration in (5, 6, 10):
        first.save(iteration)
    first.track(10)
    job = Job(tmp_path, B, resumed=5)
    for iteration in (7, 8):
        job.save(iteration)
    job.track(8)
    for listed in (True, False):
        if not listed:
            (job.run / JOBS_NAME).unlink()
        (job.run / TRACKER_NAME).write_text("")
        assert resumable(job.run) == 8
        mend(job.run / TRACKER_NAME)
        assert tracked(job) == "8"
        assert older_than(job.directory(8), job.run, 9)[0] == [7, 5, 6]


def test_a_fall_back_stays_on_the_branch_that_is_loaded(tmp_path: Path) -> None:
    first = Job(tmp_path, A, near=False)
    for iteration in (5, 8, 10):
        first.save(iteration)
    first.track(10)
    left = Job(tmp_path, B, resumed=5, near=False)
    for iteration in (6, 7):
        left.save(iteration)
    left.track(7)
    job = Job(tmp_path, C, resumed=10, near=False)
    for iteration in (12, 14):
        job.save(iteration)
    job.track(14)
    assert older_than(job.directory(12), job.run, 9)[0] == [10, 8, 5, 7, 6]


def test_of_a_branch_that_was_left_the_newest_is_resumed_from(tmp_path: Path) -> None:
    first = Job(tmp_path, A)
    for iteration in (5, 10):
        first.save(iteration)
    first.track(10)
    again = Job(tmp_path, A, faults=STUCK)
    for saver in again.ranks.savers:
        saver.session._ordinal = 5
    again.save(12)
    again.end_whole(12)
    lost = Job(tmp_path, C, resumed=5, where="lost", faults=STUCK)
    lost.save(6)
    lost.lose()
    iteration, said = resume(again, again.roots[0])
    assert iteration == 12, "10, which the tracker names, was left as well"
    assert "--ckpt-step 5 begins there again" in said


def test_of_a_branch_that_was_left_what_it_has_left_itself_is_not_resumed_from(tmp_path: Path) -> None:
    first = Job(tmp_path, A)
    for iteration in (5, 10):
        first.save(iteration)
    first.track(10)
    again = Job(tmp_path, A, where="away", faults=STUCK)
    for saver in again.ranks.savers:
        saver.session._ordinal = 5
    again.save(12)
    again.end_whole(12)
    job = Job(tmp_path, B, resumed=10, faults=STUCK)
    job.save(11)
    job.end_whole(11)
    lost = Job(tmp_path, C, resumed=5, where="lost", faults=STUCK)
    lost.save(6)
    lost.lose()
    iteration, said = resume(job, together(again.roots[0], job.roots[0], tmp_path))
    assert iteration == 11, said
    assert (
        "iter_0000012 in a near tier is skipped: a later job continued from iteration 10 without it" in said
    )


def test_a_tracker_that_was_set_to_release(tmp_path: Path, away: Path) -> None:
    job = Job(tmp_path, A)
    os.utime(job.run / JOBS_NAME, (1, 1))
    (job.run / TRACKER_NAME).write_text("release")
    iteration, said = resume(job, away)
    assert iteration is None and "the tracker was set back to release after it had named 5" in said
    assert tracked(job) == "release"


def test_what_is_not_resumed_from_is_named_as_it_can_be_had(tmp_path: Path, away: Path) -> None:
    job = Job(tmp_path, B, resumed=5)
    for iteration in (7, 10):
        job.save(iteration)
    job.track(7)
    _, said = resume(job, away)
    assert "iter_0000010 in a near tier is skipped" in said
    assert "--ckpt-step" not in said, "that is another one"


# -- chosen by people ------------------------------------------------------------------------------------


def test_a_wanted_iteration_is_brought_from_a_branch_that_was_left(tmp_path: Path, away: Path) -> None:
    job = Job(tmp_path, B, resumed=5)
    job.save(7)
    job.track(7)
    assert resume(job, away)[0] is None
    iteration, said = resume(job, away, wanted=10)
    assert iteration == 10 and "iteration 10 is not in" in said
    job.check(10)
    assert tracked(job) == "7", "as with any load of a chosen iteration"
    assert resume(job, away, wanted=10) == (None, ""), "it is there now"
    assert resume(job, away, wanted=11) == (None, "")
    after = Job(tmp_path, C, resumed=10, faults=STUCK)
    after.save(12)
    after.end_whole(12)
    assert resume(after, after.roots[0])[0] == 12, "the run resumed from there"


def test_a_tracker_that_was_set_back_is_respected(tmp_path: Path) -> None:
    job = Job(tmp_path, A)
    for iteration in (5, 8):
        job.save(iteration)
    job.track(8)
    again = Job(tmp_path, B, resumed=8, faults=STUCK)
    again.save(10)
    again.end_whole(10)
    (job.run / TRACKER_NAME).write_text("5")
    iteration, said = resume(job, again.roots[0])
    assert iteration is None and "the tracker was set back to 5 after it had named 8" in said
    (job.run / TRACKER_NAME).write_text("8")
    assert resume(job, again.roots[0])[0] == 10


# -- two jobs at a time ----------------------------------------------------------------------------------


def test_a_job_that_was_started_twice_does_not_cost_the_other_one_its_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, A, faults=STUCK)
    for iteration in (1, 2, 3):
        job.save(iteration)
    twin = Job(tmp_path, B, where="other", faults=STUCK)
    twin.save(1)
    twin.lose()
    with caplog.at_level(logging.WARNING):
        for iteration in (4, 5, 6):
            job.save(iteration)
        job.end_whole(6)
    assert caplog.text.count("another job (000000000000000b) has begun to save this run") == 1
    assert [one.run_id for one in jobs_in(job.run)] == [B, A]
    assert resume(job, job.roots[0])[0] == 6


def test_a_restart_within_the_process_is_another_job(tmp_path: Path) -> None:
    job = Job(tmp_path, A)
    for iteration in (5, 10):
        job.save(iteration)
    for saver in job.ranks.savers:
        assert saver.near is not None
        saver.near.drain.close(abandon=False)
        saver.near.drain._thread, saver.near.drain._closing = None, False
    (job.run / TRACKER_NAME).write_text("10")
    for saver in job.ranks.savers:
        assert saver.near is not None
        saver.session._run_id, saver.session._ordinal = B, 0
        saver.near.drain._copier._faults = Faults(STUCK)
    job.origin = origin_in(job.directory(5), 5)
    job.save(7)
    assert job.is_far(7), "else the next job would resume from iteration 10, which --save names"
    abandon(job)
    assert [(one.run_id, one.origin) for one in jobs_in(job.run)] == [(A, 0), (B, 5)]
