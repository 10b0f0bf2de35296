"""Prune of torch_dist: what is whole, what a save may be writing, and what a kill leaves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_datastates.cli.prune import other_formats
from megatron_datastates.convert import look
from megatron_datastates.errors import StorageError
from megatron_datastates.format.directory import REMOVAL_NAME
from megatron_datastates.pipeline.upkeep.prune import prune
from megatron_datastates.pipeline.upkeep.retention import RetentionRules, plan_prune
from tests.unit.command import run
from tests.unit.inspecting import output_of
from tests.unit.pruning import age, call_and_be_killed, place
from tests.unit.pruning import root as root
from tests.unit.trained import TRACKER, save_trained

NUMBERS = [100, 200, 300, 400]
FORMATS = other_formats(Path())
KEEP_ONE = RetentionRules(keep_last=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose iteration 200 is of datastates."""
    root = tmp_path_factory.mktemp("saved") / "run"
    for number in NUMBERS:
        save_trained(place(root, number), "datastates" if number == 200 else "torch_dist")
    (root / TRACKER).write_text("400")
    return root


def removed(root: Path, rules: RetentionRules = KEEP_ONE) -> list[int]:
    return [one.number for one in plan_prune(root, rules, FORMATS).removed]


def reasons(root: Path, rules: RetentionRules = KEEP_ONE) -> dict[int, str]:
    return {one.number: why for one, why in plan_prune(root, rules, FORMATS).kept}


def there(root: Path) -> list[int]:
    """Returns the iterations whose directories are there; each has to be whole."""
    looks = look.look_at_run(root)
    assert {one.state for one in looks} == {"complete"}, looks
    return [one.iteration for one in looks if one.iteration is not None]


def data_file(root: Path, number: int) -> Path:
    return next(place(root, number).glob("*.distcp"))


def test_one_set_of_rules_is_for_both_formats(root: Path) -> None:
    assert removed(root) == [100, 200, 300]
    assert removed(root, RetentionRules(keep_last=3)) == [100]
    assert removed(root, RetentionRules(keep_every=300)) == [100, 200]
    text = output_of("prune", root, "--keep-last", 2, "--yes")
    assert text.splitlines()[-1] == "removed all 2 checkpoints"
    assert there(root) == [300, 400] and len(list(root.iterdir())) == 3


def test_without_a_description_of_it_another_format_stays(root: Path) -> None:
    plan = plan_prune(root, KEEP_ONE)
    assert plan.removed == []
    assert {one.number: why for one, why in plan.kept if one.number != 200} == dict.fromkeys(
        (100, 300, 400), "its format is torch_dist"
    )


def test_what_the_tracker_names_stays(root: Path) -> None:
    (root / TRACKER).write_text("100")
    assert removed(root) == [200, 300] and reasons(root)[100] == "the tracker names it"


def truncate(path: Path) -> None:
    os.truncate(data_file(path.parent, int(path.name[5:])), 100)


DAMAGE = {
    "is missing": lambda path: data_file(path.parent, int(path.name[5:])).unlink(),
    "expected at least": truncate,
    ".metadata is missing": lambda path: (path / ".metadata").unlink(),
    "see datastates verify": lambda path: (path / ".metadata").write_bytes(b"nonsense"),
}


@pytest.mark.parametrize("why", DAMAGE)
def test_a_damaged_one_stays_and_does_not_count(root: Path, why: str) -> None:
    (root / TRACKER).write_text("100")
    DAMAGE[why](place(root, 400))
    assert removed(root) == [200]
    found = reasons(root)
    assert found[400].startswith("damaged: ") and why in found[400]
    assert found[300] == "the newest complete one"


def test_sizes_are_compared_however_large_the_index_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "_MOST_PARSED_BYTES", 1)
    truncate(place(root, 300))
    assert removed(root) == [100, 200] and reasons(root)[300].startswith("damaged: ")


def test_a_file_of_the_common_state_belongs_to_it(root: Path) -> None:
    metadata = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    stored = look.load_metadata(place(root, 300) / ".metadata")
    assert "common_state/shard_0_1" in stored.state_dict_metadata  # so none is needed
    (place(root, 300) / "metadata.json").write_text(json.dumps(metadata))
    assert 300 not in removed(root), "it may have been saved just now, and be tracked next"
    age(place(root, 300) / "metadata.json", 7200)
    assert 300 in removed(root)
    look._require_common_file(place(root, 200))
    with pytest.raises(look._FoundError, match=r"common\.pt is missing"):
        look._require_common_file(place(root, 300))


