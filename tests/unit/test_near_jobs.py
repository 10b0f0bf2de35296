"""The list of the jobs that have saved a run: who writes it when, and which job counts as a later one."""

from __future__ import annotations

import logging
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_datastates.errors import FormatError, UnsupportedFormatError
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.manifest import Ancestor
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.near import job_notes
from megatron_datastates.pipeline.near.holdings import named_jobs
from megatron_datastates.pipeline.near.room import Room
from megatron_datastates.pipeline.runs import history
from megatron_datastates.pipeline.runs.branches import Origin, Point, origin_from
from megatron_datastates.pipeline.runs.history import History, by_branch
from megatron_datastates.pipeline.runs.jobs import (
    JOBS_NAME,
    Job,
    jobs_in,
    note_job,
)
from tests.unit.test_near_tier import abandon, killed, recover
from tests.unit.test_near_tier_trouble import next_job

A, B, C, D = 0xA, 0xB, 0xC, 0xD
LATER = [Job(0x1000 + n, 5) for n in range(100)]  # as many as a list keeps


# -- lists -----------------------------------------------------------------------------------------------


def test_the_job_that_has_saved_last_is_the_last_one(tmp_path: Path) -> None:
    assert jobs_in(tmp_path) == []
    assert note_job(tmp_path, SaveId(A, 1), 0) is None
    assert note_job(tmp_path, SaveId(A, 2), 0) is None
    assert note_job(tmp_path, SaveId(B, 1), 7) is None, "a new job is no surprise"
    assert jobs_in(tmp_path) == [Job(A, 0), Job(B, 7)]
    text = (tmp_path / JOBS_NAME).read_text()
    assert text.startswith("datastates-jobs 2 ") and text.endswith(
        "\n000000000000000a 0\n000000000000000b 7\n"
    )
    assert note_job(tmp_path, SaveId(A, 3), 0) == Job(B, 7), "both have saved since"
    assert jobs_in(tmp_path) == [Job(B, 7), Job(A, 0)]


def test_jobs_that_another_list_knows_come_before(tmp_path: Path) -> None:
    note_job(tmp_path, SaveId(B, 1), 7)
    note_job(tmp_path, SaveId(D, 1), 9, [Job(A, 0), Job(B, 7), Job(C, 8), Job(D, 9)])
    assert jobs_in(tmp_path) == [Job(A, 0), Job(B, 7), Job(C, 8), Job(D, 9)]
    note_job(tmp_path, SaveId(D, 2), 9, [Job(0xE, 1), Job(B, 7)])
    assert jobs_in(tmp_path) == [Job(0xE, 1), Job(A, 0), Job(B, 7), Job(C, 8), Job(D, 9)]


def test_only_the_latest_jobs_are_kept(tmp_path: Path) -> None:
    for job in [Job(A, 0), *LATER]:
        note_job(tmp_path, SaveId(job.run_id, 1), job.origin)
    assert jobs_in(tmp_path) == LATER


def test_what_a_job_resumed_from_is_kept_once_it_is_known(tmp_path: Path) -> None:
    first = SaveId(A, 4)
    for resumed, noted in [(None, None), (first, first), (None, first), (SaveId(A, 9), first)]:
        note_job(tmp_path, SaveId(B, 1), 7, resumed=resumed)
        assert jobs_in(tmp_path) == [Job(B, 7, noted)]


ONE = b"000000000000000a 1\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        ONE,
        b"datastates-jobs 1 00000000\n" + ONE,
        b"datastates-jobs 1 b05b1fd9\n",
        b"datastates-jobs 0 00000000\n" + ONE,
        b"\xff\xfe",
        bytes(64),
    ],
)
def test_a_damaged_list_is_refused_and_kept(content: bytes, tmp_path: Path) -> None:
    (tmp_path / JOBS_NAME).write_bytes(content)
    with pytest.raises(FormatError, match="is damaged"):
        note_job(tmp_path, SaveId(A, 1), 1)
    assert (tmp_path / JOBS_NAME).read_bytes() == content


