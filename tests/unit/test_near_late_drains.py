"""Drains that are late: what they bring to --save must not take the place of what was saved later."""

from __future__ import annotations

import errno
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_datastates.format.directory import TRACKER_NAME, iteration_in_name
from megatron_datastates.format.manifest import FileEntry
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.mcore.training import tracker_writing
from megatron_datastates.pipeline.near import drain, publish_queue, tier
from megatron_datastates.pipeline.near.drain import Drain
from megatron_datastates.pipeline.near.near_save import NearSave
from megatron_datastates.pipeline.near.places import published_in
from megatron_datastates.pipeline.near.publish_queue import PublishQueue
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.publishing.directory_publisher import DirectoryPublisher
from megatron_datastates.pipeline.runs import history, tracker
from megatron_datastates.pipeline.runs.branches import Origin, origin_in
from megatron_datastates.pipeline.runs.jobs import note_job
from megatron_datastates.pipeline.runs.tracker import tracked_iteration
from tests.support.waiting import eventually
from tests.unit.states import data_files, flip
from tests.unit.test_near_mishaps import restart
from tests.unit.test_near_replicas import Cluster
from tests.unit.test_near_tier import Nodes, abandon
from tests.unit.test_near_tier_trouble import next_job

Gate = Callable[[Nodes, int], threading.Event]


class Far:
    """Stands in for what rank 0 calls of `far_published`: each job has a process of its own."""

    def __init__(self, nodes: Nodes, retain_interval: int | None = None) -> None:
        self._nodes, self._interval = nodes, retain_interval
        self._tracked: dict[Path, tuple[int, SaveId]] = {}
        self.were_alone: list[bool] = []

    def __call__(self, save_id: SaveId, is_retried: bool) -> None:
        iteration = self._iteration_of(save_id)
        before, tracker_writing._tracked = tracker_writing._tracked, self._tracked
        try:
            number = save_id.ordinal
            tracker_writing._track(self._nodes.run, iteration, save_id, self._interval, number, is_retried)
        finally:
            tracker_writing._tracked = before
        session = self._nodes.ranks.savers[0].session
        self.were_alone.append(session.layouts.publishing.locked())

    def _iteration_of(self, save_id: SaveId) -> int:
        found = [one for one in self._nodes.run.glob("iter_*") if published_in(one) == save_id]
        return max(iteration_in_name(one.name) or 0 for one in found)


def tracked(nodes: Nodes) -> int | None:
    return tracked_iteration(nodes.run / TRACKER_NAME)


def with_tracker(nodes: Nodes, retain_interval: int | None = None) -> Nodes:
    nodes.ranks.note_far = Far(nodes, retain_interval)  # type: ignore[method-assign]
    return nodes


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Holds the copies of one iteration in a job's drains, as slow storage does, until an event is set."""
    gates: list[tuple[list[Drain], int, threading.Event]] = []
    copy = Drain._copy_file

    def slow(self: Drain, save: NearSave, file: FileEntry) -> None:
        for drains, iteration, gate in gates:
            if self in drains and save.far.name == f"iter_{iteration:07d}":
                gate.wait()
        copy(self, save, file)

    def hold(nodes: Nodes, iteration: int) -> threading.Event:
        drains = [saver.near.drain for saver in nodes.ranks.savers if saver.near is not None]
        gates.append((drains, iteration, threading.Event()))
        return gates[-1][2]

    monkeypatch.setattr(Drain, "_copy_file", slow)
    return hold


