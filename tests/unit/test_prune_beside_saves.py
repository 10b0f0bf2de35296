"""What prune does beside a save, and with what saves that were killed have left."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_datastates.cli.drop_optimizer import drop_all
from megatron_datastates.config import MIB
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import StorageError
from megatron_datastates.format.directory import COMMON_FILE, REMOVAL_NAME, TRACKER_NAME
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.publishing import presence
from megatron_datastates.pipeline.upkeep import left_overs as removing
from megatron_datastates.pipeline.upkeep import prune as pruning
from megatron_datastates.pipeline.upkeep import retention
from megatron_datastates.pipeline.upkeep.left_overs import remove_left_overs
from megatron_datastates.pipeline.upkeep.prune import _put_back, prune
from megatron_datastates.pipeline.upkeep.repair import repair
from megatron_datastates.pipeline.upkeep.retention import RetentionRules, plan_prune
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.named import NamedState
from tests.unit.pruning import NUMBERS, age, complete, lose, place, put, reasons, removed
from tests.unit.pruning import root as root
from tests.unit.pruning import saved as saved
from tests.unit.states import OPTIONS, State, data_files, new_saver

LIVE, DEAD = SaveId(7, 1), SaveId(8, 3)


def left_overs(root: Path, **rules: float) -> list[str]:
    return [
        file.path.name for file in plan_prune(root, RetentionRules(**{"keep_last": 9} | rules)).left_overs
    ]


OURS = [
    LIVE.data_file_name(3),
    LIVE.index_file_name("ab" * 32),
    f".datastates-{MANIFEST_NAME}-{LIVE}.tmp",
    f".datastates-{MANIFEST_NAME}.tmp",
]


@pytest.mark.parametrize("name", OURS)
def test_a_checkpoint_that_is_being_saved_again_stays(root, name):
    put(root, 100, name, 180)
    assert removed(root, keep_last=1) == [200, 300, 400]
    why = reasons(root, keep_last=1)[100]
    assert why == f"a save into it may be under way: {name}, which no manifest names, is 3 min old"
    assert 100 not in [one.number for one in prune(root, RetentionRules(keep_last=1))]
    assert (place(root, 100) / name).exists() and complete(root) == [100, 500]


@pytest.mark.parametrize("name", OURS)
def test_what_was_left_long_ago_keeps_no_checkpoint(root, name):
    put(root, 100, name, 3700)
    assert removed(root, keep_last=1) == [100, 200, 300, 400]
    put(root, 100, name, -9999)  # by a clock that is ahead
    assert removed(root, keep_last=1) == [200, 300, 400]


def test_a_young_file_keeps_remains_whose_other_files_are_old(root):
    lose(root, 200)
    put(root, 200, DEAD.data_file_name(0), 10)
    assert removed(root, keep_last=4) == []
    assert "is 10 s old" in reasons(root, keep_last=4)[200]
    (root / TRACKER_NAME).write_text("500")
    assert removed(root, keep_last=4, min_age_seconds=5.0) == [200]


def test_a_save_after_a_rollback_may_wait_for_hours_though_the_tracker_names_a_later_iteration(root):
    """Until it is published, that tracker is the one that the abandoned branch has left."""
    age(root / TRACKER_NAME, 5000)
    saver, directory = new_saver(), place(root, 250)
    publication = saver.start(directory, State({"a": torch.arange(9)}))
    while not publication.save.is_durable:
        publication.save.advance()
    for path in directory.iterdir():
        age(path, 4000)
    assert "since the tracker was written" in reasons(root, keep_last=1)[250]
    prune(root, RetentionRules(keep_last=1))
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    saver.close()


def test_a_removal_that_was_killed_goes_on_once_its_files_are_old(root):
    """The manifest that prune took may be one that a save has published at that very moment."""
    with pytest.raises(StorageError):
        prune(root, RetentionRules(keep_last=1), faults="sync removal of manifest:1:EIO")
    for path in place(root, 100).iterdir():
        age(path, 60)
    assert "a save into it may be under way" in reasons(root, keep_last=4)[100]
    repair(place(root, 100), options=OPTIONS)
    assert complete(root) == NUMBERS


def test_a_removal_that_was_killed_goes_on_though_its_files_are_newer_than_the_tracker(root):
    """As those are of a checkpoint whose optimizer was removed, or of a copied run."""
    age(root / TRACKER_NAME, 9000)
    with pytest.raises(StorageError):
        prune(root, RetentionRules(keep_last=4), faults="remove file:1:EIO")
    assert removed(root, keep_last=4) == [100]


def test_of_a_save_that_was_killed_files_of_ours_go_last(root):
    """Their names alone show the next call whose the directory is."""
    lose(root, 200)
    put(root, 200, "notes.txt", 9000)
    with pytest.raises(StorageError):
        prune(root, RetentionRules(keep_last=4), faults="remove file:2:EIO")
    assert removed(root, keep_last=4) == [200]


def test_left_overs_stay_where_the_manifest_is_gone_since_the_plan(root):
    put(root, 300, DEAD.data_file_name(0), 9000)
    plan = plan_prune(root, RetentionRules(keep_last=9))
    (place(root, 300) / MANIFEST_NAME).unlink()
    assert plan.left_overs and remove_left_overs(plan.left_overs) == []


def test_left_overs_beside_a_checkpoint_that_stays_go(root):
    for name in OURS:
        put(root, 300, name, 4000)
    unnamed = put(root, 300, "notes.txt", 4000)
    plan = plan_prune(root, RetentionRules(keep_last=9))
    assert sorted(file.path.name for file in plan.left_overs) == sorted(OURS)
    assert all(file.bytes == 5 and 4000 <= file.age_seconds < 5000 for file in plan.left_overs)
    assert remove_left_overs(plan.left_overs) == plan.left_overs
    assert unnamed.exists() and complete(root) == NUMBERS
    assert not any((place(root, 300) / name).exists() for name in OURS)


def test_left_overs_stay_while_anything_of_their_save_is_young(root):
    put(root, 300, LIVE.data_file_name(0), 9000)
    put(root, 300, DEAD.data_file_name(0), 9000)
    put(root, 300, LIVE.data_file_name(1), 60)
    assert left_overs(root) == [DEAD.data_file_name(0)]
    assert left_overs(root, min_age_seconds=10000) == []


def test_a_clock_that_is_ahead_makes_no_file_of_a_live_save_old(root, monkeypatch):
    """Files have the times of the file system's clock, as those of a server of NFS."""
    clock = SimpleNamespace(time=lambda: time.time() + 7200.0)
    monkeypatch.setattr(removing, "time", clock)
    monkeypatch.setattr(retention, "time", clock)
    live, dead = (place(root, 300) / save.data_file_name(0) for save in (LIVE, DEAD))
    put(root, 300, live.name, 60)
    put(root, 300, dead.name, 4000)
    lose(root, 200)
    put(root, 200, LIVE.data_file_name(0), 60)  # after a rollback
    plan = plan_prune(root, RetentionRules(keep_last=3))
    assert [file.path for file in remove_left_overs(plan.left_overs)] == [dead]
    assert live.exists()
    assert [one.number for one in prune(root, RetentionRules(keep_last=3))] == [100]
    assert (place(root, 200) / LIVE.data_file_name(0)).exists()


