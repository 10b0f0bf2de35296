"""Checkpoints move between releases of Megatron-Core, whichever of them wrote the common state and where."""

from pathlib import Path

import pytest

from megatron_datastates.convert.job import convert
from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.planning import plan_conversion
from tests.support.world import World

pytestmark = pytest.mark.conformance

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("writer", ["0.16", "0.18", "0.19"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoint_of_another_release_is_read(world: World, writer: str, ranks: int) -> None:
    for rank in world.run("release_ranks:read", GOLDEN / f"megatron-{writer}", ranks=ranks):
        assert rank["missing"] == rank["unexpected"] == []


def test_checkpoint_of_this_release_is_read(world: World, tmp_path: Path) -> None:
    world.run("release_ranks:write", tmp_path / "ck")
    world.run("release_ranks:read", tmp_path / "ck")


def test_torch_dist_checkpoint_of_this_release_is_converted_and_back(world: World, tmp_path: Path) -> None:
    stock, ours, back = (tmp_path / name for name in ("stock", "ours", "back"))
    world.run("release_ranks:write_stock", stock)
    for source, target, saved_as in ((stock, ours, "torch_dist"), (ours, back, "datastates")):
        opened = open_source(source)
        assert opened.format == saved_as
        convert(plan_conversion(opened, target), Limits(), verify=True)
        for rank in world.run("release_ranks:read", target):
            assert rank["missing"] == rank["unexpected"] == []
