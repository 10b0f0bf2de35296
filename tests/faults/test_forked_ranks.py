"""Ranks that fork in mid-save."""

from pathlib import Path

from tests.support.world import World


def test_child_of_a_rank_saves_by_itself_and_harms_no_rank(world: World, tmp_path: Path) -> None:
    """It has no peers: whatever it said over its parent's connections would end them."""
    for each in world.run("fault_ranks:save_in_children", tmp_path):
        assert each["child"] == 0
        assert each["files"] == 1
