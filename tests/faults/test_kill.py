"""SIGKILL at every stage of a save: earlier checkpoints stay whole, and the next save succeeds."""

import signal
from pathlib import Path

import pytest

from tests.support.world import World

BEFORE_PUBLISHING = [
    ("rename manifest:1", 0),  # the first case is the one that CI runs
    ("open:1", 1),
    ("reserve:1", 1),
    ("write:1", 1),
    ("write:2", 1),  # the footer
    ("truncate:1", 1),
    ("sync:1", 1),
    ("sync directory:1", 1),
    ("reserve:1", 0),
    ("sync:1", 0),
    ("write index:1", 0),
    ("rename index:1", 0),
    ("write manifest:1", 0),
]


def kill(world: World, root: Path, point: str, rank: int, resave: bool) -> None:
    outcome = world.run_to_death("fault_ranks:die", root, f"{point}:kill", rank, resave)
    assert outcome.exits[rank] == -signal.SIGKILL, outcome.log


@pytest.mark.parametrize(("point", "rank"), BEFORE_PUBLISHING, ids=lambda value: str(value))
def test_kill_before_publishing_leaves_the_earlier_checkpoint(
    world: World, tmp_path: Path, point: str, rank: int
) -> None:
    kill(world, tmp_path, point, rank, resave=False)
    assert not (tmp_path / "second" / "datastates.manifest").exists()
    for each in world.run("fault_ranks:loads_after_death", tmp_path, False):
        assert each["first"] == 1
        assert each["refused"] is not None and "second" in each["refused"], each["refused"]
        # Another run cannot know that the killed save is dead: its files stay until prune removes them.
        assert sum(name.startswith("data-") for name in each["after"]) >= 2


@pytest.mark.parametrize("point", ["rename manifest:1", "write manifest:1", "write:1"])
def test_kill_while_saving_again_leaves_the_checkpoint_in_that_directory(
    world: World, tmp_path: Path, point: str
) -> None:
    kill(world, tmp_path, point, 0, resave=True)
    for each in world.run("fault_ranks:loads_after_death", tmp_path, True):
        assert each["first"] == 1
        assert sum(name.startswith("data-") for name in each["after"]) >= 2


def test_kill_between_manifest_and_metadata_json_leaves_a_complete_checkpoint(
    world: World, tmp_path: Path
) -> None:
    kill(world, tmp_path, "durable manifest:1", 0, resave=False)
    assert not (tmp_path / "second" / "metadata.json").exists()
    reports = world.run("fault_ranks:loads_after_death", tmp_path, False)
    assert [each["refused"] for each in reports] == [None, None]


def test_kill_after_saving_again_leaves_the_new_checkpoint(world: World, tmp_path: Path) -> None:
    kill(world, tmp_path, "durable manifest:1", 0, resave=True)
    assert [each["first"] for each in world.run("fault_ranks:loads_after_death", tmp_path, True)] == [2, 2]
