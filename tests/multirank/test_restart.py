"""An in-process restart: the queue is aborted, torch.distributed is initialized anew, training continues."""

from pathlib import Path

import pytest

from tests.support.world import FILES_OF_MEGATRON, World

pytestmark = pytest.mark.conformance


def test_aborted_queue_cancels_the_save_and_a_new_world_saves_again(world: World, tmp_path: Path) -> None:
    for rank in world.run("restart_ranks:abort_and_begin_anew", tmp_path):
        assert rank["left"] == 0, "the queue keeps no entry of the aborted save"
        assert set(rank["torn"]) <= FILES_OF_MEGATRON, "nothing of ours is left of the aborted save"
        assert rank["runs"][0] != rank["runs"][1], "a new world is a new run"
        assert rank["ordinals"] == [1, 1]


def test_ranks_that_were_interrupted_at_different_saves_agree_again(world: World, tmp_path: Path) -> None:
    world.run_to_end("restart_ranks:restart_without_queue", tmp_path, ranks=3)
    assert len(list(tmp_path.glob("runs/run1/survivor*"))) == 2