@pytest.mark.parametrize("lines", [ONE, b"what a later release writes\n"])
def test_a_list_of_a_later_release_is_named_so_and_kept(
    lines: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = b"datastates-jobs/2 1 %08x\n%s" % (zlib.crc32(lines), lines)
    (tmp_path / JOBS_NAME).write_bytes(content)
    with pytest.raises(UnsupportedFormatError, match="was written by a later release"):
        note_job(tmp_path, SaveId(A, 1), 1)
    assert (tmp_path / JOBS_NAME).read_bytes() == content
    assert named_jobs(tmp_path) == () and "update this installation" in caplog.text
    (tmp_path / JOBS_NAME).write_bytes(content[:-3] + content[-2:])
    with pytest.raises(FormatError, match="is damaged"):
        jobs_in(tmp_path)


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path: Path) -> None:
    for save_id in (SaveId(A, 1), SaveId(B, 1)):
        note_job(tmp_path, save_id, 7)
    path, whole = tmp_path / JOBS_NAME, (tmp_path / JOBS_NAME).read_bytes()
    flipped = [
        whole[:n] + bytes([whole[n] ^ 1 << bit]) + whole[n + 1 :]
        for n in range(len(whole))
        for bit in range(8)
    ]
    for content in [*flipped, *(whole[:n] for n in range(len(whole)))]:
        path.write_bytes(content)
        with pytest.raises(FormatError, match="is damaged"):
            jobs_in(tmp_path)


# -- which job is a later one ----------------------------------------------------------------------------


def point(run_id: int, iteration: int, *ancestors: int) -> Point:
    """Returns a checkpoint whose job has resumed from the first saves of others."""
    return Point(iteration, SaveId(run_id, 9), tuple(Ancestor(1, str(SaveId(one, 1))) for one in ancestors))


@pytest.mark.parametrize(
    ("checkpoint", "lists", "later"),
    [
        (point(A, 10), [[Job(A, 0), Job(B, 7), Job(C, 9)]], B),
        (point(A, 8), [[Job(A, 0), Job(B, 7), Job(C, 9)]], B),
        (point(A, 7), [[Job(A, 0), Job(B, 7), Job(C, 9)]], None),  # B resumed from it
        (point(B, 12), [[Job(A, 0), Job(B, 7), Job(C, 9)]], C),
        (point(B, 9), [[Job(A, 0), Job(B, 7), Job(C, 9)]], None),
        (point(C, 20), [[Job(A, 0), Job(B, 7), Job(C, 9)]], None),  # the last job
        (point(D, 20), [[Job(A, 0), Job(B, 7)]], A),  # lists name its jobs: the others are later
        (point(D, 20, A, B), [[Job(A, 0), Job(B, 7)]], None),  # it has resumed from them
        (point(D, 20), [], None),
        (point(A, 10), [[Job(B, 5)], [Job(A, 0)]], None),  # noted near alone: the outage of --save
        (point(A, 10), [[Job(A, 0), Job(B, 5)], [Job(A, 0)]], B),  # a node that was away
        (point(A, 10), [[Job(A, 0)], [Job(A, 0), Job(B, 5)]], B),  # B was killed in its first save
        (point(A, 10), [[Job(B, 5), Job(A, 0)], [Job(A, 0), Job(B, 5)]], None),  # the first list counts
        (point(A, 10), [LATER, [Job(A, 0)]], 0x1000),  # away for longer than the list reaches back
        (point(A, 10), [LATER, [*LATER[1:], Job(A, 5)]], None),  # the outage of --save
        (point(A, 10), [[Job(A, 0)], LATER], None),  # a node that was away since long before that job
        (point(A, 10), [[LATER[0], Job(A, 5)], LATER], LATER[1].run_id),  # and has seen one that came before
    ],
)
def test_a_later_job_that_went_on_from_before_passes_a_checkpoint_by(
    checkpoint: Point, lists: list[list[Job]], later: int | None
) -> None:
    found = History(lists, [checkpoint]).abandoned_by(checkpoint)
    assert (found and found.run_id) == later