def test_a_clock_that_is_ahead_drops_no_optimizer_beside_a_live_save(root, monkeypatch, capsys):
    clock = SimpleNamespace(time=lambda: time.time() + 7200.0)
    monkeypatch.setattr(removing, "time", clock)
    monkeypatch.setattr(retention, "time", clock)
    put(root, 100, LIVE.data_file_name(0), 60)
    assert drop_all(root, RetentionRules(keep_last=3), {}, yes=True, as_json=True) == 0
    reasons = {one["iteration"]: one["why"] for one in json.loads(capsys.readouterr().out)["kept"]}
    assert reasons[100] == "a save into it may be under way"
    assert reasons[200] == "it has no optimizer state"


def test_an_old_file_that_was_linked_just_now_is_no_left_over(root):
    """A save that is under way may share a file of an earlier one, which is as old as that."""
    old = root / DEAD.data_file_name(0)
    old.write_bytes(b"bytes")
    linked = place(root, 300) / old.name
    os.link(old, linked)
    for path in (old, linked):
        age(path, 7200)
    assert left_overs(root) == []
    old.unlink()
    assert left_overs(root) == [linked.name]
    put(root, 300, SaveId(DEAD.run_id, DEAD.ordinal + 1).data_file_name(0), 60)  # the save that linked it
    assert left_overs(root) == []


def test_without_a_sound_manifest_nothing_is_a_left_over(root):
    for number, change in ((200, Path.unlink), (300, lambda path: path.write_bytes(b"nonsense"))):
        put(root, number, DEAD.data_file_name(0), 9000)
        change(place(root, number) / MANIFEST_NAME)
    data_files(place(root, 400))[0].unlink()
    put(root, 400, DEAD.data_file_name(0), 9000)
    assert left_overs(root) == []


