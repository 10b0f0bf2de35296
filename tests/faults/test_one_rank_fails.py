"""A failure of one rank alone: agreed, told alike everywhere, and nothing is lost."""

from pathlib import Path

import pytest

from tests.support.world import World

# What fails, as cuda/os/faults.h and engine/faults.py name it, and words of the error that tells it.
FAILURES = {
    "open": ("open:1:EIO", "open"),
    "no space before the first copy": ("reserve:1:ENOSPC", "No space left on device"),
    "quota": ("reserve:1:EDQUOT", "quota"),
    "first write": ("write:1:EIO", "Input/output error"),
    "footer": ("write:2:EIO", "Input/output error"),
    "no space while writing": ("write:1:ENOSPC", "No space left on device"),
    "truncate": ("truncate:1:EIO", "truncate"),
    "sync": ("sync:1:EIO", "sync"),
    "directory sync": ("sync directory:1:EIO", "sync directory"),
}
PUBLISHING = {
    "write index": "write index:1:ENOSPC",
    "rename index": "rename index:1:EIO",
    "write manifest": "write manifest:1:ENOSPC",
    "rename manifest": "rename manifest:1:EIO",
}


def assert_agreed(told: list[dict], rank: int, words: str) -> None:
    errors = {each["error"] for each in told}
    assert len(errors) == 1, "every rank has to raise the same text"
    error = errors.pop()
    assert error is not None and f"rank {rank}:" in error and words in error, error
    assert "bad" in error and "Nothing was published" in error
    for each in told:
        assert "datastates.manifest" not in each["left"] and "metadata.json" not in each["left"]
        assert "datastates.manifest" in each["after"]
        assert sum(name.startswith("data-") for name in each["after"]) == len(told)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("failure", FAILURES)
def test_failure_on_one_rank_is_raised_alike_on_all(
    world: World, tmp_path: Path, failure: str, mode: str
) -> None:
    plan, words = FAILURES[failure]
    told = world.run("fault_ranks:fail_then_recover", tmp_path, mode, plan, 1)
    assert_agreed(told, 1, words)


@pytest.mark.parametrize("failure", PUBLISHING)
def test_failure_to_publish_is_raised_alike_on_all(world: World, tmp_path: Path, failure: str) -> None:
    told = world.run("fault_ranks:fail_then_recover", tmp_path, "async", PUBLISHING[failure], 0)
    assert_agreed(told, 0, "injected")


