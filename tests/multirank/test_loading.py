"""Loads of other keys, shapes or dtypes than were saved return what torch_dist returns, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RankForge
from tests.support.world import World


@pytest.fixture(scope="module")
def saved(world_forge: RankForge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of every dtype and objects, saved by two ranks in both formats."""
    root = tmp_path_factory.mktemp("saved")
    World(world_forge, root / "runs").run("loading_ranks:save_everything", root)
    return root


@pytest.mark.parametrize("readers", [1, 3])
def test_some_keys_are_loaded_without_the_others(world: World, saved: Path, readers: int) -> None:
    world.run("loading_ranks:load_some_keys", saved, ranks=readers)


def test_plain_tensors_are_loaded_whole_by_every_rank(world: World, saved: Path) -> None:
    world.run("loading_ranks:load_plain", saved)


def test_looking_at_a_checkpoint_restores_no_state_provider(world: World, tmp_path: Path) -> None:
    for rank in world.run("loading_ranks:look_and_load", tmp_path / "ck"):
        assert rank["found"] == [1000, 1000, 1]


def test_a_fully_parallel_load_restores_a_state_provider_once_and_keeps_no_metadata(
    world: World, tmp_path: Path
) -> None:
    for rank in world.run("loading_ranks:load_in_parallel", tmp_path / "ck"):
        assert (rank["restored"], rank["kept"]) == (1, [None, None])


def test_what_both_ranks_of_a_node_request_is_read_through_the_page_cache(
    world: World, tmp_path: Path
) -> None:
    for rank in world.run("loading_ranks:load_copies", tmp_path / "ck"):
        copy, objects = [rank["copy"]], rank["objects"]  # the common state, in releases that store it so
        expected = [[*objects, *copy], [*objects, *copy], objects]
        assert rank["cached"] == expected, "and not where ranks share the reads of tensors among themselves"


def test_larger_and_smaller_shapes_are_loaded_if_allowed(world: World, saved: Path) -> None:
    world.run("loading_ranks:load_other_shapes", saved)


def test_other_dtypes_are_loaded_if_torch_can_cast_them(world: World, saved: Path) -> None:
    reports = world.run("loading_ranks:load_other_dtypes", saved)[0]
    assert {"torch.float32 to torch.bfloat16", "torch.bfloat16 to torch.float32"} <= set(reports["converted"])
    assert {"torch.float32 to torch.int32", "torch.complex64 to torch.float32"} <= set(reports["refused"])


def test_a_load_through_megatron_is_reported_once_and_as_failed_if_any_rank_failed(
    world: World, saved: Path, tmp_path: Path
) -> None:
    reports = tmp_path / "reports.jsonl"
    results = world.run("loading_ranks:load_with_reports", saved, reports)
    loaded, again, failed = (json.loads(line) for line in reports.read_text().splitlines())
    for report in (loaded, again):
        assert (report["event"], report["state"], report["error"]) == ("load", "loaded", None)
        assert (report["rank"], report["ranks"], report["iteration"]) == (0, 2, 7)
        assert report["bytes"] >= results[0]["tensor_bytes"]
        assert 0 < report["reading_ms"] < report["total_ms"]
    assert loaded["bytes"] == again["bytes"], "each load reports what it delivered itself"
    slow = [each["slow"] for each in results]
    assert slow[0]["reading_ms"] < 500 <= slow[1]["reading_ms"]
    assert slow[0]["ranks_ms"] == slow[1]["ranks_ms"] == again["ranks_ms"]
    longest = {"max": pytest.approx(slow[1]["reading_ms"], abs=0.01), "slowest_rank": 1}
    assert again["ranks_ms"]["reading"] == longest, "although rank 0 reports"
    assert again["total_ms"] >= 500 > again["reading_ms"], "rank 0 has waited"
    assert again["ranks_ms"].keys() == loaded["ranks_ms"].keys() == {"opening", "planning", "reading"}
    assert failed["state"] == "failed"
    assert "failed on 1 of 2 ranks: rank 1: " in failed["error"]
    assert failed["save_id"] == loaded["save_id"]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A run that has iteration 5, and one that does not."""
    found = [tmp_path / "with", tmp_path / "without"]
    for run, iterations in zip(found, (["iter_0000005"], []), strict=True):
        for name in iterations:
            (run / name).mkdir(parents=True)
            (run / name / "a file").touch()
        run.mkdir(exist_ok=True)
        (run / "latest_checkpointed_iteration.txt").write_text("5")
    return found


def found_by_all(world: World, runs: list[Path], forbidden_rank: int = -1) -> Any:
    """Returns what `load_checkpoint` returns or raises on all ranks."""
    first, second = world.run("loading_ranks:load_chosen", [str(run) for run in runs], forbidden_rank)
    assert first == second
    return first["found"]


def test_a_chosen_iteration_that_only_rank_0_sees_is_loaded(world: World, runs: list[Path]) -> None:
    assert found_by_all(world, runs) == [5, 0]


def test_a_chosen_iteration_that_rank_0_does_not_see_fails_on_all_ranks(
    world: World, runs: list[Path]
) -> None:
    text = found_by_all(world, runs[::-1])
    assert text.startswith(f"NotACheckpointError: --ckpt-step 5: expected iter_0000005 in {runs[1]}, found")


def test_a_run_that_rank_0_may_not_read_fails_on_all_ranks(world: World, runs: list[Path]) -> None:
    text = found_by_all(world, runs, forbidden_rank=0)
    assert text.startswith("StorageError: --ckpt-step 5: ") and "rank 0 cannot read: " in text
    assert "Permission denied" in text


def test_a_node_whose_environment_lacks_a_near_tier_fails_on_all_ranks(world: World, tmp_path: Path) -> None:
    tiers = [str(tmp_path / "near"), ""]
    for order in (tiers, tiers[::-1]):
        found = world.run("loading_ranks:load_with_near_tiers", tmp_path / "run", order)
        assert found[0] == found[1]
        other, first = ("given" if tier else "not given" for tier in order[::-1])
        assert f"--datastates-near is {other!r}, not {first!r} as on rank 0" in found[0]["found"]


def test_a_near_tier_that_is_none_on_one_node_fails_on_all_ranks(world: World, tmp_path: Path) -> None:
    tiers = [str(tmp_path / "near"), "$EMPTY"]
    found = world.run("loading_ranks:load_with_near_tiers", tmp_path / "run", tiers)
    assert found[0] == found[1]
    assert found[0]["found"].startswith(
        "StorageError: rank 1: the near tier $EMPTY (--datastates-near) is an"
    )


def test_a_directory_that_one_rank_cannot_list_fails_on_all_ranks(world: World, tmp_path: Path) -> None:
    """That rank cannot see whose it is; the arguments of the run select our format."""
    for rank in world.run("loading_ranks:look_at_format", tmp_path / "gone"):
        assert rank["error"].startswith(f"loading {tmp_path / 'gone'} failed on 1 of 2 ranks: rank 1: ")
        assert "Stale file handle" in rank["error"]
