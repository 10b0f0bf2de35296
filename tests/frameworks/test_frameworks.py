"""Frameworks on Megatron-Core: our strategy writes, a resume is exact, and weights may be swapped at once."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks.absent import installed_file
from tests.support.ranks import RankForge
from tests.support.world import PATH, PRELOAD, World

# What each framework's checkpoint consists of, below the directory that it is given.
PARTS = {
    "calls": ("model", "optimizer", "extra"),
    "verl": ("model/dist_ckpt", "optimizer/dist_ckpt", "extra/dist_ckpt"),
    "ms-swift": ("iter_0000003",),
    "skyrl": (".",),
    "nemo-toolkit": ("weights",),
}
CASES = [(name, how, mode) for name in PARTS for how in ("enable", "switch") for mode in ("sync", "async")]
# They need a module that newer releases of Megatron-Core lack.
BASE = "megatron.core.dist_checkpointing.strategies.base"
OLD = [("verl", "async"), ("nemo-toolkit", "sync"), ("nemo-toolkit", "async")]


@pytest.fixture(scope="module")
def forge() -> Iterator[RankForge]:
    with RankForge((*PRELOAD, "framework_ranks"), (Path(__file__).parent, *PATH)) as parent:
        yield parent


@pytest.mark.conformance
@pytest.mark.parametrize(("name", "how", "mode"), CASES, ids=map("-".join, CASES))
def test_weights_swapped_after_a_save_do_no_harm(
    forge: RankForge, tmp_path: Path, name: str, how: str, mode: str
) -> None:
    if name != "calls" and installed_file(name, "") is None:
        pytest.skip(f"{name} is not installed: make test-frameworks")
    if (name, mode) in OLD and importlib.util.find_spec(BASE) is None:
        pytest.skip(f"{name} needs an older Megatron-Core: docs/frameworks.md")
    root = tmp_path / "checkpoint"
    world = World(forge, tmp_path / "runs")
    for rank in world.run("framework_ranks:save_swap_load", root, name, how, mode == "async"):
        assert rank["swapped"] > 100
        assert rank["different"] == []
    (reports,) = (tmp_path / "runs").glob("*/saves.jsonl")
    events = [json.loads(line) for line in reports.read_text().splitlines()]
    saves = [event for event in events if event["event"] == "save"]
    assert len(saves) == len(PARTS[name])
    if os.environ.get("MEGATRON_DATASTATES_LAZY") != "on":  # as `make test-main` sets it
        lazy = {event["lazy_bytes"] for event in saves}
        assert lazy == {0}, "everything was copied before the save returned"
    for part in PARTS[name]:
        assert (root / part / "datastates.manifest").is_file(), part
        assert not list((root / part).glob("*.distcp"))


def test_an_optimizer_asked_for_after_its_model_loads_into_no_other_layout(
    forge: RankForge, tmp_path: Path
) -> None:
    world = World(forge, tmp_path / "runs")
    layout = {"tensor_model_parallel_size": 2}
    for rank in world.run("framework_ranks:load_into_another_layout", tmp_path / "checkpoint", layout):
        assert "have no known place in the model" in rank["error"]