def test_a_manifest_that_cannot_be_read_at_times_makes_no_left_overs(root, monkeypatch):
    """As where a server of NFS restarts: reads of it fail now and then, also while left-overs are removed."""
    monkeypatch.setattr("megatron_datastates.pipeline.upkeep.left_overs._named_by", lambda manifest: set())
    plan = plan_prune(root, RetentionRules(keep_last=9))
    assert plan.left_overs and remove_left_overs(plan.left_overs) == []
    assert complete(root) == NUMBERS


def test_the_manifest_that_was_read_is_durable_before_left_overs_go(root, monkeypatch):
    """A crash could bring back an older one, which names them."""
    left, synced = put(root, 300, DEAD.data_file_name(0), 9000), []
    monkeypatch.setattr(removing, "sync_directory", lambda path: synced.append((path, left.exists())))
    assert len(remove_left_overs(plan_prune(root, RetentionRules(keep_last=9)).left_overs)) == 1
    assert synced == [(place(root, 300), True)] and not left.exists()


@pytest.mark.parametrize("point", ["look at left-over", "remove left-over"])
def test_an_error_while_left_overs_are_removed_says_where(root, point):
    put(root, 300, DEAD.data_file_name(0), 9000)
    plan = plan_prune(root, RetentionRules(keep_last=9))
    with pytest.raises(StorageError, match=r"left-overs were not removed from .*iter_0000300"):
        remove_left_overs(plan.left_overs, faults=f"{point}:1:EIO")
    assert complete(root) == NUMBERS


@pytest.mark.parametrize("point", ["", "look at left-over", "remove left-over"])
def test_left_overs_that_somebody_else_removes_first_are_no_failure(root, monkeypatch, point):
    put(root, 300, DEAD.data_file_name(0), 9000)
    put(root, 400, DEAD.data_file_name(0), 9000)
    plan = plan_prune(root, RetentionRules(keep_last=9))
    if point:
        at_point(monkeypatch, point, lambda: (place(root, 300) / DEAD.data_file_name(0)).unlink())
    else:
        shutil.rmtree(place(root, 300))
    assert [file.path.parent.name for file in remove_left_overs(plan.left_overs)] == ["iter_0000400"]


def test_left_overs_whose_storage_is_lost_are_an_error(root):
    put(root, 300, DEAD.data_file_name(0), 9000)
    plan = plan_prune(root, RetentionRules(keep_last=9))
    root.rename(root.with_name("elsewhere"))
    with pytest.raises(StorageError, match=r"left-overs were not removed from .*iter_0000300"):
        remove_left_overs(plan.left_overs)


def at_point(monkeypatch, name: str, change) -> None:
    """Calls `change` once, when prune has come to this point."""
    point, left = Faults.point, [change]

    def passing(self, passed):
        if passed == name and left:
            left.pop()()
        point(self, passed)

    monkeypatch.setattr(Faults, "point", passing)


class Resumed:
    """A trainer that was resumed from an old iteration and saves it again."""

    def __init__(self, root: Path) -> None:
        self.saver, self.directory = new_saver(), place(root, 100)

    def begin(self) -> None:
        self.publication = self.saver.start(self.directory, State({"a": torch.arange(9)}))
        while not self.publication.save.is_durable:
            self.publication.save.advance()

    def publish(self) -> None:
        self.publication.wait()
        self.saver.close()
        assert self.publication.outcome is Outcome.PUBLISHED, self.publication.error

    def save(self) -> None:
        self.begin()
        self.publish()


@pytest.mark.parametrize("begun", ["before", "after"])
def test_a_save_that_publishes_between_the_decision_and_the_removal_is_kept(root, monkeypatch, begun):
    resumed, reported = Resumed(root), {}
    if begun == "before":
        resumed.begin()
        for path in place(root, 100).iterdir():
            age(path, 9000)  # it has been silent for hours
    at_point(monkeypatch, "remove manifest", resumed.publish if begun == "before" else resumed.save)
    prune(root, RetentionRules(keep_last=3), stays=lambda one, why: reported.update({one.number: why}))
    assert reported == {100: "a save has published into it meanwhile"}
    assert complete(root) == [100, 300, 400, 500]


