"""A save that fails on one rank: all ranks raise the same error, and nothing is lost."""

import socket
from pathlib import Path

import pytest

from tests.support.world import World

# The fault plan (names as in cuda/os/faults.h and engine/faults.py) and words expected in the error.
FAILURES = {
    "no space while writing": ("write:1:ENOSPC", "No space left on device"),
    "open": ("open:1:EIO", "open"),
    "no space before the first copy": ("reserve:1:ENOSPC", "No space left on device"),
    "quota": ("reserve:1:EDQUOT", "quota"),
    "first write": ("write:1:EIO", "Input/output error"),
    "footer": ("write:2:EIO", "Input/output error"),
    "truncate": ("truncate:1:EIO", "truncate"),
    "sync": ("sync:1:EIO", "sync"),
    "directory sync": ("sync directory:1:EIO", "sync directory"),
}
PUBLISHING = {
    "rename manifest": "rename manifest:1:EIO",
    "write index": "write index:1:ENOSPC",
    "rename index": "rename index:1:EIO",
    "write manifest": "write manifest:1:ENOSPC",
}


def assert_agreed(reports: list[dict], rank: int, words: str) -> None:
    errors = {each["error"] for each in reports}
    assert len(errors) == 1, "every rank must raise the same text"
    error = errors.pop()
    assert error is not None and f"rank {rank}:" in error and words in error, error
    assert "bad" in error and "Nothing was published" in error
    for each in reports:
        assert "datastates.manifest" not in each["left"] and "metadata.json" not in each["left"]
        assert "datastates.manifest" in each["after"]
        assert sum(name.startswith("data-") for name in each["after"]) == len(reports)


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("failure", FAILURES)
def test_failure_on_one_rank_raises_the_same_error_on_all(
    world: World, tmp_path: Path, failure: str, mode: str
) -> None:
    plan, words = FAILURES[failure]
    reports = world.run("fault_ranks:fail_then_recover", tmp_path, mode, plan, 1)
    assert_agreed(reports, 1, words)


@pytest.mark.parametrize("failure", PUBLISHING)
def test_failure_to_publish_raises_the_same_error_on_all(world: World, tmp_path: Path, failure: str) -> None:
    reports = world.run("fault_ranks:fail_then_recover", tmp_path, "async", PUBLISHING[failure], 0)
    assert_agreed(reports, 0, "injected")


