"""Tensors that the distribution of a save does not know, such as those that are new after the first save."""

from pathlib import Path

import pytest

from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining

LAST = 6
STEPS: list[str | Path] = [*LAYOUTS["dp2"], "--train-iters", "12", "--save-interval", "2"]
STEPS += ["--ckpt-format", "datastates", "--ckpt-fully-parallel-save"]
STOP = ["--exit-interval", str(LAST)]


@pytest.mark.parametrize("mode", [["--async-save"], []], ids=["async", "sync"])
def test_states_of_an_optimizer_whose_first_steps_were_skipped_are_saved(
    mode: list[str], pretraining: Pretraining, tmp_path: Path
) -> None:
    """Megatron's loss scale for fp16 begins so high that the first gradients overflow."""
    root = tmp_path / "ck"
    how = [*STEPS, *mode, "--fp16", "--initial-loss-scale", "250000", "--hysteresis", "1"]
    without = ["--use-distributed-optimizer"]
    saved = pretraining.run(*how, *STOP, "--save", root, without=without)
    stored = [Checkpoint.open(Checkpoints(root).at(step)).tensors for step in (2, LAST)]
    key = "optimizer.state.exp_avg.embedding.word_embeddings.weight"
    assert [key in tensors for tensors in stored] == [False, True]
    resumed = pretraining.run(*how, "--load", root, without=without)
    assert resumed.resumed_from(saved) == LAST


def test_what_a_program_adds_after_the_first_save_is_saved(pretraining: Pretraining, tmp_path: Path) -> None:
    root = tmp_path / "ck"
    changing = {"TINY_MUTATION": "more_state:4"}
    saved = pretraining.run(*STEPS, *STOP, "--save", root, environment=changing)
    stored = [Checkpoint.open(Checkpoints(root).at(step)).tensors for step in (2, 4, LAST)]
    assert [{"more0", "more1"} <= tensors.keys() for tensors in stored] == [False, True, True]
    resumed = pretraining.run(*STEPS, "--load", root)
    assert resumed.resumed_from(saved) == LAST


def test_what_moves_to_another_rank_after_the_first_save_is_saved(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    root = tmp_path / "ck"
    pretraining.run(*STEPS, *STOP, "--save", root, environment={"TINY_MUTATION": "wandering_state:1"})
    stored = [Checkpoint.open(Checkpoints(root).at(step)).tensors for step in (2, 4, LAST)]
    assert ["more" in tensors for tensors in stored] == [True, True, True]


def test_what_a_stored_distribution_lacks_is_saved(pretraining: Pretraining, tmp_path: Path) -> None:
    """Main's --ckpt-pg-tensors-cache-path has what some load asked for, such as the weights alone."""
    root = tmp_path / "ck"
    changing = {"TINY_MUTATION": "distributed_weights:1"}
    saved = pretraining.run(*STEPS, *STOP, "--save", root, environment=changing)
    resumed = pretraining.run(*STEPS, "--load", root)
    assert resumed.resumed_from(saved) == LAST