@pytest.mark.parametrize("point", ["sync removal of manifest", "remove file", "remove directory"])
def test_a_save_that_begins_while_its_directory_is_removed_is_kept(root, monkeypatch, point):
    resumed, reported = Resumed(root), {}
    at_point(monkeypatch, point, resumed.save)
    prune(root, RetentionRules(keep_last=4), stays=lambda one, why: reported.update({one.number: why}))
    assert reported == {100: "the old checkpoint is gone; a save into it has begun meanwhile"}
    assert complete(root) == NUMBERS
    assert not (place(root, 100) / REMOVAL_NAME).exists()


@pytest.mark.parametrize("point", ["sync removal of manifest", "remove file"])
def test_what_a_save_shares_with_the_checkpoint_that_is_removed_stays(tmp_path, monkeypatch, point):
    """A job that was restarted within its process saves that iteration again."""
    saver, frozen = new_saver(link_from=MIB), torch.nn.Parameter(torch.ones(MIB), requires_grad=False)
    state = NamedState({"frozen": frozen, "x": torch.ones(3)}, Mutability.NOW)

    def save_again() -> None:
        assert saver.start(place(tmp_path, 100), state).wait() is Outcome.PUBLISHED

    for number in (100, 200, 300):
        saver.start(place(tmp_path, number), state).wait()
    for path in tmp_path.rglob("*"):
        age(path, 7200)
    at_point(monkeypatch, point, save_again)
    prune(tmp_path, RetentionRules(keep_last=2, min_age_seconds=0.0))
    assert complete(tmp_path) == [100, 200, 300]
    saver.close()


def test_what_a_killed_removal_left_beside_a_later_save_is_a_left_over(root):
    with pytest.raises(StorageError):
        prune(root, RetentionRules(keep_last=4), faults="remove file:2:EIO")
    marker = place(root, 100) / REMOVAL_NAME
    assert marker.exists() and left_overs(root, min_age_seconds=0.0) == []
    Resumed(root).save()
    assert left_overs(root, min_age_seconds=0.0) == [REMOVAL_NAME]
    remove_left_overs(plan_prune(root, RetentionRules(keep_last=9, min_age_seconds=0.0)).left_overs, 0.0)
    assert not marker.exists() and complete(root) == NUMBERS


def test_a_save_that_begins_right_after_the_last_decision_is_kept(root, monkeypatch):
    """What is removed was listed before that decision, which sees the files of saves that began earlier."""
    decide, plans, resumed = pruning.plan_prune, [], Resumed(root)

    def begun_after_the_last(*arguments):
        plans.append(decide(*arguments))
        if len(plans) == 2:
            resumed.begin()
        return plans[-1]

    monkeypatch.setattr(pruning, "plan_prune", begun_after_the_last)
    prune(root, RetentionRules(keep_last=4))
    resumed.publish()
    assert complete(root) == NUMBERS


def test_what_megatron_writes_again_before_the_first_file_of_a_save_is_kept(root, monkeypatch):
    common, reported = put(root, 100, COMMON_FILE, 9000), {}
    at_point(monkeypatch, "remove file", lambda: common.write_bytes(b"of the save that begins"))
    prune(root, RetentionRules(keep_last=4), stays=lambda one, why: reported.update({one.number: why}))
    assert reported == {100: "the old checkpoint is gone; a save into it has begun meanwhile"}
    assert common.read_bytes() == b"of the save that begins"


def test_once_a_save_has_begun_files_of_others_are_kept(root, monkeypatch):
    notes, resumed = put(root, 100, "notes.txt", 9000), Resumed(root)
    at_point(monkeypatch, "sync removal of manifest", resumed.save)
    prune(root, RetentionRules(keep_last=4))
    assert notes.exists() and complete(root) == NUMBERS


@pytest.mark.parametrize("number", [100, 500])
def test_a_directory_that_somebody_else_removes_during_the_decision_is_left_out(root, monkeypatch, number):
    complaint = retention._complaint

    def remove_late(one, others):
        found = complaint(one, others)
        if one.number == number:
            shutil.rmtree(one.path)
        return found

    monkeypatch.setattr(retention, "_complaint", remove_late)
    plan = plan_prune(root, RetentionRules(keep_last=3))
    decided = [one.number for one in [*plan.removed, *(one for one, _ in plan.kept)]]
    assert sorted(decided) == [one for one in NUMBERS if one != number]


