"""Faults of a near tier and its far side: after each, the newest restorable iteration is restored, exactly.

Which test shows what:
  SIGKILL in a save, in a drain    tests/e2e/test_near_tier.py: killed at any stage; for copies on other nodes
                                   test_near_replicas.py; for uploads test_object_store.py
  SIGKILL in a restore             here
  near lost on one node            tests/e2e/test_near_tier.py, test_near_replicas.py: a lost node ...; with
                                   the far side in a store: test_object_store.py
  near lost on all nodes           test_near_replicas.py: with all nodes lost; under a job that goes on: here
  near full                        test_near_tier.py: a near tier of no use; in the middle of a save: here
  far full, read-only, gone        here; in a restore: test_near_tier_trouble.py; while saves begin:
                                   tests/e2e/test_near_tier.py; a store's outage: test_object_store.py
  two jobs on one node             here, test_near_tier_trouble.py, test_near_replicas.py: left-overs
  clocks apart                     here
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_datastates.engine.faults import Faults
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.pipeline.near import drain, places, tier
from megatron_datastates.pipeline.near.near_save import NearSave
from megatron_datastates.pipeline.near.places import near_run
from megatron_datastates.pipeline.near.publish_queue import PublishQueue
from megatron_datastates.pipeline.near.recovery import recover_newest
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.threads import BackgroundThread
from tests.support.capabilities import bound_by_permissions
from tests.support.exchange import exchange
from tests.support.programs import Programs
from tests.support.waiting import eventually
from tests.unit.states import OPTIONS
from tests.unit.test_near_replicas import Cluster, copying
from tests.unit.test_near_tier import Nodes, abandon, killed, recover

NEVER_FAR = "drain write:0:EIO"


# -- a restore that is killed ------------------------------------------------------------------------------


def restore_and_be_killed(root: str, fault: str) -> None:
    nodes = Nodes(Path(root))
    recover_newest(nodes.run, dataclasses.replace(OPTIONS, near=str(nodes.roots[0]), faults=fault))


@pytest.mark.parametrize(
    "fault",
    [
        *("drain read:1", "drain write:2", "drain sync:1", "drain rename:2"),
        *("write index:1", "rename index:1", "write manifest:1", "rename manifest:1"),
        *("sync directory of manifest:1", "durable manifest:1"),
    ],
)
def test_a_restore_that_is_killed_is_made_by_the_next_job(
    fault: str, tmp_path: Path, programs: Programs
) -> None:
    nodes = killed(tmp_path)
    code = "import sys; from tests.unit import test_near_faults as t; t.restore_and_be_killed(*sys.argv[1:])"
    assert programs.run(["-c", code, tmp_path, f"{fault}:kill"]).returncode == -signal.SIGKILL
    assert recover(nodes)[0] == 3, "the tracker is written last"
    nodes.check(3)
    assert (nodes.run / TRACKER_NAME).read_text() == "3"
    assert recover(nodes) == (None, "")


# -- near ----------------------------------------------------------------------------------------------------


def test_near_tiers_that_vanish_under_a_job_cost_what_is_not_far(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.save(1)
    eventually(lambda: nodes.is_far(1))
    for root in nodes.roots:
        shutil.rmtree(root)
    assert nodes.save(2).outcome is Outcome.PUBLISHED, "in directories that are made anew"
    nodes.close()
    for iteration in (1, 2):
        nodes.check(iteration)


@pytest.mark.parametrize("operation", ["open", "reserve", "write:2", "sync"])
def test_a_near_tier_that_fills_up_in_a_save_fails_it_and_is_left_out_by_the_next_one(
    operation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = operation if ":" in operation else f"{operation}:1"
    nodes = Nodes(tmp_path, {}, {"faults": f"{plan}:ENOSPC"})
    failed = nodes.save(1)
    assert failed.outcome is Outcome.FAILED and "No space left on device" in (failed.error or "")
    second = nodes.save(2)
    assert second.outcome is Outcome.PUBLISHED
    assert [record.is_near for record in second.records] == [True, False], "node 1 saves to --save"
    third = nodes.save(3)
    assert all(record.is_near for record in third.records)
    nodes.close()
    for iteration in (2, 3):
        nodes.check(iteration)
    assert len([one for one in caplog.records if "is not used" in one.message]) == 1


@pytest.mark.parametrize(
    ("is_brought", "is_known"),
    [(True, True), (False, False), (True, False)],
    ids=["in save", "near alone", "lost in save"],
)
def test_a_tier_that_earlier_jobs_have_filled_is_used_again(
    is_brought: bool,
    is_known: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At once if --save has the newest of what they left there, else once it has a later one."""
    before = Nodes(tmp_path, faults=NEVER_FAR)
    for iteration in (1, 2, 3):
        before.save(iteration)
    abandon(before)
    room = 2.5 * sum(path.stat().st_size for path in before.near(1, 3).iterdir())
    if is_brought:
        assert Cluster(monkeypatch, before.roots).recover(before.run)[0] == 3
        if not is_known:
            shutil.rmtree(before.directory(3))
    caplog.clear()
    nodes = Nodes(tmp_path)
    for saver in nodes.ranks.savers:
        saver.session._run_id = 5

    def free_bytes(root: Path) -> int:
        used = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        return int(places.SPARE_BYTES + (room if root == nodes.roots[1] else 1 << 40) - used)

    monkeypatch.setattr(tier, "free_bytes", free_bytes)
    for iteration in (4, 5, 6):
        saved = nodes.save(iteration)
        assert [one.is_near for one in saved.records] == [True, is_known or iteration > 4], iteration
        eventually(lambda: nodes.is_far(iteration))  # noqa: B023
        (nodes.run / TRACKER_NAME).write_text(str(iteration))
    nodes.close()
    assert {path.parent.name for path in nodes.roots[1].glob("*/*/data-*")} == {"iter_0000006"}
    for iteration in (4, 5, 6):
        nodes.check(iteration)
    assert ("is not used" in caplog.text) is not is_known


