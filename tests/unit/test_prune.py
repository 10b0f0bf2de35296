"""Which checkpoints prune removes, which never, and what a kill of it leaves."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from megatron_datastates.errors import FormatError, NotACheckpointError, OptionError, StorageError
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.manifest import Ancestor, Manifest
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.near.holdings import resumable
from megatron_datastates.pipeline.runs.jobs import JOBS_NAME
from megatron_datastates.pipeline.runs.runs import find_iterations
from megatron_datastates.pipeline.upkeep import prune as pruning
from megatron_datastates.pipeline.upkeep.prune import prune
from megatron_datastates.pipeline.upkeep.repair import repair
from megatron_datastates.pipeline.upkeep.retention import RetentionRules, plan_prune
from megatron_datastates.units import size_text
from tests.support.capabilities import bound_by_permissions
from tests.unit import command
from tests.unit.inspecting import refused as refused_by_command
from tests.unit.pruning import NUMBERS, age, call_and_be_killed, complete, lose, place, put, reasons, removed
from tests.unit.pruning import root as root
from tests.unit.pruning import saved as saved
from tests.unit.states import OPTIONS, data_files, new_saver, save


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


def test_an_age_below_0_is_refused_in_the_options_own_unit(root):
    assert "--min-age -3: expected at least 0" in refused_by_command(
        "prune", root, "--keep-last", 1, "--min-age", -3
    )


def test_what_the_tracker_names_stays(root):
    (root / TRACKER_NAME).write_text("200")
    assert removed(root, keep_last=1) == [100, 300, 400]
    assert reasons(root, keep_last=1)[200] == "the tracker names it"


def test_a_pipe_in_the_place_of_a_manifest_holds_nobody(root):
    manifest = place(root, 400) / MANIFEST_NAME
    manifest.unlink()
    os.mkfifo(manifest)
    assert "manifest is lost" in reasons(root, keep_last=1)[400]


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
    found = reasons(root, keep_every=1000)
    assert found.pop(400).endswith("If no job runs, see datastates repair")
    assert found == {300: "the newest complete one", 500: "the tracker names it"}


@pytest.mark.parametrize("age_given", [0.0, 3600.0])
def test_what_a_kill_left_of_the_newest_save_stays_and_the_reason_says_what_to_do(root, age_given):
    """Its files are hours old: those of a save that waits for a fence may be, too."""
    lose(root, 500)
    (root / TRACKER_NAME).write_text("400")
    found = reasons(root, keep_last=4, min_age_seconds=age_given)
    assert "may be under way, as the tracker names none that is newer and undamaged" in found[500]
    assert found[500].endswith(
        "If no job runs, delete it by hand, or resume: it goes once a newer one is complete"
    )


def test_remains_of_a_save_go_once_a_newer_checkpoint_is_complete_and_tracked(root):
    lose(root, 200)
    assert removed(root, keep_last=4) == [200]
    assert complete(root) == [100, 300, 400, 500]


@pytest.mark.parametrize("tracked", [None, "100", "release"])
def test_remains_may_be_a_save_under_way_where_the_tracker_is_not_newer(root, tracked):
    lose(root, 200)
    (root / TRACKER_NAME).unlink()
    if tracked is not None:
        (root / TRACKER_NAME).write_text(tracked)
    assert 200 in reasons(root, keep_last=1)


def test_where_nothing_is_complete_nothing_goes(root):
    for number in NUMBERS:
        lose(root, number)
    assert removed(root, keep_last=1) == [] and sorted(reasons(root, keep_last=1)) == NUMBERS


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
    for options in ([], ["--yes"], ["--drop-optimizer", "--yes"]):
        code, _, errors = command.run("prune", root, "--keep-last", 1, *options)
        assert code == 2 and "correct it" in errors, "1 would say that a checkpoint was not removed"
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


def test_a_checkpoint_stays_if_a_link_leads_to_something_in_it(root):
    (root / "weights.bin").symlink_to(data_files(place(root, 200))[0])
    assert removed(root, keep_last=1) == [100, 300, 400]
    assert reasons(root, keep_last=1)[200] == "the link weights.bin points to it"


@pytest.mark.parametrize("damage", [None, b"", b"overwritten"])
def test_without_the_files_of_others_it_is_not_complete(root, tmp_path, damage):
    golden = Path(__file__).parents[1] / "golden" / "megatron-0.16"
    for number in (1, 2, 3):
        shutil.copytree(golden, place(tmp_path / "golden", number))
    common = place(tmp_path / "golden", 3) / "common.pt"
    common.unlink() if damage is None else common.write_bytes(damage)
    assert removed(tmp_path / "golden", keep_last=1) == [1]
    assert "damaged" in reasons(tmp_path / "golden", keep_last=1)[3]


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


def test_a_root_that_does_not_exist_or_is_no_run_is_refused(tmp_path):
    with pytest.raises(StorageError, match="cannot be listed"):
        plan_prune(tmp_path / "nothing", RetentionRules(keep_last=1))
    with pytest.raises(NotACheckpointError, match="no directory iter_"):
        plan_prune(tmp_path, RetentionRules(keep_last=1))


POINTS = ["remove manifest", "sync removal of manifest", "remove file", "remove directory"]


@pytest.mark.parametrize(
    ("point", "nth"), [*itertools.product(POINTS, [1, 2, 3]), *(("remove file", nth) for nth in range(4, 10))]
)
def test_a_kill_leaves_whole_checkpoints_and_remains_that_the_next_call_removes(root, point, nth):
    (place(root, 100) / "a file of the user's").touch()
    (place(root, 200) / "z").touch()
    call_and_be_killed(lambda: prune(root, RetentionRules(keep_last=2), faults=f"{point}:{nth}:kill"))
    whole = complete(root)
    assert {400, 500} <= set(whole)
    for one in find_iterations(root):
        if not any(one.path.iterdir()):
            age(one.path, 9000)  # until then it may be a save's that has just made it
    prune(root, RetentionRules(keep_last=2))
    assert complete(root) == [400, 500]
    assert [one.number for one in find_iterations(root)] == [400, 500]


def test_an_error_says_what_is_left(root):
    with pytest.raises(StorageError, match=r"0000100 was not removed: [^\[]*It is still complete"):
        prune(root, RetentionRules(keep_last=1), faults="remove manifest:1:EROFS")
    with pytest.raises(StorageError, match=r"0000100 was not removed.*It is not a checkpoint any more"):
        prune(root, RetentionRules(keep_last=1), faults="remove file:1:EIO")
    assert complete(root) == NUMBERS[1:]


def test_in_a_run_that_cannot_be_changed_checkpoints_stay_whole(root):
    root.chmod(0o555)
    with (
        bound_by_permissions(),
        pytest.raises(StorageError, match=r"Permission denied\. It is still complete"),
    ):
        prune(root, RetentionRules(keep_last=1))
    root.chmod(0o755)
    assert all(one.complete for one in find_iterations(root))


def test_a_read_only_file_system_is_no_lack_of_permission(root, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *args, **kwargs: False)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(StorageError, match=r"Read-only file system\. It is still complete"):
        prune(root, RetentionRules(keep_last=1))


def test_what_cannot_be_removed_does_not_keep_the_others(root, monkeypatch):
    remove = pruning._Removal.run

    def run(removal):
        if removal._path == place(root, 200):
            raise PermissionError(errno.EACCES, "Permission denied", str(removal._path))
        return remove(removal)

    monkeypatch.setattr(pruning._Removal, "run", run)
    code, printed, errors = command.run("prune", root, "--keep-last", "1", "--yes", "--json")
    assert code == 1
    found = json.loads(printed)
    assert numbers(found["removed"]) == [100, 300, 400] and complete(root) == [200, 500]
    (failed,) = found["failed"]
    assert failed["iteration"] == 200 and "It is still complete" in failed["why"] and failed["why"] in errors
    code, printed, errors = command.run("prune", root, "--keep-last", "1", "--yes")
    assert code == 1 and "removed 0 of 1 checkpoint" in printed and "Permission denied" in errors


def numbers(rows):
    return [one["iteration"] for one in rows]


def lose_when_gone(root, monkeypatch, number):
    """Makes the run's directory fail to be listed as soon as a checkpoint is gone from it."""
    scandir = os.scandir

    def lost(path):
        if Path(path) == root and not place(root, number).exists():
            raise OSError(errno.EIO, "Input/output error", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", lost)


def test_what_was_removed_before_the_storage_was_lost_is_printed(root, monkeypatch):
    lose_when_gone(root, monkeypatch, 200)
    code, printed, errors = command.run("prune", root, "--keep-last", "1", "--yes", "--json")
    found = json.loads(printed)
    assert code == 1 and numbers(found["removed"]) == [100, 200]
    assert numbers(found["failed"]) == [300, 400]
    assert all(one["why"] in errors and f"{root} cannot be listed" in one["why"] for one in found["failed"])


@pytest.mark.parametrize("option", [["--json"], []])
def test_what_was_removed_before_a_left_over_could_not_be_is_printed(root, monkeypatch, option):
    put(root, 300, "data-00000-0000000000000001-1.bin", 9000)
    put(root, 400, "data-00000-0000000000000001-1.bin", 9000)
    unlink = Path.unlink

    def refused(path, **how):
        if path.parent == place(root, 400):
            raise OSError(errno.EIO, "Input/output error", str(path))
        unlink(path, **how)

    monkeypatch.setattr(Path, "unlink", refused)
    code, printed, errors = command.run("prune", root, "--keep-last", "3", "--yes", *option)
    assert code == 1 and f"left-overs were not removed from {place(root, 400)}: " in errors
    if option:
        found = json.loads(printed)
        assert numbers(found["removed"]) == [100, 200] and found["failed"] == []
        assert [Path(one).parent for one in found["left_overs_done"]] == [place(root, 300)]
    else:
        assert "removed all 2 checkpoints, and 1 of 2 left-over files" in printed


def save_job(root, numbers, *resumed):
    """Saves what a job does that has ancestors; returns its checkpoints as ancestors, by iteration."""
    state = {"w": torch.ones(10), "optimizer.state.exp_avg.w": torch.ones(10)}
    saver, saved = new_saver(), {}
    for number in numbers:
        save_id = save(saver, place(root, number), state).save.context.save_id
        path = place(root, number) / MANIFEST_NAME
        manifest = Manifest.decode(path.read_bytes(), "")
        path.write_bytes(msgspec.structs.replace(manifest, ancestors=resumed, iteration=number).encode())
        saved[number] = Ancestor(number, str(save_id))
    saver.close()
    return saved


def test_what_removal_frees_is_said_where_others_keep_files(tmp_path):
    """As `--datastates-link` leaves them: a file of 100 is in 110, which goes too, and one of 100 in 120."""
    save_job(tmp_path, [100, 110, 120])
    assert "which frees" not in command.run("prune", tmp_path, "--keep-last", 1)[1]
    for other, size in ((110, 50_000), (120, 3_000_000)):
        (place(tmp_path, 100) / f"shared-{other}.bin").write_bytes(bytes(size))
        os.link(place(tmp_path, 100) / f"shared-{other}.bin", place(tmp_path, other) / "shared.bin")
    own = sum(path.stat().st_size for n in (100, 110) for path in place(tmp_path, n).glob("[!s]*"))
    printed = command.run("prune", tmp_path, "--keep-last", 1)[1]
    total, freed = size_text(own + 3_100_000), size_text(own + 50_000)
    assert f"would remove 2 of 3 checkpoints, {total}, which frees {freed}: files are shared" in printed


def track(root, number):
    """Lets the tracker name a checkpoint; all was written hours ago."""
    for path in root.rglob("*"):
        age(path, 7200)
    (root / TRACKER_NAME).write_text(str(number))
    age(root / TRACKER_NAME, 7199)  # written last


def roll_back(root, left):
    """Saves 100 and what is `left`; then, as another job that resumed from 100, 110 and 120."""
    first = save_job(root, (100, *left))[100]
    save_job(root, (110, 120), first)
    track(root, 120)


@pytest.mark.parametrize("left", [[160, 180, 200], [*range(162, 202, 2)]])
def test_after_a_rollback_the_present_branch_is_kept_first(left, tmp_path):
    roll_back(tmp_path, left)
    assert removed(tmp_path, keep_last=2) == [100, *left]
    assert removed(tmp_path, keep_last=4) == left[:-1]


@pytest.mark.parametrize(
    ("tracked", "expected"),
    [(110, [100, 120, 130, 140]), (140, [100, 105, 110, 120]), (100, [105, 110, 120])],
)
def test_of_two_branches_that_leave_one_checkpoint_the_tracked_one_is_kept_first(tracked, expected, tmp_path):
    """Their manifests do not say which is the later one. Both follow 100."""
    first = save_job(tmp_path, [100])[100]
    save_job(tmp_path, [120, 130, 140], first)
    save_job(tmp_path, [105, 110], first)
    track(tmp_path, tracked)
    assert removed(tmp_path, keep_last=2) == expected


def marked(root):
    """Returns the iterations that `ls` marks as those of a branch that was left."""
    _, printed, _ = command.run("ls", root)
    text = [int(line.split()[0]) for line in printed.splitlines() if line.split()[1:2] == ["-"]]
    _, printed, _ = command.run("ls", root, "--json")
    assert text == [row["iteration"] for row in json.loads(printed) if row["abandoned"]]
    return text


def test_after_a_rollback_ls_marks_what_was_left(tmp_path):
    roll_back(tmp_path, [160, 180])
    assert marked(tmp_path) == [160, 180]
    assert "- of an abandoned branch" in command.run("ls", tmp_path)[1]
    track(tmp_path, 160)  # by hand: the job that resumes from it has not saved yet
    assert marked(tmp_path) == [180]


def test_ls_marks_nothing_of_which_it_is_not_known_that_it_was_left(tmp_path):
    """100 was left by the job that saved 60, but another one, whose place is not known, resumed from it."""
    first = save_job(tmp_path, [50, 100])
    save_job(tmp_path, [60], first[50])
    save_job(tmp_path, [150], first[100])
    save_job(tmp_path, [40])  # anew, in the same directory
    for tracked, expected in ((150, [60]), (60, [100, 150]), (40, [])):
        track(tmp_path, tracked)
        assert marked(tmp_path) == expected, tracked


def test_a_tracker_that_names_what_a_later_job_has_left_names_no_present_branch(tmp_path):
    first = save_job(tmp_path, [100])[100]
    second = save_job(tmp_path, [120, 140], first)[120]
    save_job(tmp_path, [130], first, second)
    track(tmp_path, 140)
    assert removed(tmp_path, keep_last=1) == [100, 120]


def test_what_follows_the_tracked_checkpoint_or_is_of_another_run_is_of_no_other_branch(tmp_path):
    first = save_job(tmp_path, [100])[100]
    second = save_job(tmp_path, [110], first)[110]
    save_job(tmp_path, [120], first, second)
    save_job(tmp_path, [130], Ancestor(0), second)  # resumed from a checkpoint that `repair` has made
    save_job(tmp_path, [140])
    track(tmp_path, 110)
    assert removed(tmp_path, keep_last=3) == [100]


def test_what_was_published_just_now_stays_until_the_tracker_is_written(tmp_path):
    """After a rollback, until the tracker names it, nothing says that it is of the present branch."""
    first = save_job(tmp_path, [100])[100]
    save_job(tmp_path, [120, 130], first)
    track(tmp_path, 130)
    save_job(tmp_path, [110], first)
    save_job(tmp_path, [115])  # of no known branch
    assert removed(tmp_path, keep_last=1) == [100, 120]
    assert reasons(tmp_path, keep_last=1)[110].startswith("it was published after the tracker was written")
    for path in tmp_path.rglob("*"):
        age(path, 7200 if path.name != TRACKER_NAME else 7201)
    assert removed(tmp_path, keep_last=1) == [100, 115, 120], "training may stand still for hours"
    assert removed(tmp_path, keep_last=1, min_age_seconds=0.0) == [100, 110, 115, 120]
    (tmp_path / TRACKER_NAME).unlink()
    assert removed(tmp_path, keep_last=1) == [100, 110, 115, 120], "no tracker is written there"


@pytest.mark.parametrize("mode", [0, 0o644], ids=["of another user", "damaged"])
def test_a_list_of_jobs_that_cannot_be_used_is_done_without(mode, tmp_path):
    roll_back(tmp_path, [160])
    (tmp_path / JOBS_NAME).write_text("damaged")
    with bound_by_permissions():
        (tmp_path / JOBS_NAME).chmod(mode)
        assert removed(tmp_path, keep_last=2) == [100, 160]


def test_what_the_tracked_checkpoint_follows_was_not_left_by_a_job_that_went_back_before_it(tmp_path):
    """No list of jobs says that another one has returned to it since."""
    first = save_job(tmp_path, [100, 200])
    save_job(tmp_path, [150], first[100])
    save_job(tmp_path, [300], first[200])
    track(tmp_path, 300)
    assert removed(tmp_path, keep_last=2) == [100, 150]


def test_a_repaired_manifest_makes_no_checkpoint_of_an_abandoned_branch_the_newest(tmp_path):
    """It does not say what its job resumed from, but the other branch's manifests name its job."""
    roll_back(tmp_path, [160, 200])
    (place(tmp_path, 200) / MANIFEST_NAME).unlink()
    repair(place(tmp_path, 200), options=OPTIONS)
    age(place(tmp_path, 200) / MANIFEST_NAME, 7200)
    assert removed(tmp_path, keep_last=2) == [100, 160, 200]
    (tmp_path / TRACKER_NAME).write_text("")
    assert resumable(tmp_path) == 120


def test_the_newest_undamaged_one_stays_also_if_it_is_another_one_since_the_plan(root, monkeypatch):
    data_files(place(root, 500))[0].unlink()
    decide, plans = pruning.plan_prune, []

    def removed_by_somebody_else(*arguments):
        if plans:
            shutil.rmtree(place(root, 400), ignore_errors=True)
        plans.append(decide(*arguments))
        return plans[-1]

    (root / TRACKER_NAME).unlink()
    monkeypatch.setattr(pruning, "plan_prune", removed_by_somebody_else)
    assert [one.number for one in prune(root, RetentionRules(keep_last=1))] == [100, 200]
    assert place(root, 300).exists()


def test_what_has_lost_its_optimizer_is_none_of_the_last(tmp_path):
    """But it keeps its place: what the present branch follows is kept before what was left."""
    roll_back(tmp_path, [160, 200])
    drop = ("prune", tmp_path, "--keep-last", "2", "--drop-optimizer", "--yes", "--json")
    found = [json.loads(command.run(*drop)[1]) for _ in range(2)]
    assert [numbers(one["dropped"]) for one in found] == [[100, 160, 200], []]
    for path in tmp_path.rglob("*"):
        age(path, 7200)
    assert removed(tmp_path, keep_last=2) == [100, 160, 200]
    assert removed(tmp_path, keep_last=3) == [160, 200]
    assert removed(tmp_path, keep_last=4) == [160]
    (tmp_path / TRACKER_NAME).write_text("")
    assert resumable(tmp_path) == 120


def test_what_was_dropped_without_a_note_of_its_place_is_not_taken_for_what_was_left(tmp_path):
    """As by a program before the field `rewritten`: no job names the save id that the drop has made."""
    first = save_job(tmp_path, [100])[100]
    save_job(tmp_path, [200, 300], first)
    track(tmp_path, 300)
    command.run("prune", tmp_path, "--keep-last", 1, "--drop-optimizer", "--yes")
    path = place(tmp_path, 200) / MANIFEST_NAME
    manifest = Manifest.decode(path.read_bytes(), "")
    assert manifest.is_without_optimizer
    path.write_bytes(msgspec.structs.replace(manifest, rewritten=msgspec.UNSET).encode())
    assert marked(tmp_path) == []