@pytest.mark.parametrize(
    "point", ["remove manifest", "sync removal of manifest", "remove file", "remove directory"]
)
def test_a_directory_that_somebody_else_removes_at_the_same_time_is_no_failure(root, monkeypatch, point):
    at_point(monkeypatch, point, lambda: shutil.rmtree(place(root, 100)))
    assert [one.number for one in prune(root, RetentionRules(keep_last=3))] == [200]
    assert complete(root) == [300, 400, 500] and not place(root, 100).exists()


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_storage_that_is_lost_is_a_failure_and_no_removal_by_somebody_else(root, monkeypatch, error):
    lstat, failed = os.lstat, []

    def lose() -> None:
        monkeypatch.setattr(os, "lstat", lost)
        raise OSError(error, os.strerror(error), str(place(root, 100)))

    def lost(path, **how):
        if str(path).startswith(str(root)):
            raise OSError(error, os.strerror(error), str(path))
        return lstat(path, **how)

    at_point(monkeypatch, "remove manifest", lose)
    prune(root, RetentionRules(keep_last=4), fails=lambda one, why: failed.append((one.number, str(why))))
    assert len(failed) == 1 and failed[0][0] == 100 and "iter_0000100 was not removed: " in failed[0][1]


@pytest.mark.parametrize("left", ["nothing", "an empty mount point"])
def test_a_run_whose_mount_is_lost_is_a_failure(root, monkeypatch, left):
    def lose() -> None:
        root.rename(root.with_name("elsewhere"))
        if left != "nothing":
            root.mkdir()

    at_point(monkeypatch, "remove manifest", lose)
    with pytest.raises(StorageError, match=r"iter_0000100 was not removed: .*No such file"):
        prune(root, RetentionRules(keep_last=4))


def test_what_a_save_begins_to_write_to_after_the_plan_is_reported_with_the_reason(root, monkeypatch):
    decide, plans, reported = pruning.plan_prune, [], {}

    def begun_after_the_first(*arguments):
        if len(plans) == 1:
            put(root, 100, LIVE.data_file_name(3), 5)
        plans.append(decide(*arguments))
        return plans[-1]

    monkeypatch.setattr(pruning, "plan_prune", begun_after_the_first)
    prune(root, RetentionRules(keep_last=4), stays=lambda one, why: reported.update({one.number: why}))
    assert reported.keys() == {100} and "a save into it may be under way" in reported[100]


def test_a_save_that_lost_its_files_to_prune_does_not_publish(root, monkeypatch):
    resumed = Resumed(root)
    resumed.begin()
    for path in place(root, 100).iterdir():
        age(path, 9000)
    monkeypatch.setattr(presence, "VISIBLE_SECONDS", 0.05)
    prune(root, RetentionRules(keep_last=4))
    assert resumed.publication.wait() is Outcome.FAILED
    resumed.saver.close()
    assert complete(root) == [200, 300, 400, 500]


def test_a_left_over_that_is_published_after_all_stays(root, monkeypatch):
    resumed = Resumed(root)
    resumed.begin()
    for path in place(root, 100).iterdir():
        age(path, 9000)
    plan = plan_prune(root, RetentionRules(keep_last=9))
    assert len(plan.left_overs) == 1
    at_point(monkeypatch, "look at left-over", resumed.publish)
    assert remove_left_overs(plan.left_overs) == []
    assert complete(root) == NUMBERS


def test_a_manifest_that_was_taken_is_put_back_but_not_over_a_newer_one(root, monkeypatch):
    path, synced = place(root, 100), []
    monkeypatch.setattr(pruning, "sync_directory", lambda path: synced.append(set(os.listdir(path))))
    for newer in (b"newer", None):
        (path / REMOVAL_NAME).write_bytes(b"taken")
        (path / MANIFEST_NAME).write_bytes(newer) if newer else (path / MANIFEST_NAME).unlink()
        _put_back(path / MANIFEST_NAME)
        assert (path / MANIFEST_NAME).read_bytes() == (newer or b"taken")
        assert not (path / REMOVAL_NAME).exists()
    assert len(synced) == 2, "a crash leaves it in its place"
    assert all(MANIFEST_NAME in names and REMOVAL_NAME not in names for names in synced)


def test_a_directory_that_a_save_has_just_made_stays(root):
    """Megatron makes it, and its save's first file comes a moment later."""
    made, old = place(root, 150), place(root, 250)
    made.mkdir()
    old.mkdir()
    age(old, 9000)
    plan = plan_prune(root, RetentionRules(keep_last=5))
    assert [one.number for one in plan.removed] == [250]
    (why,) = [why for one, why in plan.kept if one.number == 150]
    assert "it is empty, and was last changed 0 s ago" in why
