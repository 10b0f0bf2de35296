"""Custom training loops: after `enable()`, their saves through torch_dist's strategy are in our format."""

import json
from pathlib import Path

from tests.support.ranks import RankForge
from tests.support.world import World


def losses(forge: RankForge, folder: Path, checkpoints: Path, steps: int) -> list[str]:
    """Returns what each step of the example recipe printed, on all ranks."""
    arguments = ["--save", str(checkpoints), "--steps", str(steps)]
    outcome = forge.run("own_loop:main", ranks=2, logs=folder, arguments=[arguments], timeout_seconds=90)
    return sorted(line for line in outcome.succeeded().log.splitlines() if ": step " in line)


def test_example_recipe_saves_in_our_format_and_resumes_exactly(
    world_forge: RankForge, tmp_path: Path
) -> None:
    uninterrupted = losses(world_forge, tmp_path / "1", tmp_path / "whole", 5)
    first = losses(world_forge, tmp_path / "2", tmp_path / "parts", 3)
    second = losses(world_forge, tmp_path / "3", tmp_path / "parts", 5)
    assert sorted(first + second) == uninterrupted
    for step in range(1, 6):
        directory = tmp_path / "parts" / f"step_{step:04d}"
        assert json.loads((directory / "metadata.json").read_text())["sharded_backend"] == "datastates"
        assert (directory / "datastates.manifest").is_file()


def test_enabling_again_changes_the_options_of_later_saves(world: World, tmp_path: Path) -> None:
    for rank in world.run("api_ranks:enable_twice", tmp_path):
        assert rank["lazy"] == [True, False, False], "the last one is a strategy of the first call"
        assert rank["before"] == "datastates", "of a strategy that was made before the first call"
        assert rank["stock"] == ["EnabledSaveStrategy", "EnabledSaveStrategy"]
        assert rank["error"] == "OptionError"
        assert rank["own_lazy"] == 0 < rank["own_eager"], "a strategy object is not replaced"


def test_environment_switch_saves_in_our_format_what_torch_dist_would_store(
    world: World, tmp_path: Path
) -> None:
    for rank in world.run("api_ranks:switch_on", tmp_path):
        assert rank["backends"] == {"0-none": "torch_dist"} | {
            f"1-{name}": "datastates" for name in ("none", "stock", "again", "wrapped", "own")
        }
        wrong = rank["errors"].pop("perhaps-none")
        assert "MEGATRON_DATASTATES_ENABLE='perhaps': expected 1 or 0" in wrong
        assert set(rank["errors"].values()) == {None}
        assert rank["later"] == ["EnabledSaveStrategy", "EnabledSaveStrategy"]
        assert len(rank["said"]) == 1
        assert "megatron.core.dist_checkpointing.strategies.torch" in rank["said"][0]
        assert "copied before a save returns" in rank["said"][0]