# -- far -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_far(nodes: Nodes) -> object:
    """The directory of the run is elsewhere meanwhile, and something else in its place."""
    gone = nodes.run.with_name("gone")
    gone.write_text("")
    exchange(nodes.run, gone)
    yield
    exchange(nodes.run, gone)


@contextlib.contextmanager
def read_only(nodes: Nodes) -> object:
    nodes.run.chmod(0o555)
    yield
    nodes.run.chmod(0o755)


@pytest.mark.parametrize("trouble", [no_far, read_only], ids=["gone", "read-only"])
def test_a_far_side_that_is_away_for_a_while_gets_everything_later(
    trouble: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_PAUSES", (0.1,))
    nodes = Nodes(tmp_path, near_keep=1)
    with bound_by_permissions():
        nodes.save(1)
        eventually(lambda: nodes.is_far(1))
        with trouble(nodes):
            for iteration in (2, 3):
                assert nodes.save(iteration).outcome is Outcome.PUBLISHED, "near"
            assert nodes.kept(0)[-2:] == ["iter_0000002", "iter_0000003"], "nothing is removed"
    nodes.close()
    for iteration in (1, 2, 3):
        nodes.check(iteration)
    assert nodes.kept(0) == nodes.kept(1) == ["iter_0000003"]


def test_an_attempt_that_began_before_the_end_is_not_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to --save comes back while a job ends, and an attempt of before fails only then."""
    monkeypatch.setattr(drain, "_PAUSES", (0.05,))
    copy, ending = drain.Drain._copy, []

    def late(self: drain.Drain, save: NearSave) -> None:
        if self in ending:
            return copy(self, save)
        if save.attempts + 1 >= drain.REPORTED_ATTEMPT:
            ending.append(self)
            eventually(lambda: self._closing)
        raise OSError("away")

    monkeypatch.setattr(drain.Drain, "_copy", late)
    nodes = Nodes(tmp_path)
    assert nodes.save(1).outcome is Outcome.PUBLISHED
    eventually(lambda: len(ending) == 2)
    nodes.close()
    nodes.check(1)


@pytest.mark.parametrize(("part", "step"), [(drain.Drain, "_copy"), (PublishQueue, "_publish")])
def test_an_attempt_that_fails_while_a_job_ends_is_soon_made_again(
    part: type, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drain, "_PAUSES", (3600.0,))
    monkeypatch.setattr(drain, "_STALLED_SECONDS", 10.0)
    monkeypatch.setattr(drain, "_LONGEST_PAUSE_AT_THE_END", 0.05)
    attempt, began, failed = getattr(part, step), threading.Event(), list[NearSave]()

    def fails_in_the_end(self: drain.Drain | PublishQueue, save: NearSave) -> None:
        if save.publisher is not None and len(failed) < 2:
            began.set()
            eventually(lambda: nodes.ranks.savers[0].near.drain._closing)
            failed.append(save)
            raise OSError("away")
        attempt(self, save)

    monkeypatch.setattr(part, step, fails_in_the_end)
    nodes = Nodes(tmp_path)
    nodes.save(1)
    eventually(began.is_set)
    nodes.close()
    nodes.check(1)
    assert "published in the near tiers only" not in caplog.text


def test_files_whose_copying_threads_died_are_copied_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_PAUSES", (0.02,))
    start, lost = BackgroundThread.start, list[BackgroundThread]()

    def losing(thread: BackgroundThread) -> None:
        if getattr(thread._function, "__name__", "") == "work" and not lost:
            lost.append(thread)
            monkeypatch.setattr(thread, "_run", id)  # takes the arguments, and returns
        start(thread)

    monkeypatch.setattr(drain, "_COPIES", 1)
    monkeypatch.setattr(BackgroundThread, "start", losing)
    nodes = Nodes(tmp_path)
    nodes.save(1)
    nodes.close()
    assert lost
    nodes.check(1)


@pytest.mark.parametrize("saves", [1, 2])
def test_a_drain_whose_thread_died_goes_on_with_the_next_save_or_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    start, lost = BackgroundThread.start, list[BackgroundThread]()

    def losing(thread: BackgroundThread) -> None:
        if isinstance(getattr(thread._function, "__self__", None), drain.Drain) and len(lost) < 2:
            lost.append(thread)
            monkeypatch.setattr(thread, "_run", id)  # takes the arguments, and returns
        start(thread)

    monkeypatch.setattr(BackgroundThread, "start", losing)
    nodes = Nodes(tmp_path)
    for iteration in range(1, saves + 1):
        nodes.save(iteration)
    assert len(lost) == 2 and all(thread.join(10.0) for thread in lost)
    nodes.close()
    for iteration in range(1, saves + 1):
        nodes.check(iteration)


def fail_copies_at_the_end(monkeypatch: pytest.MonkeyPatch, times: int) -> list[NearSave]:
    """Lets copies fail until a job ends, and so many attempts after that; returns the saves of these."""
    monkeypatch.setattr(drain, "_PAUSES", (0.02,))
    copy, failed = drain.Drain._copy, list[NearSave]()

    def fails(self: drain.Drain, save: NearSave) -> None:
        if len(failed) >= times:
            return copy(self, save)
        if self._closing:
            failed.append(save)
        self._progress = time.monotonic()  # what can be moved of a file until a disk is full
        raise OSError("away")

    monkeypatch.setattr(drain.Drain, "_copy", fails)
    return failed


def test_a_far_side_that_is_away_for_a_while_at_the_end_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_copies_at_the_end(monkeypatch, 20)
    nodes = Nodes(tmp_path)
    for iteration in (1, 2, 3):
        nodes.save(iteration)
    nodes.close()
    for iteration in (1, 2, 3):
        nodes.check(iteration)
    assert nodes.kept(0) == nodes.kept(1) == ["iter_0000003"]
    assert "published in the near tiers only" not in caplog.text


def test_a_job_ends_and_says_what_is_near_only_if_its_far_side_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = fail_copies_at_the_end(monkeypatch, 1 << 30)
    monkeypatch.setattr(drain, "_STALLED_SECONDS", 1.0)
    nodes = Nodes(tmp_path)
    for iteration in (1, 2):
        nodes.save(iteration)
    begin = time.monotonic()
    nodes.close()
    assert time.monotonic() - begin < 10
    assert {save.far.name for save in failed} == {"iter_0000001", "iter_0000002"}
    assert "iter_0000001, iter_0000002: published in the near tiers only" in caplog.text
    assert Cluster(monkeypatch, nodes.roots).recover(nodes.run)[0] == 2


def test_a_far_side_without_room_gets_everything_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drain, "_PAUSES", (0.05,))
    full = ",".join(f"drain write:{nth}:ENOSPC" for nth in range(1, 40))
    nodes = Nodes(tmp_path, {"faults": full}, {"faults": "write manifest:1:ENOSPC"})
    failed_near = nodes.save(1)
    assert failed_near.outcome is Outcome.FAILED, "a manifest that has no room near"
    for iteration in (2, 3):
        assert nodes.save(iteration).outcome is Outcome.PUBLISHED
    eventually(lambda: nodes.is_far(3))
    nodes.close()
    for iteration in (2, 3):
        nodes.check(iteration)
    assert "No space left on device" in caplog.text and "it is tried again" in caplog.text


# -- jobs and clocks -----------------------------------------------------------------------------------------


def test_two_jobs_on_one_node_restore_what_is_theirs(tmp_path: Path) -> None:
    one, other = Nodes(tmp_path), Nodes(tmp_path)
    one.close()
    other.close()
    one, other = (Nodes(tmp_path, faults=NEVER_FAR) for _ in range(2))
    other.run = tmp_path / "far" / "other" / "run"  # the same name, in the same near tiers
    for iteration in (4, 6):
        other.save(iteration)
        one.save(iteration - 1)
    for nodes, newest in ((one, 5), (other, 6)):
        abandon(nodes)
        for path in nodes.near(1, newest).glob("data-*"):
            shutil.copy(path, nodes.near(0, newest))
        assert recover(nodes)[0] == newest
        nodes.check(newest)
    assert near_run(one.roots[0], one.run) != near_run(other.roots[0], other.run)


@pytest.mark.parametrize("seconds", [-86_400.0, 86_400.0])
def test_clocks_that_are_apart_choose_no_checkpoint(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = copying(tmp_path, near_keep=9)
    nodes.save(1)
    eventually(lambda: nodes.is_far(1))
    (nodes.run / TRACKER_NAME).write_text("1")
    abandon(nodes)
    later = copying(tmp_path, faults=NEVER_FAR, near_keep=9)
    for saver in later.ranks.savers:
        saver.session._run_id = 5
    for iteration in (2, 3):
        later.save(iteration)
    abandon(later)
    for path in [*later.roots[1].rglob("*"), *later.near(0, 3).iterdir()]:  # of node 1, and the newest files
        os.utime(path, (path.stat().st_mtime + seconds,) * 2)
    iteration, _ = Cluster(monkeypatch, later.roots).recover(later.run)
    assert iteration == 3
    later.check(3)
    nodes.check(1)


def test_an_interrupted_trainer_keeps_no_lock_that_the_drain_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Condition.__enter__ is a function of Python's: it may be interrupted when it has the lock."""
    enter = threading.Condition.__enter__

    def interrupted(condition: threading.Condition) -> bool:
        enter(condition)
        raise KeyboardInterrupt

    one = drain.Drain(OPTIONS, Faults(""), lambda report: None)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(threading.Condition, "__enter__", interrupted)
        one.note_published(is_far=False)
    other = threading.Thread(target=lambda: one.note_published(is_far=False), daemon=True)
    other.start()
    other.join(10.0)
    assert not other.is_alive()