def test_manifest_that_may_be_in_place_keeps_its_files(world: World, tmp_path: Path) -> None:
    """If the directory cannot be synced after the rename, the save fails, but the checkpoint is whole."""
    plan = "sync directory of manifest:1:EIO"
    for each in world.run("fault_ranks:fail_then_recover", tmp_path, "async", plan, 0):
        assert "rank 0:" in each["error"]
        assert "datastates.manifest" in each["left"]
        assert sum(name.startswith("data-") for name in each["left"]) == 2


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("plan", ["write metadata:1:ENOSPC", "rename metadata:1:EIO"])
def test_failure_to_write_metadata_json_is_raised_on_all(
    world: World, tmp_path: Path, mode: str, plan: str
) -> None:
    """Megatron writes it on rank 0 while all others wait in a barrier. The checkpoint is whole without it."""
    reports = world.run("fault_ranks:fail_then_recover", tmp_path, mode, plan, 0)
    assert len({each["error"] for each in reports}) == 1
    for each in reports:
        assert "rank 0:" in each["error"] and "metadata" in each["error"]
        assert "datastates.manifest" in each["left"] and "metadata.json" not in each["left"]
        assert sum(name.startswith("data-") for name in each["left"]) == 2
        assert "metadata.json" in each["after"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_directories_that_ranks_do_not_share_are_noticed(world: World, tmp_path: Path, mode: str) -> None:
    reports = world.run("fault_ranks:save_to_directories_of_their_own", tmp_path, mode)
    texts = {each["error"].replace(f"node{rank} failed", "node failed") for rank, each in enumerate(reports)}
    assert len(texts) == 1
    assert (
        "of rank 1" in reports[0]["error"]
        and "--save on storage that all ranks share?" in reports[0]["error"]
    )
    for each in reports:
        assert each["left"] == [], "nothing is published, and what was written is removed"


@pytest.mark.parametrize("failure", FAILURES)
def test_failure_on_one_of_four_ranks_raises_the_same_error_on_all(
    world: World, tmp_path: Path, failure: str
) -> None:
    plan, words = FAILURES[failure]
    reports = world.run("fault_ranks:fail_then_recover", tmp_path, "async", plan, 2, ranks=4)
    assert_agreed(reports, 2, words)


@pytest.mark.parametrize("failure", PUBLISHING)
def test_failure_to_publish_with_four_ranks_raises_the_same_error_on_all(
    world: World, tmp_path: Path, failure: str
) -> None:
    reports = world.run("fault_ranks:fail_then_recover", tmp_path, "sync", PUBLISHING[failure], 0, ranks=4)
    assert_agreed(reports, 0, "injected")


@pytest.mark.parametrize("ranks", [2, 4])
def test_torn_copy_on_one_rank_raises_the_same_error_on_all(world: World, tmp_path: Path, ranks: int) -> None:
    reports = world.run("fault_ranks:tear_on_one_rank", tmp_path, 1, ranks=ranks)
    assert_agreed(reports, 1, "tensor 'weight' changed too early")


def test_files_of_a_failed_save_are_removed_by_their_ranks(world: World, tmp_path: Path) -> None:
    world.run("fault_ranks:fail_with_a_bad_object", tmp_path, "unpicklable", 0)
    assert list((tmp_path / "bad").iterdir()) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_object_that_cannot_be_pickled_fails_the_save_on_all_ranks(
    world: World, tmp_path: Path, ranks: int
) -> None:
    reports = world.run("fault_ranks:fail_with_a_bad_object", tmp_path, "unpicklable", 1, ranks=ranks)
    assert len({each["error"] for each in reports}) == 1
    error = reports[0]["error"]
    assert f"rank 1: object 'own/shard_1_{ranks}' was not saved, as it cannot be pickled" in error
    assert "RuntimeError: this object cannot be pickled" in error


@pytest.mark.parametrize("ranks", [2, 4])
def test_object_that_no_load_accepts_fails_the_save_on_all_ranks(
    world: World, tmp_path: Path, ranks: int
) -> None:
    reports = world.run("fault_ranks:fail_with_a_bad_object", tmp_path, "untrusted", 1, ranks=ranks)
    (error,) = {each["error"] for each in reports}
    assert f"rank 1: object 'own/shard_1_{ranks}' was not saved" in error
    for words in ("fractions.Fraction", "add_safe_globals", "state_dict()", "--datastates-trust-objects on"):
        assert words in error
    assert list((tmp_path / "bad").iterdir()) == []


def test_failure_to_classify_tensors_fails_the_save_on_all_ranks(world: World, tmp_path: Path) -> None:
    reports = world.run("fault_ranks:fail_while_classifying", tmp_path)
    assert len({each["error"] for each in reports}) == 1
    assert "rank 1: RuntimeError: this tensor cannot be classified" in reports[0]["error"]


def test_finalize_functions_of_a_failed_save_do_nothing_when_called_later(
    world: World, tmp_path: Path
) -> None:
    for each in world.run("fault_ranks:fail_with_finalize_functions_taken_over", tmp_path):
        assert each["moved"] == 2, "ours and the test's, without Megatron's, which writes metadata.json"
        assert each["called"] == []
        assert "metadata.json" not in each["left"]


def test_state_with_a_hole_is_not_published(world: World, tmp_path: Path) -> None:
    reports = world.run("fault_ranks:save_with_a_hole", tmp_path)
    assert len({each["error"] for each in reports}) == 1
    assert "'weight' has holes" in reports[0]["error"]
    assert not list((tmp_path / "bad").glob("*"))


def test_short_writes_are_resumed_where_they_ended(world: World, tmp_path: Path) -> None:
    reports = world.run("fault_ranks:fail_then_recover", tmp_path, "async", "write:1:short,write:2:short", 1)
    assert [each["error"] for each in reports] == [None, None]


def test_saves_that_fail_behind_one_that_hangs_are_reported(world: World, tmp_path: Path) -> None:
    """Megatron's queue asks for the first save only: training went on forever without a checkpoint."""
    reports = world.run("fault_ranks:save_behind_one_that_hangs", tmp_path, "raise")
    assert len({each["error"] for each in reports}) == 1
    for each in reports:
        assert each["saves"] == 3, "one failure does not end the first save, which may yet be published"
        assert "iter_0000001 failed on 1 of 2 ranks: rank 1: " in each["error"]
        assert f" (on node {socket.gethostname()})." in each["error"]
        assert "fence-deadline" in each["error"]
        assert each["warned"] == []


def test_saves_that_fail_behind_one_that_hangs_are_warned_of_once(world: World, tmp_path: Path) -> None:
    for each in world.run("fault_ranks:save_behind_one_that_hangs", tmp_path, "warn"):
        assert each["error"] is None and each["saves"] == 4
        failed = [error.split(" failed on ")[0].rpartition("/")[2] for error in each["warned"]]
        assert failed == ["iter_0000001", "iter_0000002", "iter_0000003"][: len(failed)] and len(failed) >= 2


@pytest.mark.long  # 64 processes on the test machine's cores
def test_one_of_64_ranks_fails_and_48_ranks_load(world: World, tmp_path: Path) -> None:
    arguments = ("fault_ranks:fail_then_recover", tmp_path, "async", "write:1:ENOSPC", 37)
    reports = world.run(*arguments, ranks=64, timeout_seconds=500)
    assert_agreed(reports, 37, "No space left on device")
    assert "failed on 1 of 64 ranks" in reports[0]["error"]
    world.run("api_ranks:load", tmp_path / "bad", 3, 64, ranks=48, timeout_seconds=500)