def test_that_a_full_list_does_not_name_a_job_is_no_proof_that_others_are_later() -> None:
    assert History([LATER]).abandoned_by(point(A, 10)) is not None
    assert History([LATER]).abandoned_by(point(A, 10), surely=True) is None


def test_what_a_job_resumed_from_is_kept(tmp_path: Path) -> None:
    note_job(tmp_path, SaveId(B, 1), 7, [Job(A, 0)], SaveId(A, 3))
    note_job(tmp_path, SaveId(B, 2), 7)
    assert jobs_in(tmp_path) == [Job(A, 0), Job(B, 7, SaveId(A, 3))]
    note_job(tmp_path, SaveId(A, 4), 0)
    note_job(tmp_path, SaveId(A, 5), 2, resumed=SaveId(C, 1))
    assert jobs_in(tmp_path) == [Job(B, 7, SaveId(A, 3)), Job(A, 2, SaveId(C, 1))]


A_FIRST = (Ancestor(5, str(SaveId(A, 5))),)
KNOWN = [Job(A, 0), Job(B, 5, SaveId(A, 5)), Job(C, 10, SaveId(A, 10))]


@pytest.mark.parametrize(
    ("checkpoint", "later"),
    [
        (Point(5, SaveId(A, 5), ()), None),
        (Point(9, SaveId(B, 4), A_FIRST), C),
        (Point(10, SaveId(A, 10), ()), None),  # left by B, and then gone back to
        (Point(11, SaveId(A, 11), ()), B),
        (Point(12, SaveId(C, 1), (Ancestor(10, str(SaveId(A, 10))),)), None),
    ],
)
def test_a_later_job_is_known_by_what_it_resumed_from(checkpoint: Point, later: int | None) -> None:
    found = History([KNOWN], [checkpoint]).abandoned_by(checkpoint)
    assert (found and found.run_id) == later


@pytest.mark.parametrize("resumed", [SaveId(A, 1), SaveId(B, 1)])
def test_jobs_that_are_said_to_have_resumed_from_each_other_hold_nobody(resumed: SaveId) -> None:
    lists, left = [[Job(A, 0, SaveId(B, 1)), Job(B, 5, resumed)]], Point(10, SaveId(C, 10), ())
    found = History(lists, [left]).abandoned_by(left)
    assert found is not None and found.run_id == A, "by its iteration"


def test_of_a_checkpoint_that_was_written_anew_iterations_say_whether_a_job_has_it() -> None:
    """It may be the one that the job resumed from, under a save id of its own and without ancestors."""
    lists, later = [[Job(B, 5)]], Point(7, SaveId(B, 1), A_FIRST)
    for iteration, left in ((5, False), (6, True)):
        anew = Point(iteration, SaveId(0xF, 1), None)
        assert (History(lists, [anew, later]).abandoned_by(anew) is not None) == left


def test_a_job_that_no_list_names_beside_another_is_known_by_what_it_resumed_from() -> None:
    left, lists = Point(10, SaveId(A, 10), ()), [KNOWN[:1], KNOWN[1:2]]
    for known in (History(lists), History([KNOWN[:1]], [Point(7, SaveId(B, 1), A_FIRST)])):
        found = known.abandoned_by(left, surely=True)
        assert found is not None and found.run_id == B
    assert History([KNOWN[:1], [Job(B, 5)]]).abandoned_by(left, surely=True) is None, "nobody knows"


def test_a_line_with_a_save_id_counts_before_one_without_it() -> None:
    without = [Job(A, 0), Job(B, 5), Job(C, 10)]
    for lists in ([KNOWN, without], [without, KNOWN]):
        found = History(lists).abandoned_by(Point(9, SaveId(B, 4), A_FIRST))
        assert found is not None and found.run_id == C