def test_manifest_that_may_be_in_place_keeps_its_files(world: World, tmp_path: Path) -> None:
    """The directory could not be synced after the rename: told as failed, and yet nothing is torn."""
    plan = "sync directory of manifest:1:EIO"
    for each in world.run("fault_ranks:fail_then_recover", tmp_path, "async", plan, 0):
        assert "rank 0:" in each["error"]
        assert "datastates.manifest" in each["left"]
        assert sum(name.startswith("data-") for name in each["left"]) == 2


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("plan", ["write metadata:1:ENOSPC", "rename metadata:1:EIO"])
def test_failure_to_write_metadata_json_is_everybodys(
    world: World, tmp_path: Path, mode: str, plan: str
) -> None:
    """Megatron writes it on rank 0, while all others wait in a barrier. The checkpoint is whole without."""
    told = world.run("fault_ranks:fail_then_recover", tmp_path, mode, plan, 0)
    assert len({each["error"] for each in told}) == 1
    for each in told:
        assert "rank 0:" in each["error"] and "metadata" in each["error"]
        assert "datastates.manifest" in each["left"] and "metadata.json" not in each["left"]
        assert sum(name.startswith("data-") for name in each["left"]) == 2
        assert "metadata.json" in each["after"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_directories_that_ranks_do_not_share_are_noticed(world: World, tmp_path: Path, mode: str) -> None:
    told = world.run("fault_ranks:save_to_directories_of_their_own", tmp_path, mode)
    texts = {each["error"].replace(f"node{rank} failed", "node failed") for rank, each in enumerate(told)}
    assert len(texts) == 1
    assert "of rank 1" in told[0]["error"] and "--save on storage that all ranks share?" in told[0]["error"]
    for each in told:
        assert each["left"] == [], "nothing is published, and what was written is removed"


@pytest.mark.parametrize("failure", FAILURES)
def test_failure_of_one_rank_in_four(world: World, tmp_path: Path, failure: str) -> None:
    plan, words = FAILURES[failure]
    told = world.run("fault_ranks:fail_then_recover", tmp_path, "async", plan, 2, ranks=4)
    assert_agreed(told, 2, words)


@pytest.mark.parametrize("failure", PUBLISHING)
def test_failure_to_publish_for_four_ranks(world: World, tmp_path: Path, failure: str) -> None:
    told = world.run("fault_ranks:fail_then_recover", tmp_path, "sync", PUBLISHING[failure], 0, ranks=4)
    assert_agreed(told, 0, "injected")


@pytest.mark.parametrize("ranks", [2, 4])
def test_torn_copy_on_one_rank_is_raised_alike_on_all(world: World, tmp_path: Path, ranks: int) -> None:
    told = world.run("fault_ranks:tear_on_one_rank", tmp_path, 1, ranks=ranks)
    assert_agreed(told, 1, "tensor 'weight' changed too early")


def test_files_of_a_failed_save_are_removed_by_their_ranks(world: World, tmp_path: Path) -> None:
    world.run("fault_ranks:fail_while_pickling", tmp_path, 0)
    assert list((tmp_path / "bad").iterdir()) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_object_that_cannot_be_pickled_fails_the_save_on_all_ranks(
    world: World, tmp_path: Path, ranks: int
) -> None:
    told = world.run("fault_ranks:fail_while_pickling", tmp_path, 1, ranks=ranks)
    assert len({each["error"] for each in told}) == 1
    assert "rank 1: RuntimeError: this object cannot be pickled" in told[0]["error"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_object_that_no_load_accepts_fails_the_save_on_all_ranks(
    world: World, tmp_path: Path, ranks: int
) -> None:
    told = world.run("fault_ranks:fail_with_an_object_that_no_load_accepts", tmp_path, 1, ranks=ranks)
    (error,) = {each["error"] for each in told}
    assert f"rank 1: object 'own/shard_1_{ranks}' was not saved" in error
    for words in ("fractions.Fraction", "add_safe_globals", "state_dict()", "--datastates-trust-objects on"):
        assert words in error
    assert list((tmp_path / "bad").iterdir()) == []


def test_failure_to_tell_what_is_lazy_fails_the_save_on_all_ranks(world: World, tmp_path: Path) -> None:
    told = world.run("fault_ranks:fail_while_classifying", tmp_path)
    assert len({each["error"] for each in told}) == 1
    assert "rank 1: RuntimeError: nothing can be said of this tensor" in told[0]["error"]


def test_finalize_functions_of_a_failed_save_do_nothing_wherever_they_were_moved(
    world: World, tmp_path: Path
) -> None:
    for each in world.run("fault_ranks:fail_with_moved_finalize_functions", tmp_path):
        assert each["moved"] == 1, "metadata.json's"
        assert "metadata.json" not in each["left"]


def test_state_with_a_hole_is_not_published(world: World, tmp_path: Path) -> None:
    told = world.run("fault_ranks:hole_in_the_state", tmp_path)
    assert len({each["error"] for each in told}) == 1
    assert "'weight' has holes" in told[0]["error"]
    assert list((tmp_path / "bad").iterdir()) == []


def test_short_writes_are_resumed_where_they_ended(world: World, tmp_path: Path) -> None:
    told = world.run("fault_ranks:fail_then_recover", tmp_path, "async", "write:1:short,write:2:short", 1)
    assert [each["error"] for each in told] == [None, None]


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_save_that_is_refused_is_refused_on_all_ranks_alike(
    world: World, tmp_path: Path, on_failure: str
) -> None:
    """Although the save before it is done on one rank, and slow on the other."""
    told = world.run("fault_ranks:save_while_saving", tmp_path, on_failure)
    for each in told:
        if on_failure == "raise":
            assert "rank 0: the save to" in each["error"] and "rank 1: the save to" in each["error"]
            assert "--datastates-while-saving refuse" in each["error"]
        else:
            assert each["error"] is None
        assert each["left"] == []
        assert "datastates.manifest" in each["first"] and "metadata.json" in each["first"]
    assert told[0]["error"] == told[1]["error"]
