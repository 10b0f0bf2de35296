"""Ranks that fork in mid-save."""

from pathlib import Path

from tests.support.world import World


def test_forked_child_saves_without_peers_and_harms_no_rank(world: World, tmp_path: Path) -> None:
    """A message from the child over its parent's connections would break them."""
    for each in world.run("fault_ranks:save_in_children", tmp_path):
        assert each["child"] == 0
        assert each["files"] == 1
