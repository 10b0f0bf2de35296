"""PyTorch's distributed checkpoints on several ranks: FSDP2, meshes, failures, asynchronous saves."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.world import World


def test_fsdp2_state_is_exact_from_2_to_4_to_1_ranks(world: World, tmp_path: Path) -> None:
    saved = world.run("dcp_ranks:save_fsdp", tmp_path / "of 2", tmp_path / "reference")
    assert sum(name.startswith("data-") for name in saved[0]["files"]) == 2
    before = tmp_path / "of 2"
    for ranks in (4, 1):
        after = tmp_path / f"of {ranks}"
        found = world.run("dcp_ranks:reshard_fsdp", before, tmp_path / "reference", after, ranks=ranks)
        assert {rank["digest"] for rank in found} == {saved[0]["digest"]}
        before = after


def test_tensors_on_meshes_are_those_that_dcp_stores(world: World, tmp_path: Path) -> None:
    world.run("dcp_ranks:save_meshes", tmp_path / "c", tmp_path / "reference", ranks=4)
    for rows, columns in ((1, 2), (3, 1)):
        world.run(
            "dcp_ranks:load_meshes",
            tmp_path / "c",
            tmp_path / "reference",
            rows,
            columns,
            ranks=rows * columns,
        )


@pytest.mark.parametrize(
    ("plan", "failing"), [("write:1:ENOSPC", 1), ("sync:1:EIO", 0), ("rename manifest:1:EIO", 0)]
)
def test_if_one_rank_fails_all_raise_and_nothing_is_published(
    world: World, tmp_path: Path, plan: str, failing: int
) -> None:
    reports = world.run("dcp_ranks:fail_on_one_rank", tmp_path / "c", plan, failing)
    assert reports[0]["texts"] == reports[1]["texts"]
    (text,) = reports[0]["texts"]
    assert text.startswith(f"{failing}: SaveFailedError: saving to {tmp_path / 'c'} failed on ")
    assert "(injected)" in text or "Input/output error" in text or "No space" in text, text
    assert "Nothing was published; earlier checkpoints are as they were." in text
    assert len(reports[0]["files"]) == 5, reports[0]["files"]  # left-overs went with the next save


@pytest.mark.parametrize(
    ("plan", "dying", "whole"),
    [("rename manifest:1:kill", 0, 1), ("write:1:kill", 1, 1), ("sync directory of manifest:1:kill", 0, 2)],
)
def test_if_a_rank_is_killed_a_whole_checkpoint_is_there(
    world: World, tmp_path: Path, plan: str, dying: int, whole: int
) -> None:
    outcome = world.run_to_death("dcp_ranks:die", tmp_path / "c", plan, dying)
    assert outcome.exits[dying] == -9, outcome.log
    world.run("dcp_ranks:load_value", tmp_path / "c", whole)


def test_a_load_says_why_on_all_ranks(world: World, tmp_path: Path) -> None:
    reports = world.run("dcp_ranks:fail_to_load", tmp_path / "c")
    assert reports[0] == reports[1]
    assert "NotACheckpointError" in reports[0]["nothing"][0] and "does not exist" in reports[0]["nothing"][0]
    (damaged,) = reports[0]["damaged"]
    assert damaged.startswith("1: CorruptDataError: ") and "rank 1" in damaged.lower()
    assert "datastates.manifest" in reports[0]["unpublished"][0]


def test_ranks_do_not_load_different_saves_from_one_directory(world: World, tmp_path: Path) -> None:
    reports = world.run("dcp_ranks:load_different_saves", tmp_path / "c")
    assert reports[0] == reports[1]
    (text,) = reports[0]["texts"]
    assert text.startswith(
        f"0: StorageError: loading {tmp_path / 'c'}: ranks have opened different checkpoints"
    )


def test_the_state_may_change_while_it_is_saved(world: World, tmp_path: Path) -> None:
    world.run("dcp_ranks:async_saves", tmp_path / "c", "thread")


@pytest.mark.long
def test_a_process_of_dcps_can_save(world: World, tmp_path: Path) -> None:
    world.run("dcp_ranks:async_saves", tmp_path / "c", "process", timeout_seconds=200.0)


def test_a_group_of_ranks_saves_alone(world: World, tmp_path: Path) -> None:
    world.run("dcp_ranks:some_ranks", tmp_path / "c", ranks=3)


def test_ranks_with_nothing_to_store_take_part(world: World, tmp_path: Path) -> None:
    world.run("dcp_ranks:one_tensor", tmp_path / "c")


def test_planners_that_cache_or_do_not_flatten_save(world: World, tmp_path: Path) -> None:
    reports = world.run("dcp_ranks:planners", tmp_path / "c")
    assert len(reports[0]["files"]) == 5, reports[0]["files"]


def test_shards_found_at_once_are_where_megatron_fsdp_finds_them(world: World) -> None:
    reports = world.run("fsdp_shards_ranks:shards_at_once", ranks=4)
    assert len({str(found["offsets"]) for found in reports}) == 4, "the ranks have shards of their own"


def test_a_rank_that_lacks_a_tensor_has_an_empty_shard_of_it(world: World) -> None:
    """Megatron-FSDP would make the others wait for it."""
    reports = world.run("fsdp_shards_ranks:shards_that_a_rank_lacks", ranks=3)
    assert [found["offsets"] for found in reports] == [[[0, 0]] * 2, [[2, 0]], [[2, 0]] * 2]


def test_a_rank_without_any_tensor_of_a_group_fails_all_ranks(world: World) -> None:
    """The others would wait for it in the group's call."""
    reports = world.run("fsdp_shards_ranks:shards_of_a_group_that_a_rank_lacks", ranks=4)
    expected = "of the 2 ranks that share tensors of Megatron-FSDP's, only 1 have any of them (rank 0): "
    assert all(str(found["found"]).startswith(expected) for found in reports), reports