def publishing_held(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds what a job's drains publish, until the event is set."""
    gate, publish = threading.Event(), PublishQueue._publish
    queues = [saver.near.drain._queue for saver in nodes.ranks.savers if saver.near is not None]

    def slow(self: PublishQueue, save: NearSave) -> None:
        if self in queues:
            gate.wait()
        publish(self, save)

    monkeypatch.setattr(PublishQueue, "_publish", slow)
    return gate


def saved_before(nodes: Nodes, iteration: int) -> None:
    nodes.save(iteration)
    eventually(lambda: nodes.is_far(iteration) and tracked(nodes) == iteration)


def fails_once(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, reads: str, path: Path | None = None
) -> threading.Event:
    """Makes what a module reads (of a path, if it is given) fail for a moment; returns whether it has."""
    read, failed = getattr(module, reads), threading.Event()

    def flaky(of: Path, *more: object) -> object:
        if not failed.is_set() and path in (None, of):
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(of, *more)

    monkeypatch.setattr(module, reads, flaky)
    return failed


def never_read(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, is_readable: threading.Event | None = None
) -> list[Path]:
    """Makes a manifest unreadable (until the event is set); returns a list that grows with each attempt."""
    read, attempts = history.point_in, list[Path]()

    def denied(directory: Path, iteration: int) -> object:
        if directory == checkpoint and not (is_readable is not None and is_readable.is_set()):
            attempts.append(directory)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
        return read(directory, iteration)

    monkeypatch.setattr(history, "point_in", denied)
    return attempts


@pytest.mark.parametrize("unreadable", ["", "point_in", "jobs_in"])
def test_what_a_restart_in_the_process_has_saved_anew_stays(
    unreadable: str,
    tmp_path: Path,
    held: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = with_tracker(Nodes(tmp_path))
    saved_before(nodes, 90)
    gate = held(nodes, 100)
    nodes.save(100)
    restart(nodes)
    monkeypatch.setattr(tier, "free_bytes", lambda root: 0)  # saves go to --save directly
    # Of a job that began anew, the list alone says that it is later.
    again = nodes.save(100, Origin() if unreadable == "jobs_in" else origin_in(nodes.directory(90), 90))
    assert again.outcome is Outcome.PUBLISHED and not again.records[0].is_near
    if unreadable:
        fails_once(monkeypatch, history, unreadable)
    gate.set()
    eventually(lambda: "a later save is there" in caplog.text)
    nodes.close()
    assert published_in(nodes.directory(100)) == again.save.context.save_id
    nodes.check(100)


def test_what_the_next_job_has_saved_anew_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = with_tracker(Nodes(tmp_path))
    saved_before(old, 90)
    gate = publishing_held(old, monkeypatch)
    old.save(100)
    eventually(lambda: len(data_files(old.directory(100))) == 2)
    new = with_tracker(next_job(tmp_path))
    again = new.save(100, origin_in(new.directory(90), 90))  # --ckpt-step 90
    eventually(lambda: new.is_far(100))
    gate.set()
    eventually(lambda: "a later save is there" in caplog.text)
    old.close()
    new.close()
    assert published_in(new.directory(100)) == again.save.context.save_id
    new.check(100)


@pytest.mark.parametrize("interval", [None, 50])
def test_a_later_jobs_checkpoint_stays_and_is_resumed_from(
    interval: int | None, tmp_path: Path, held: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = with_tracker(Nodes(tmp_path), interval)
    gate, cluster = held(old, 100), Cluster(monkeypatch, old.roots)
    old.save(100)
    assert cluster.recover(old.run)[0] == 100  # by the next job
    new = with_tracker(next_job(tmp_path), interval)
    new.save(110, origin_in(new.directory(100), 100))
    eventually(lambda: new.is_far(110) and tracked(new) == 110)
    gate.set()
    old.close()
    assert tracked(old) == 110 and new.is_far(110)
    new.close()
    assert cluster.recover(old.run) == (None, "")


def rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retain_interval: int | None = None
) -> tuple[Nodes, Nodes, threading.Event]:
    """Returns a job whose drain is to publish iteration 100; the next one, which has saved 60; and a gate."""
    old = with_tracker(Nodes(tmp_path), retain_interval)
    saved_before(old, 50)
    gate = publishing_held(old, monkeypatch)
    old.save(100)
    eventually(lambda: len(data_files(old.directory(100))) == 2)
    new = with_tracker(next_job(tmp_path), retain_interval)
    new.save(60, origin_in(new.directory(50), 50))  # --ckpt-step 50
    eventually(lambda: new.is_far(60) and tracked(new) == 60)
    new.close()
    return old, new, gate


@pytest.mark.parametrize("unreadable", ["", "tracker", "manifest", "list"])
def test_a_late_drain_does_not_undo_a_rollback(
    unreadable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, gate = rolled_back(tmp_path, monkeypatch)
    whats = {
        "tracker": (tracker, "read_regular", new.run / TRACKER_NAME),
        "manifest": (history, "point_in", new.directory(60)),
        "list": (history, "jobs_in", new.run),
    }
    has_failed = fails_once(monkeypatch, *whats[unreadable]) if unreadable else None
    gate.set()
    old.close()
    assert old.is_far(100) and (has_failed is None or has_failed.is_set())
    assert tracked_iteration(new.run / TRACKER_NAME) == 60
    assert Cluster(monkeypatch, old.roots).recover(old.run)[0] is None


def test_a_late_drain_that_could_not_publish_at_first_does_not_undo_a_rollback_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_PAUSES", (0.05,)), ("_LOOK_SECONDS", 0.05)):
        monkeypatch.setattr(drain, name, value)
    old, new, gate = rolled_back(tmp_path, monkeypatch)
    publish, failures = DirectoryPublisher.publish, iter(range(publish_queue._INSISTING_ATTEMPTS))

    def full_at_first(self: DirectoryPublisher) -> None:
        if next(failures, None) is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(new.run))
        publish(self)

    monkeypatch.setattr(DirectoryPublisher, "publish", full_at_first)
    has_failed = fails_once(monkeypatch, history, "point_in", new.directory(60))
    gate.set()
    old.close()
    assert old.is_far(100) and has_failed.is_set() and tracked(old) == 60


def test_what_cannot_be_read_is_not_deleted_where_few_checkpoints_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_PAUSES", (0.05,))
    old, new, gate = rolled_back(tmp_path, monkeypatch, 1000)
    with monkeypatch.context() as patched:
        never_read(patched, new.directory(60))
        gate.set()
        eventually(lambda: tracked(old) == 100)
        old.close()
    assert new.is_far(60)
    new.check(60)


def test_a_save_that_is_not_drained_is_tracked_although_the_tracker_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_writing, "_tracked", {})
    path = tmp_path / TRACKER_NAME
    has_failed = fails_once(monkeypatch, tracker, "read_regular", path)
    tracker_writing._track(tmp_path, 2, SaveId(1, 1), None, 1, False)
    assert has_failed.is_set() and path.read_text() == "2"


@pytest.mark.parametrize("is_saved_again", [False, True])
def test_what_is_being_saved_again_is_not_deleted_where_few_checkpoints_are_kept(
    is_saved_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rollback from 200, save 150 is published while save 200 is being written."""
    monkeypatch.setattr(tracker_writing, "_tracked", {})
    left = Nodes(tmp_path)
    saved_before(with_tracker(left), 200)
    left.close()
    own = left.directory(200) / SaveId(1, 2).data_file_name(0)
    if is_saved_again:
        own.touch()
    tracker_writing._track(left.run, 150, SaveId(1, 1), 1000, 1, False)
    assert tracked(left) == 150 and left.directory(200).exists() == own.exists() == is_saved_again


def test_a_checkpoint_that_was_saved_once_more_is_not_deleted_as_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker names it already, as of an earlier save into the same directory."""
    monkeypatch.setattr(tracker_writing, "_tracked", {})
    left = Nodes(tmp_path)
    saved_before(with_tracker(left), 200)
    left.close()
    tracker_writing._track(left.run, 200, SaveId(1, 2), 1000, 1, False)
    assert tracked(left) == 200 and (left.directory(200) / MANIFEST_NAME).exists()


def test_a_tracked_checkpoint_that_can_never_be_read_does_not_stop_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_PAUSES", (0.05,))
    before = with_tracker(Nodes(tmp_path))
    saved_before(before, 1)
    before.close()
    nodes = with_tracker(next_job(tmp_path))
    origin = origin_in(nodes.directory(1), 1)
    never_read(monkeypatch, nodes.directory(1))
    nodes.save(2, origin)
    eventually(lambda: nodes.is_far(2) and tracked(nodes) == 2)
    nodes.save(3)
    nodes.close()
    assert tracked(nodes) == 3 and nodes.kept(0) == ["iter_0000003"]


def test_a_checkpoint_that_cannot_be_published_holds_up_no_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drain, "_PAUSES", (0.05,))
    nodes = with_tracker(Nodes(tmp_path))
    saved_before(nodes, 1)
    is_readable = threading.Event()
    never_read(monkeypatch, nodes.directory(1), is_readable)
    again = nodes.save(1).save.context.save_id
    for iteration in (2, 3):
        nodes.save(iteration)
    eventually(lambda: nodes.is_far(2) and nodes.is_far(3) and tracked(nodes) == 3)
    eventually(lambda: "is not published in" in caplog.text)
    assert f"it is tried again, and {nodes.near(0, 1)} stays until then" in caplog.text
    assert published_in(nodes.directory(1)) != again
    assert nodes.kept(0)[0] == "iter_0000001" and nodes.kept(0)[-1] == "iter_0000003"
    is_readable.set()
    nodes.close()
    assert published_in(nodes.directory(1)) == again and tracked(nodes) == 3
    assert nodes.kept(0) == nodes.kept(1) == ["iter_0000003"]
    assert len([one for one in caplog.records if "is not published in" in one.message]) == 1
    for iteration in (1, 2, 3):
        nodes.check(iteration)


def first_drain(nodes: Nodes) -> Drain:
    near = nodes.ranks.savers[0].near
    assert near is not None
    return near.drain


def full_until_set(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Has no tracker written until the event is set."""
    write, has_room = tracker_writing.write_whole, threading.Event()

    def full(path: Path, *more: Any) -> None:
        if not has_room.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, *more)

    monkeypatch.setattr(tracker_writing, "write_whole", full)
    return has_room


def test_saves_that_could_not_be_published_are_tried_again_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_PAUSES", (3600.0,))
    nodes = with_tracker(Nodes(tmp_path))
    saved_before(nodes, 1)
    has_room = full_until_set(monkeypatch)
    nodes.save(2)
    nodes.save(3)
    queue = first_drain(nodes)._queue
    eventually(lambda: [save.attempts for save in queue.saves] == [1, 1])
    has_room.set()
    queue.saves[0].failed_at = -math.inf
    eventually(lambda: tracked(nodes) == 3)  # a kill before would have left it at 2
    nodes.close()


def test_a_save_whose_files_come_late_waits_for_the_attempt_of_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker that named it meanwhile would be newer than the later one, as if it had been set back."""
    monkeypatch.setattr(drain, "_PAUSES", (3600.0,))
    nodes = with_tracker(Nodes(tmp_path, {}, {"faults": "drain write:0:EIO"}))
    has_room = full_until_set(monkeypatch)

    def arrive(iteration: int) -> None:
        (file,) = nodes.near(1, iteration).glob("data-00001-*")
        shutil.copy(file, nodes.directory(iteration))

    nodes.save(1)
    nodes.save(2)
    queue = first_drain(nodes)._queue
    eventually(lambda: len(queue.saves) == 2)
    arrive(2)
    eventually(lambda: [save.attempts for save in queue.saves] == [0, 1])
    has_room.set()
    arrive(1)
    time.sleep(4 * drain._LOOK_SECONDS)
    assert nodes.is_far(2) and not nodes.is_far(1) and tracked(nodes) is None
    queue.saves[1].failed_at = -math.inf
    eventually(lambda: nodes.is_far(1) and tracked(nodes) == 2)
    abandon(nodes)


def test_a_save_that_lacks_files_does_not_end_the_pauses_of_others(
    tmp_path: Path, held: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_PAUSES", (3600.0,))
    nodes = with_tracker(Nodes(tmp_path))
    saved_before(nodes, 1)
    gate = held(nodes, 2)
    nodes.save(2)
    (lost,) = data_files(nodes.near(1, 2))
    lost.unlink()
    attempts, looks = never_read(monkeypatch, nodes.directory(3)), list[Path]()
    missing = publish_queue.missing_data_files

    def counted(directory: Path, *more: Any) -> list[str]:
        if attempts and directory == nodes.directory(2):
            looks.append(directory)
        return missing(directory, *more)

    monkeypatch.setattr(publish_queue, "missing_data_files", counted)
    nodes.save(3)
    gate.set()
    eventually(lambda: len(looks) > 2)
    assert len(attempts) == 1
    abandon(nodes)


def test_a_note_that_is_late_brings_nothing_back_that_the_next_job_went_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = with_tracker(Nodes(tmp_path, near_keep=2, drain_every=2))
    first = old.save(50).save.context.save_id  # stays near
    saved_before(old, 60)
    new = with_tracker(next_job(tmp_path, near_keep=3))
    new.save(70, origin_in(new.directory(60), 60))
    new.close()
    abandon(old)
    assert tracked(new) == 70 and old.kept(0) == ["iter_0000050", "iter_0000060", "iter_0000070"]
    note_job(old.run, first, 0)
    assert Cluster(monkeypatch, old.roots).recover(old.run)[0] is None


def test_what_another_job_has_only_loaded_is_resumed_from(
    tmp_path: Path, held: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = with_tracker(Nodes(tmp_path, near_keep=2))
    first, second = held(nodes, 100), held(nodes, 110)
    nodes.save(100)
    nodes.save(110)
    cluster = Cluster(monkeypatch, nodes.roots)
    assert cluster.recover(nodes.run)[0] == 110  # by an evaluation, say
    first.set()
    eventually(lambda: "goes on naming iteration 110, not 100" in caplog.text)
    assert tracked(nodes) == 110
    for saver in nodes.ranks.savers:
        assert saver.near is not None
        saver.near.drain._abandoned = True
    second.set()
    abandon(nodes)
    assert cluster.recover(nodes.run) == (None, "")


def test_the_tracker_is_written_by_one_save_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = with_tracker(Nodes(tmp_path))
    saved_before(nodes, 1)
    with monkeypatch.context() as patched:
        patched.setattr(tier, "free_bytes", lambda root: 0)
        nodes.save(2)
    nodes.close()
    assert nodes.ranks.note_far.were_alone == [True, True]  # type: ignore[attr-defined]


@pytest.mark.parametrize("interval", [None, 50])
def test_a_late_drain_does_not_pass_over_a_damaged_checkpoint_in_silence(
    interval: int | None,
    tmp_path: Path,
    held: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = with_tracker(Nodes(tmp_path), interval)
    gate, cluster = held(old, 100), Cluster(monkeypatch, old.roots)
    old.save(100)
    assert cluster.recover(old.run)[0] == 100
    new = with_tracker(next_job(tmp_path), interval)
    new.save(110, origin_in(new.directory(100), 100))
    eventually(lambda: new.is_far(110) and tracked(new) == 110)
    flip(new.directory(110) / MANIFEST_NAME, 100)
    gate.set()
    old.close()
    assert tracked(old) == 100
    assert "names iteration 100 now, not 110, whose manifest is damaged" in caplog.text
    assert len(data_files(new.directory(110))) == 2, "it may be repaired"
    abandon(new)
    assert cluster.recover(old.run)[0] == 110, "from near tiers"
    new.check(110)
