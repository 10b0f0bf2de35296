"""`--async-save` alone is enough: no worker process, whichever strategy is requested."""

from pathlib import Path

import pytest

from tests.e2e.conftest import STEPS, Reference
from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining

STRATEGIES = {
    "default": [],
    "mcore": ["--async-strategy", "mcore"],
    "nvrx": ["--async-strategy", "nvrx"],
    "worker requested": ["--use-persistent-ckpt-worker", "--dist-ckpt-workers", "4"],
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_async_save_needs_no_worker(
    strategy: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "ck")
    saving = ["--save", checkpoints.root, "--save-interval", "3", "--async-save", *STRATEGIES[strategy]]
    ending = pretraining.run(
        *LAYOUTS["tp2"], "--train-iters", str(STEPS), "--ckpt-format", "datastates", *saving
    )
    assert ending.differences(reference("tp2")) == []
    assert "scheduled an async checkpoint save at iteration       3" in ending.log
    assert checkpoints.published() == checkpoints.complete() == [3, STEPS]
    for rank in ending.ranks:
        assert rank.facts["children"] == []
        # Megatron 0.17 to 0.19 would release it before each save.
        assert rank.facts["device memory released after"] in ([], [3])
        settled = rank.facts["arguments"]
        assert settled["async_save"] is True and settled["use_persistent_ckpt_worker"] is False
        assert settled["ckpt_assume_constant_structure"] is True


def test_structure_is_not_assumed_for_other_formats(pretraining: Pretraining, tmp_path: Path) -> None:
    saving = ["--save", tmp_path / "ck", "--ckpt-format", "torch_dist", "--async-save"]
    settled = pretraining.run(*LAYOUTS["tp2"], *saving, "--exit-interval", "1").ranks[0].facts["arguments"]
    assert settled["ckpt_assume_constant_structure"] is False
    assert settled["async_save"] is False, "as in Megatron alone: its async save needs a worker"


@pytest.mark.long
def test_a_queue_that_does_not_know_our_saves_publishes_them_when_it_finalizes(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """As a queue of a program's own, or Megatron's after another package has replaced its method."""
    checkpoints = Checkpoints(tmp_path / "ck")
    how: list[str | Path] = [*LAYOUTS["tp2"], "--train-iters", str(STEPS), "--ckpt-format", "datastates"]
    saving = ["--save", checkpoints.root, "--save-interval", "3", "--async-save"]
    saved = pretraining.run(*how, *saving, environment={"TINY_MUTATION": "replaced_queue:1"})
    assert checkpoints.published() == checkpoints.complete() == [3, STEPS]
    assert checkpoints.tracked() == STEPS
    resumed = pretraining.run(*how, "--load", checkpoints.root, "--ckpt-step", "3")
    assert resumed.resumed_from(saved) == 3
