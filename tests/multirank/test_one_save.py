"""A load while another save publishes: ranks never end up with parts of different saves."""

from pathlib import Path

from tests.support.world import World


def test_ranks_that_opened_different_saves_all_fail(world: World, tmp_path: Path) -> None:
    errors = {each["error"] for each in world.run("one_save_ranks:load_different_saves", tmp_path)}
    assert len(errors) == 1
    error = errors.pop()
    assert error is not None and "different saves" in error and "load again" in error
