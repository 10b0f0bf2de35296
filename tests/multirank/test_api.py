"""The public API on several ranks: dist_checkpointing.save and load, stock queue, fences."""

from pathlib import Path

import pytest

from tests.support.world import FILES_OF_MEGATRON, World

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("wrapped", [True, False], ids=["fully parallel", "plain"])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_saved_state_loads_and_our_strategy_wrote_it(
    world: World, tmp_path: Path, mode: str, wrapped: bool
) -> None:
    reports = world.run("api_ranks:save_and_load", tmp_path / "ck", mode, wrapped)
    files = reports[0]["files"]
    assert '"datastates"' in (tmp_path / "ck" / "metadata.json").read_text()
    assert "datastates.manifest" in files and sum(name.startswith("data-") for name in files) == 2
    assert not any(name.endswith(".distcp") for name in files)
    assert {name for name in files if name.endswith(".pt")} == FILES_OF_MEGATRON


@pytest.mark.parametrize("readers", [1, 3, 4])
def test_other_numbers_of_ranks_load_the_same_state(world: World, tmp_path: Path, readers: int) -> None:
    world.run("api_ranks:save_and_load", tmp_path / "ck", "sync", False, ranks=2)
    world.run("api_ranks:load", tmp_path / "ck", 3, 2, ranks=readers)


def test_the_default_device_does_not_matter(world: World, tmp_path: Path) -> None:
    world.run("api_ranks:save_and_load_with_another_default_device", tmp_path / "ck", ranks=1)


def test_without_a_promise_tensors_may_change_when_save_returns(world: World, tmp_path: Path) -> None:
    world.run("api_ranks:mutate_at_once", tmp_path / "ck")


def test_step_waits_for_the_copy_and_not_for_the_write(world: World, tmp_path: Path) -> None:
    for rank in world.run("api_ranks:step_during_slow_copy", tmp_path / "ck"):
        assert not rank["copied_at_return"], "the save must return before the bytes are copied"
        assert rank["copied_at_step"] and not rank["written_at_step"], rank
        assert rank["fence"] > 0


def test_broken_promise_is_caught_and_nothing_is_published(world: World, tmp_path: Path) -> None:
    reports = world.run("api_ranks:torn_without_fence", tmp_path / "ck", True)
    assert len({rank["error"] for rank in reports}) == 1
    assert "tensor 'weight' changed too early" in reports[0]["error"]
    assert not reports[0]["published"]


def test_broken_promise_without_tripwire_tears_the_copy(world: World, tmp_path: Path) -> None:
    reports = world.run("api_ranks:torn_without_fence", tmp_path / "ck", False)
    assert [(rank["error"], rank["torn"]) for rank in reports] == [(None, True)] * 2


@pytest.mark.parametrize("outlast_copy", [False, True], ids=["short step", "step that outlasts the copy"])
def test_step_that_fired_no_fence_fails_the_save(world: World, tmp_path: Path, outlast_copy: bool) -> None:
    reports = world.run("api_ranks:step_without_fence", tmp_path / "ck", False, outlast_copy)
    assert len({rank["error"] for rank in reports}) == 1
    assert "stepped without its inner optimizer's fence" in reports[0]["error"]
    assert not reports[0]["published"]


def test_skipped_step_waits_for_the_copy(world: World, tmp_path: Path) -> None:
    reports = world.run("api_ranks:step_without_fence", tmp_path / "ck", True, False)
    assert [(rank["error"], rank["published"]) for rank in reports] == [(None, True)] * 2


def test_second_save_starts_before_the_first_is_published(world: World, tmp_path: Path) -> None:
    reports = world.run("api_ranks:two_saves_at_once", [str(tmp_path / "a"), str(tmp_path / "b")])
    assert [rank["waiting"] for rank in reports] == [2, 2]


def test_step_waits_for_every_save_since_the_last_step(world: World, tmp_path: Path) -> None:
    for rank in world.run("api_ranks:saves_between_steps", tmp_path):
        assert rank["under_way"] == [True, True]
        assert sum(rank["fences"]) > 0


def test_wrapped_parameters_and_their_step_count_for_the_memory_they_wrap(
    world: World, tmp_path: Path
) -> None:
    """Before the step: a local tensor of the model that is saved, and a view of it, but no copy of it."""
    for rank in world.run("api_ranks:dtensors_have_stepped", tmp_path):
        assert rank["known"] and rank["lazy"] == [True, True, False, False]


def test_saves_of_one_new_layout_may_overlap(world: World, tmp_path: Path) -> None:
    world.run("api_ranks:sync_save_between_polls", tmp_path)


def test_cached_layout_saves_current_bytes(world: World, tmp_path: Path) -> None:
    for rank in world.run("api_ranks:fresh_bytes", tmp_path):
        assert rank["layouts"] == 1, "the layout must be reused, or this test shows nothing"


def test_first_save_shares_once_and_later_ones_gather_one_record(world: World, tmp_path: Path) -> None:
    for rank in world.run("api_ranks:count_collectives", tmp_path):
        first, *later = [{k: n for k, n in save.items() if k != "sum"} for save in rank["per_save"]]
        made = {k: n for k, n in first.items() if n}
        assert made == {"share and compare": 1, "gather": 1, "gather layouts": 1}
        for save in later:
            assert {k: n for k, n in save.items() if n} == {"gather": 1}
        assert rank["groups"] == 0


def test_starting_a_save_waits_for_no_other_rank(world: World, tmp_path: Path) -> None:
    reports = world.run("api_ranks:starting_makes_no_collective", tmp_path)
    assert reports[0]["threads"] == ["MainThread"]


def test_program_that_ends_in_mid_save_publishes_nothing_and_does_not_hang(
    world: World, tmp_path: Path
) -> None:
    world.run("api_ranks:abandoned_at_exit", tmp_path / "ck", timeout_seconds=30)
    assert {path.name for path in (tmp_path / "ck").iterdir()} == FILES_OF_MEGATRON


def test_fork_in_mid_save_harms_neither_side(world: World, tmp_path: Path) -> None:
    assert [rank["child"] for rank in world.run("api_ranks:fork_in_mid_save", tmp_path / "ck")] == [0, 0]