def test_a_checkpoint_that_is_being_saved_again_stays(root: Path) -> None:
    age(data_file(root, 300), 60)
    assert removed(root) == [100, 200]
    assert reasons(root)[300] == (
        f"a save into it may be under way: {data_file(root, 300).name}, which is newer than its index, is "
        "60 s old"
    )
    age(data_file(root, 300), 3700)
    assert 300 in removed(root)


def test_remains_of_a_save_go_once_they_are_old(root: Path) -> None:
    for name in (".metadata", "metadata.json"):
        (place(root, 300) / name).unlink()
    everything = RetentionRules(keep_last=9)
    assert removed(root, everything) == [300]
    age(data_file(root, 300), 60)
    assert "may be under way" in reasons(root, everything)[300]
    for name in (".metadata", "metadata.json"):
        (place(root, 400) / name).unlink()
    assert (
        "incomplete" in reasons(root, everything).get(400, "") or "tracker" in reasons(root, everything)[400]
    )


def test_one_that_lacks_only_metadata_json_stays(root: Path) -> None:
    """Whether newer ones are complete or not: nobody is to delete what DCP alone has written."""
    (root / "latest_checkpointed_iteration.txt").unlink()
    for number in (300, 400):
        (place(root, number) / "metadata.json").unlink()
        assert reasons(root)[number] == "only metadata.json is missing, beside .metadata"


POINTS = [("remove manifest", 1), ("sync removal of manifest", 1), ("remove directory", 1)]
POINTS += [("remove file", nth) for nth in range(1, 4)]


@pytest.mark.parametrize(("point", "nth"), POINTS)
def test_a_kill_leaves_whole_checkpoints_and_remains_that_the_next_call_removes(
    root: Path, point: str, nth: int
) -> None:
    shutil.rmtree(place(root, 200))
    rules, faults = RetentionRules(keep_last=2), f"{point}:{nth}:kill"
    call_and_be_killed(lambda: prune(root, rules, FORMATS, faults=faults))
    first = look.look_at(place(root, 100))
    assert first.state == ("complete" if point == "remove manifest" else "unfinished")
    age(place(root, 100), 9000)  # an empty one may be a save's that has just made it
    prune(root, RetentionRules(keep_last=2), FORMATS)
    assert there(root) == [300, 400] and not place(root, 100).exists()


def test_what_a_killed_prune_has_left_is_named(root: Path) -> None:
    with pytest.raises(StorageError, match="It is not a checkpoint any more"):
        prune(root, KEEP_ONE, FORMATS, faults="remove file:1:EIO")
    found = look.look_at(place(root, 100))
    assert found.problem == "`datastates prune` was ended while it removed it: call that again"
    assert (place(root, 100) / REMOVAL_NAME).exists()
    with pytest.raises(StorageError, match="It is still complete"):
        prune(root, KEEP_ONE, FORMATS, faults="remove manifest:2:EIO")


def test_a_save_into_what_a_killed_prune_has_left_is_complete(root: Path) -> None:
    (place(root, 300) / REMOVAL_NAME).write_bytes(b"the index of the checkpoint before")
    assert reasons(root, RetentionRules(keep_last=2))[300] == "one of the last 2"


def test_a_save_that_begins_meanwhile_keeps_its_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves of torch_dist give their files the names that are there already."""
    from megatron_datastates.pipeline.upkeep import prune as module

    file, real = data_file(root, 100), module.sync_directory

    def sync(path: Path) -> None:
        real(path)
        if path == file.parent:
            file.write_bytes(b"new")

    monkeypatch.setattr(module, "sync_directory", sync)
    found: list[str] = []
    gone = prune(root, RetentionRules(keep_last=3), FORMATS, stays=lambda one, why: found.append(why))
    assert gone == [] and found == ["the old checkpoint is gone; a save into it has begun meanwhile"]
    assert file.read_bytes() == b"new"


def test_a_file_that_is_gone_when_it_is_looked_at_ends_no_plan(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, scandir = place(root, 100) / "__1_0.distcp.tmp", os.scandir

    @contextlib.contextmanager
    def scan_late(path: Path) -> Iterator[list[os.DirEntry[str]]]:
        temporary.write_bytes(b"")
        with scandir(path) as entries:
            found = list(entries)
        temporary.unlink(missing_ok=True)
        yield found

    monkeypatch.setattr(os, "scandir", scan_late)
    assert place(root, 100) in [one.path for one in plan_prune(root, KEEP_ONE, FORMATS).removed]


def test_the_plan_is_printed_with_sizes(root: Path) -> None:
    code, printed, _ = run("prune", root, "--keep-last", 1)
    assert code == 0 and f"would remove  {place(root, 100)}" in printed and "Nothing was removed" in printed
    assert there(root) == NUMBERS
