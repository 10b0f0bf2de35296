"""Every change to the training state waits until a save has copied it.

Each change is made by Megatron's own code. Without fences, the same save must fail: this shows that the
change did come before the copy, and that a torn save is not published.
"""

from pathlib import Path

import pytest

from megatron_datastates.mcore.hooks import versions
from tests.support.world import World

CHANGES = [
    "torch",
    "through pointers",
    "mixed precision",
    "FSDP2",
    "chained",
    "hybrid",
    "layer-wise",
    "graph replay",
    "optimizer offload",
    "buffer offload",
    "load",
    "load of torch_dist",
]
if versions.installed().first < (0, 17):
    CHANGES.remove("graph replay")
if versions.installed().first < (0, 19):
    CHANGES.append("staging")


@pytest.mark.conformance
@pytest.mark.parametrize("change", CHANGES)
def test_change_waits_for_the_copy(world: World, tmp_path: Path, change: str) -> None:
    for rank in world.run("fence_ranks:change_during_slow_copy", tmp_path, change, True):
        assert rank["lazy"], "the copy must be in progress when the save returns"
        assert rank["fence"] > 0
        assert all(rank["changed"]), "the state must have changed, or this test shows nothing"
        assert rank["error"] is None and rank["published"] and rank["same"], rank


@pytest.mark.parametrize("change", [change for change in CHANGES if not change.startswith("buffer")])
def test_without_fences_the_save_fails_on_all_ranks(world: World, tmp_path: Path, change: str) -> None:
    reports = world.run("fence_ranks:change_during_slow_copy", tmp_path, change, False)
    assert len({rank["error"] for rank in reports}) == 1
    assert reports[0]["error"] is not None and not reports[0]["published"], reports