def test_a_job_that_was_resumed_from_and_has_saved_last_passes_the_other_by() -> None:
    twin, lists = Point(9, SaveId(B, 4), A_FIRST), [[Job(B, 5, SaveId(A, 5)), Job(A, 0)]]
    found = History(lists, [twin]).abandoned_by(twin)
    assert found is not None and found.run_id == A
    assert History([lists[0][::-1]], [twin]).abandoned_by(twin) is None


def test_which_of_two_jobs_came_later() -> None:
    assert History([[Job(A, 0), Job(B, 5)]]).comes_later(point(B, 7), point(A, 10))
    assert not History([[Job(A, 0), Job(B, 5)]]).comes_later(point(A, 10), point(B, 7))
    assert History([[Job(A, 0)], [Job(A, 0), Job(B, 5)]]).comes_later(point(B, 7), point(A, 10))
    assert not History([[Job(A, 0)], [Job(B, 5)]]).comes_later(point(B, 7), point(A, 10)), "nobody knows"
    assert History([]).comes_later(point(B, 7, A), point(A, 10)), (
        "it resumed from an earlier save of that job"
    )


def test_what_is_not_known_before_a_checkpoint_is_not_called_left() -> None:
    resumed = Point(200, SaveId(B, 1), None)  # whose job did not know what it resumed from
    last = Point(300, SaveId(C, 1), origin_from(resumed, 200).ancestors)
    assert last.follows(resumed) and not last.knows_its_ancestors
    jobs = [Job(A, 0), Job(B, 150), Job(C, 200, SaveId(B, 1))]
    assert History([jobs], [last]).abandoned_by(Point(100, SaveId(A, 1), ())) is None


