"""State saved in buckets by Megatron's loop is listed by parameter, and Megatron sees no unexpected keys."""

from pathlib import Path

import pytest

from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer import optimizer_state
from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining

STATES = ("param", "exp_avg", "exp_avg_sq")


@pytest.mark.conformance
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_run_resumes_from_a_checkpoint_whose_optimizer_state_is_listed_by_parameter(
    layout: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "ck")
    how = [*LAYOUTS[layout], "--train-iters", "6", "--swiglu"]
    saving = ["--save", checkpoints.root, "--exit-interval", "4", "--async-save"]
    saved = pretraining.run(*how, *saving, "--ckpt-format", "datastates")

    resumed = pretraining.run(*how, "--load", checkpoints.root, "--dist-ckpt-strictness", "log_all")

    assert resumed.resumed_from(saved) == 4
    assert "datastates_map" not in resumed.log, "log_all would log keys that Megatron did not expect"
    for iteration in (2, 4):  # the second save reuses the map made for the first
        assert_listed(Checkpoint.open(checkpoints.at(iteration)))


def assert_listed(checkpoint: Checkpoint) -> None:
    """Checks that all states of each parameter are listed and its main copy rounds to the weight."""
    model = {key for key in checkpoint.index.tensors if ".dp_group_idx_" not in key}
    listed = optimizer_state(checkpoint)
    assert listed.keys() == {f"optimizer.state.{state}.{key}" for state in STATES for key in model}
    for key in model:
        weight, main = checkpoint.read_tensor(key), listed[f"optimizer.state.param.{key}"]
        assert main.dtype == "float32"
        assert main.read().to(weight.dtype).equal(weight), key


def test_a_run_whose_optimizer_is_not_distributed_is_said_how_to_resume_from_a_reshardable_one(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    how = [*LAYOUTS["dp2"], "--train-iters", "6", "--ckpt-format", "datastates"]
    how += ["--save", str(tmp_path), "--load", str(tmp_path), "--exit-interval"]
    plain = ["--use-distributed-optimizer"]
    pretraining.run(*how, "2", "--dist-ckpt-optim-fully-reshardable")
    refused = pretraining.start(*how, "6", without=plain).fail()
    assert all(refused.exits)
    assert "this run's is not. Resume with --use-distributed-optimizer, save once without" in refused.log
    pretraining.run(*how, "4")
    assert pretraining.run(*how, "6", without=plain).ranks[0].begun_at == 4