def test_ranks_that_see_their_groups_in_different_orders_do_not_wait_for_each_other(world: World) -> None:
    reports = world.run("fsdp_shards_ranks:shards_of_several_groups", ranks=4)
    assert [found["offsets"] for found in reports] == [[[2 * (rank % 2), 0], [rank, 0]] for rank in range(4)]


def test_where_shards_lie_is_gathered_only_if_some_ranks_shards_have_changed(world: World) -> None:
    """Otherwise each call makes one collective call, of two numbers, whatever the number of tensors."""
    reports = world.run("fsdp_shards_ranks:shards_in_later_calls", ranks=4)

    def offsets(rows: list[int]) -> list[list[list[int]]]:
        return [[[sum(rows[:rank]), 0], [2 * (rank % 2), rank // 2]] for rank in range(4)]

    def of(name: str) -> list[list[Any]]:
        found = [rank["calls"][name] for rank in reports]
        assert all(agreed == [2] for _, _, agreed in found), "each rank agrees, also one that fails"
        return [list(each) for each in zip(*found, strict=True)]

    once, three = [16, 16, 16], [1, 3, 1, 1]  # records: w on its line, v on both dimensions of its grid
    for name in ("first", "after it", "after that", "another world"):
        assert of(name)[:2] == [offsets([1] * 4), [once] * 4], name
    for name in ("again", "again after it", "again there"):
        assert of(name)[:2] == [offsets([1] * 4), [[]] * 4], name
    assert of("a rank has more rows")[:2] == [offsets(three), [once] * 4]
    assert of("again with more rows")[:2] == [offsets(three), [[]] * 4]
    none = [offsets([1, 1, 0, 1]), [once, once, [0, 16, 16], once]]
    assert of("a rank has no rows")[:2] == none, "empty shards are not sent"
    for name, failing in (("a rank fails", 1), ("a rank fails in another way", 3)):
        errors, gathered, _ = of(name)
        assert errors.pop(failing).startswith("ValueError: a tensor of Megatron-FSDP's, of 2 dimensions, is")
        assert all(f"RuntimeError: rank {failing} could not say which shards" in error for error in errors)
        assert gathered == [[]] * 4


def test_uneven_shards_of_megatron_fsdp_are_exact(world: World, tmp_path: Path) -> None:
    places = tmp_path / "c", tmp_path / "reference"
    world.run("dcp_ranks:uneven_shards", *places, [5, 0, 2], True, ranks=3)
    world.run("dcp_ranks:uneven_shards", *places, [3, 4], False)
