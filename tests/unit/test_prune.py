"""Which checkpoints may go, which never, and what a kill leaves."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import FormatError, NotACheckpointError, OptionError, StorageError
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline import presence
from megatron_datastates.pipeline.prune import (
    REMOVAL_NAME,
    RetentionRules,
    _put_back,
    plan_prune,
    prune,
    remove_left_overs,
)
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.repair import repair
from megatron_datastates.pipeline.runs import find_iterations
from megatron_datastates.pipeline.verify import verify
from tests.unit.states import OPTIONS, State, data_files, new_saver, save

NUMBERS = [100, 200, 300, 400, 500]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "run"
    saver = new_saver()
    for number in NUMBERS:
        save(saver, place(root, number), {"a": torch.arange(number)}, {"o": number})
        (place(root, number) / "metadata.json").write_text('{"sharded_backend": "datastates"}')
    saver.close()
    (root / TRACKER_NAME).write_text("500")
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    """Of a run that ended hours ago."""
    copied = Path(shutil.copytree(saved, tmp_path / "run"))
    for path in copied.rglob("*"):
        age(path, 7200)
    return copied


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def place(root: Path, number: int) -> Path:
    return root / f"iter_{number:07d}"


def removed(root: Path, **rules: int) -> list[int]:
    return [one.number for one in plan_prune(root, RetentionRules(**rules)).removed]


def reasons(root: Path, **rules: int) -> dict[int, str]:
    return {one.number: why for one, why in plan_prune(root, RetentionRules(**rules)).kept}


def lose(root: Path, number: int) -> None:
    """Leaves of a checkpoint what a save that was killed leaves: data files."""
    for path in place(root, number).iterdir():
        if path not in data_files(place(root, number)):
            path.unlink()


def complete(root: Path) -> list[int]:
    """What is said to be complete; all of it is."""
    found = [one for one in find_iterations(root) if one.complete]
    assert all(verify(one.path, options=OPTIONS).good for one in found)
    return [one.number for one in found]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"keep_last": 1}, [100, 200, 300, 400]),
        ({"keep_last": 2}, [100, 200, 300]),
        ({"keep_last": 9}, []),
        ({"keep_every": 200}, [100, 300]),
        ({"keep_every": 1000}, [100, 200, 300, 400]),
        ({"keep_last": 2, "keep_every": 200}, [100, 300]),
    ],
)
def test_rules_say_what_stays(root, rules, expected):
    assert removed(root, **rules) == expected
    assert sorted([*expected, *reasons(root, **rules)]) == NUMBERS
    assert complete(root) == NUMBERS  # a plan removes nothing
    assert [one.number for one in prune(root, RetentionRules(**rules))] == expected
    assert complete(root) == [number for number in NUMBERS if number not in expected]
    assert not any(place(root, number).exists() for number in expected)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"keep_last": 0},
        {"keep_every": 0},
        {"keep_last": -1, "keep_every": 5},
        {"keep_last": 1, "min_age_seconds": -1.0},
        {"keep_last": 1, "min_age_seconds": math.nan},
    ],
)
def test_rules_that_say_nothing_are_refused(rules):
    with pytest.raises(OptionError):
        RetentionRules(**rules)


def test_what_the_tracker_names_stays(root):
    (root / TRACKER_NAME).write_text("200")
    assert removed(root, keep_last=1) == [100, 300, 400]
    assert reasons(root, keep_last=1)[200] == "the tracker names it"


def test_a_damaged_checkpoint_stays_and_does_not_count(root):
    (place(root, 500) / MANIFEST_NAME).write_text("nonsense")
    data_files(place(root, 400))[0].unlink()
    assert removed(root, keep_last=1) == [100, 200]
    found = reasons(root, keep_last=1)
    assert "damaged" in found[400]
    assert found[300] == "the newest complete one"


def test_the_newest_complete_one_stays_whatever_is_newer(root):
    for number in (400, 500):
        (place(root, number) / MANIFEST_NAME).unlink()
    assert removed(root, keep_every=1000) == [100, 200]
    assert reasons(root, keep_every=1000) == {
        300: "the newest complete one",
        400: "incomplete: its save may be under way",
        500: "the tracker names it",
    }


def test_rests_go_once_a_newer_checkpoint_is_complete_and_tracked(root):
    lose(root, 200)
    assert removed(root, keep_last=4) == [200]
    assert complete(root) == [100, 300, 400, 500]


@pytest.mark.parametrize("tracked", [None, "100", "release"])
def test_where_the_tracker_is_not_newer_a_rest_may_be_a_save_under_way(root, tracked):
    lose(root, 200)
    (root / TRACKER_NAME).unlink()
    if tracked is not None:
        (root / TRACKER_NAME).write_text(tracked)
    assert 200 in reasons(root, keep_last=1)


def test_what_only_lost_its_manifest_stays_and_can_be_repaired(root):
    (place(root, 200) / MANIFEST_NAME).unlink()
    assert removed(root, keep_every=1000) == [100, 300, 400]
    assert reasons(root, keep_every=1000)[200] == "its manifest is lost: see datastates repair"
    prune(root, RetentionRules(keep_every=1000))
    repair(place(root, 200), options=OPTIONS)
    assert complete(root) == [200, 500]


def test_a_removal_that_was_repaired_and_broke_again_is_no_removal(root):
    with pytest.raises(StorageError):
        prune(root, RetentionRules(keep_last=1), faults="sync removal of manifest:1:EIO")
    assert removed(root, keep_last=4) == [100]
    repair(place(root, 100), options=OPTIONS)
    (place(root, 100) / MANIFEST_NAME).unlink()
    assert removed(root, keep_last=4) == []


@pytest.mark.parametrize("damage", [b"", b"\xef\xbb\xbf100", b"\xff", b"9" * 4000, b"-1", b"100 200", None])
def test_a_tracker_that_may_name_anything_lets_nothing_go(root, damage):
    tracker = root / TRACKER_NAME
    tracker.unlink()
    if damage is None:
        tracker.mkdir()  # what even root cannot read
    else:
        tracker.write_bytes(damage)
    with pytest.raises(StorageError if damage is None else FormatError, match=r"the tracker .* correct it"):
        prune(root, RetentionRules(keep_last=1))
    assert complete(root) == NUMBERS


def test_what_a_link_leads_to_stays(root, tmp_path):
    shutil.rmtree(place(root, 400))
    place(root, 400).symlink_to(place(root, 100).name)
    (root / TRACKER_NAME).write_text("400")
    (root / "best").symlink_to(place(root, 200))
    (root / "loop").symlink_to("loop")
    assert removed(root, keep_last=1) == [300]
    assert reasons(root, keep_last=1)[100] == "the link iter_0000400 points to it"
    (root / "newest").symlink_to(place(root, 500))
    assert removed(root, keep_last=2) == []  # that one counts all the same


@pytest.mark.parametrize("damage", [None, b"", b"overwritten"])
def test_without_the_files_of_others_it_is_not_complete(root, tmp_path, damage):
    golden = Path(__file__).parents[1] / "golden" / "megatron-0.16"
    for number in (1, 2, 3):
        shutil.copytree(golden, place(tmp_path / "golden", number))
    common = place(tmp_path / "golden", 3) / "common.pt"
    common.unlink() if damage is None else common.write_bytes(damage)
    assert removed(tmp_path / "golden", keep_last=1) == [1]
    assert "damaged" in reasons(tmp_path / "golden", keep_last=1)[3]


# -- saves that are under way, and what saves that were killed have left ------------------------------------

LIVE, DEAD = SaveId(7, 1), SaveId(8, 3)


def put(root: Path, number: int, name: str, seconds_old: float = 0.0) -> Path:
    path = place(root, number) / name
    path.write_bytes(b"12345")
    age(path, seconds_old)
    return path


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


def test_a_young_file_keeps_a_rest_whose_other_files_are_old(root):
    lose(root, 200)
    put(root, 200, DEAD.data_file_name(0), 10)
    assert removed(root, keep_last=4) == []
    assert "is 10 s old" in reasons(root, keep_last=4)[200]
    assert removed(root, keep_last=4, min_age_seconds=5.0) == [200]


def test_a_removal_that_was_killed_goes_on_once_its_files_are_old(root):
    """What it took the manifest of may be what a save has published at that very moment."""
    with pytest.raises(StorageError):
        prune(root, RetentionRules(keep_last=1), faults="sync removal of manifest:1:EIO")
    for path in place(root, 100).iterdir():
        age(path, 60)
    assert "a save into it may be under way" in reasons(root, keep_last=4)[100]
    repair(place(root, 100), options=OPTIONS)
    assert complete(root) == NUMBERS


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


def test_without_a_sound_manifest_nothing_is_a_left_over(root):
    for number, change in ((200, Path.unlink), (300, lambda path: path.write_bytes(b"nonsense"))):
        put(root, number, DEAD.data_file_name(0), 9000)
        change(place(root, number) / MANIFEST_NAME)
    data_files(place(root, 400))[0].unlink()
    put(root, 400, DEAD.data_file_name(0), 9000)
    assert left_overs(root) == []


@pytest.mark.parametrize("point", ["look at left-over", "remove left-over"])
def test_an_error_while_left_overs_are_removed_says_where(root, point):
    put(root, 300, DEAD.data_file_name(0), 9000)
    plan = plan_prune(root, RetentionRules(keep_last=9))
    with pytest.raises(StorageError, match=r"left-overs were not removed from .*iter_0000300"):
        remove_left_overs(plan.left_overs, faults=f"{point}:1:EIO")
    assert complete(root) == NUMBERS


def at_point(monkeypatch, name: str, change) -> None:
    """`change` happens once, when prune has come to this point."""
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


def test_a_save_that_lost_its_files_to_prune_does_not_publish(root, monkeypatch):
    resumed = Resumed(root)
    resumed.begin()
    for path in place(root, 100).iterdir():
        age(path, 9000)
    monkeypatch.setattr(presence, "_VISIBLE_SECONDS", 0.05)
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


def test_a_manifest_that_was_taken_is_put_back_but_not_over_a_newer_one(root):
    path = place(root, 100)
    for newer in (b"newer", None):
        (path / REMOVAL_NAME).write_bytes(b"taken")
        (path / MANIFEST_NAME).write_bytes(newer) if newer else (path / MANIFEST_NAME).unlink()
        _put_back(path)
        assert (path / MANIFEST_NAME).read_bytes() == (newer or b"taken")
        assert not (path / REMOVAL_NAME).exists()


# -- what is not ours, kills, errors ------------------------------------------------------------------------


def test_what_is_not_ours_stays(root, tmp_path):
    for number, metadata in ((10, '{"sharded_backend": "torch_dist"}'), (20, None)):
        place(root, number).mkdir()
        name = "a file" if metadata is None else "metadata.json"
        (place(root, number) / name).write_text(metadata or "")
    (place(root, 100) / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    shutil.move(place(root, 200), tmp_path / "elsewhere")
    place(root, 200).symlink_to(tmp_path / "elsewhere")
    shutil.copytree(place(root, 300), root / "iter_30")
    (root / "iter_300_copy").mkdir()
    assert removed(root, keep_last=1) == [300, 400]
    prune(root, RetentionRules(keep_last=1))
    assert (tmp_path / "elsewhere" / MANIFEST_NAME).exists()
    assert [one.number for one in find_iterations(root)] == [10, 20, 30, 100, 200, 500]
    assert (root / "iter_300_copy").exists()


def test_a_root_that_is_not_there_or_no_run_is_told(tmp_path):
    with pytest.raises(StorageError, match="cannot be listed"):
        plan_prune(tmp_path / "nothing", RetentionRules(keep_last=1))
    with pytest.raises(NotACheckpointError, match="no directory iter_"):
        plan_prune(tmp_path, RetentionRules(keep_last=1))


POINTS = ["remove manifest", "sync removal of manifest", "remove file", "remove directory"]


@pytest.mark.parametrize(
    ("point", "nth"), [*itertools.product(POINTS, [1, 2, 3]), *(("remove file", nth) for nth in range(4, 10))]
)
def test_a_kill_leaves_whole_checkpoints_and_rests_that_the_next_call_removes(root, point, nth):
    (place(root, 100) / "a file of the user's").touch()
    (place(root, 200) / "z").touch()
    code = (
        "import sys; from megatron_datastates.pipeline.prune import RetentionRules, prune\n"
        f"prune(sys.argv[1], RetentionRules(keep_last=2), faults='{point}:{nth}:kill')"
    )
    done = subprocess.run([sys.executable, "-c", code, root], check=False)
    assert done.returncode == -signal.SIGKILL
    whole = complete(root)
    assert {400, 500} <= set(whole)
    for one in find_iterations(root):
        if not any(one.path.iterdir()):
            age(one.path, 9000)  # until then it may be a save's that has just made it
    prune(root, RetentionRules(keep_last=2))
    assert complete(root) == [400, 500]
    assert [one.number for one in find_iterations(root)] == [400, 500]


def test_a_directory_that_a_save_has_just_made_stays(root):
    """Megatron makes it, and its save's first file comes a moment later."""
    made, old = place(root, 150), place(root, 250)
    made.mkdir()
    old.mkdir()
    age(old, 9000)
    plan = plan_prune(root, RetentionRules(keep_last=5))
    assert [one.number for one in plan.removed] == [250]
    (why,) = [why for one, why in plan.kept if one.number == 150]
    assert "it is empty, and was made 0 s ago" in why


def test_an_error_says_what_is_left(root):
    with pytest.raises(StorageError, match=r"0000100 was not removed.*It is still complete"):
        prune(root, RetentionRules(keep_last=1), faults="remove manifest:1:EROFS")
    with pytest.raises(StorageError, match=r"0000100 was not removed.*It is not a checkpoint any more"):
        prune(root, RetentionRules(keep_last=1), faults="remove file:1:EIO")
    assert complete(root) == NUMBERS[1:]
