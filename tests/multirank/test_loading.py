"""Loads of other keys, shapes or dtypes than were saved return what torch_dist returns, bit for bit."""

import json
from pathlib import Path

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
    assert failed["state"] == "failed"
    assert "failed on 1 of 2 ranks: rank 1: " in failed["error"]
    assert failed["save_id"] == loaded["save_id"]