@pytest.mark.parametrize(
    ("is_listed", "tracked", "expected", "reads"),
    [
        (True, "", [6, 5], 59),
        (False, "", [6, 5], 59),
        (False, "6", [6, 5], 60),
        (False, "59", [59, 58], 17),
    ],
)
def test_a_branch_of_many_checkpoints_that_was_left(
    is_listed: bool,
    tracked: str,
    expected: list[int],
    reads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = {n: Point(n, SaveId(A, n), ()) for n in range(1, 60)}
    points[6] = Point(6, SaveId(B, 1), (Ancestor(5, str(SaveId(A, 5))),))
    read: list[int] = []

    def known_point(directory: Path, iteration: int) -> Point:
        read.append(iteration)
        return points[iteration]

    monkeypatch.setattr(history, "known_point", known_point)
    if is_listed:
        note_job(tmp_path, SaveId(B, 1), 5, [Job(A, 0)], SaveId(A, 5))
    (tmp_path / TRACKER_NAME).write_text(tracked)
    assert by_branch(tmp_path, dict.fromkeys(points, tmp_path), 2) == expected
    assert len(read) == reads, "of large manifests, as few as say it"
    assert by_branch(tmp_path, dict.fromkeys([4, 5, 7], tmp_path), 2, points[6]) == [5, 4]


def test_of_thousands_of_checkpoints_each_is_judged_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[Point | None] = []

    def is_left(point: Point | None, *rest: object) -> bool:
        judged.append(point)
        return False

    def known_point(directory: Path, iteration: int) -> Point:
        return Point(iteration, SaveId(A, iteration), None)

    monkeypatch.setattr(history, "known_point", known_point)
    monkeypatch.setattr(history, "_is_left", is_left)
    assert by_branch(tmp_path, dict.fromkeys(range(1, 5001), tmp_path)) == [5000]
    assert len(judged) < 3 * 5000


def test_what_a_checkpoint_names_of_its_ancestors_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def parse(text: str) -> SaveId:
        parsed.append(text)
        return SaveId(int(text), 1)

    ancestors = tuple(Ancestor(number, str(number)) for number in range(100))
    point = Point(100, SaveId(100, 1), ancestors)
    monkeypatch.setattr(SaveId, "parse", parse)
    assert [point.reached.get(number) for number in range(101)] == [1] * 100 + [None]
    assert len(parsed) == 100


# -- jobs ------------------------------------------------------------------------------------------------


def test_a_job_that_goes_on_is_no_rollback(tmp_path: Path) -> None:
    nodes = killed(tmp_path)  # with iteration 3 near
    assert recover(nodes)[0] == 3
    again = next_job(tmp_path, faults="drain write:0:EIO")
    again.save(4)
    abandon(again)
    for path in again.near(1, 4).glob("data-*"):
        shutil.copy(path, again.near(0, 4))
    assert recover(next_job(tmp_path, run_id=6))[0] == 4


def test_jobs_are_noted_in_save_and_in_near_tiers(tmp_path: Path) -> None:
    for run_id, iteration, origin in ((4, 1, Origin()), (5, 21, Origin(11, None))):
        nodes = next_job(tmp_path, run_id=run_id)
        nodes.save(iteration, origin)
        nodes.save(iteration + 10, origin)
        nodes.close()
    for folder in (nodes.run, nodes.near(0, 1).parent, nodes.near(1, 1).parent):
        assert jobs_in(folder) == [Job(4, 0), Job(5, 11)]


def test_a_note_that_could_not_be_written_is_kept_for_the_next_call(tmp_path: Path) -> None:
    run, notes = tmp_path / "run", job_notes.JobNotes()
    run.touch()  # no directory
    notes.add(job_notes.JobNote(run, SaveId(A, 1), 0, None), [run])
    notes.write()
    run.unlink()
    run.mkdir()
    notes.write()
    assert [job.run_id for job in jobs_in(run)] == [A]


def test_a_list_that_cannot_be_written_is_tried_again_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[Path] = []

    def failing(folder: Path, save_id: SaveId, *rest: Any) -> Job | None:
        attempts.append(folder)
        if attempts.count(folder) < 3:
            raise OSError(5, "Input/output error")
        return note_job(folder, save_id, *rest)

    monkeypatch.setattr(job_notes, "note_job", failing)
    nodes = next_job(tmp_path)
    with caplog.at_level(logging.WARNING):
        for iteration in (1, 2, 3, 4):
            nodes.save(iteration, Origin())
        nodes.close()
    assert jobs_in(nodes.run) == [Job(5, 0)]
    assert caplog.text.count("the list of jobs there does not name this job yet") == 2, (
        "once on each of the two ranks"
    )
    for iteration in (3, 4):
        nodes.check(iteration)


# -- what earlier jobs have left in near tiers ------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "kept", "is_far", "manifest", "goes"),
    [
        ((), set(), True, b"", True),
        ((), {A}, True, b"", False),  # this process has saved it before a restart, and may be copying it
        ((B,), set(), True, b"", False),  # a job that began later writes there
        ((), set(), False, b"", False),  # another node may have its manifest
        ((), set(), True, b"damaged", True),
        ((), set(), False, b"damaged", False),  # it may be the only copy: --save has none
    ],
)
def test_what_an_earlier_job_has_left_goes_once_nobody_needs_it(
    tmp_path: Path, others: tuple[int, ...], kept: set[int], is_far: bool, manifest: bytes, goes: bool
) -> None:
    run = tmp_path / "near"
    folder = run / "iter_0000001"
    folder.mkdir(parents=True)
    (folder / SaveId(A, 1).data_file_name(0)).touch()
    room, saves = Room(keep=len(kept) + 1), []
    for run_id in (*kept, C):
        near, far = (tmp_path / name / "iter_0000002" for name in ("near", "far"))
        saves.append(SimpleNamespace(save_id=SaveId(run_id, 2), near=near, far=far, is_far=is_far))
    room.begin(saves[-1])
    for run_id in others:
        (folder / SaveId(run_id, 1).data_file_name(0)).touch()
    if manifest:
        (folder / MANIFEST_NAME).write_bytes(manifest)
    room.make(saves, lambda save: False, lambda save: None)
    assert folder.exists() is not goes
