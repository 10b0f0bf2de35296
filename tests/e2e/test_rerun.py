"""Megatron's rerun state machine: a doubtful result ends the run with a checkpoint to run the step again."""

from pathlib import Path

import pytest

from megatron_datastates.convert.open import open_source
from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining

SAVED_TO_RUN_AGAIN = 16  # megatron.core.rerun_state_machine.EXIT_CODE_RESUME_TO_DISAMBIGUATE
FORMATS = {
    "datastates async": ["--ckpt-format", "datastates", "--async-save"],
    "datastates": ["--ckpt-format", "datastates"],
    "torch_dist": ["--ckpt-format", "torch_dist"],
}


@pytest.mark.conformance
@pytest.mark.parametrize("name", FORMATS)
def test_a_step_to_be_run_again_is_saved_and_resumed_from(
    name: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    root = tmp_path / "ck"
    doubts = ["--error-injection-rate", "3", "--error-injection-type", "persistent_error"]
    where = ["--save", str(root), "--load", str(root), "--save-interval", "100"]
    how = [*LAYOUTS["tp2"], *FORMATS[name], *where, *doubts]
    first = pretraining.fail(*how)
    assert first.exits == [SAVED_TO_RUN_AGAIN] * 2, first.log
    tracked = Checkpoints(root).tracked()
    assert tracked is not None and Checkpoints(root).complete() == [tracked]
    source = open_source(Checkpoints(root).at(tracked))
    assert any("rerun_state_machine" in key for key in source.objects)
    again = pretraining.fail(*how)
    assert again.exits == first.exits, again.log
    assert "Will rerun step" in again.log


def test_a_step_to_be_run_again_is_saved_though_the_save_before_is_unfinished(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """The first save takes seconds to sync. The step is saved in the same directory, with its doubts."""
    root = tmp_path / "ck"
    doubts = ["--error-injection-rate", "5", "--error-injection-type", "persistent_error"]
    skipping = ["--save-interval", "1", "--datastates-while-saving", "skip"]
    where = ["--save", str(root), "--load", str(root)]
    how = [*LAYOUTS["tp2"], *FORMATS["datastates async"], *where, *skipping, *doubts]
    first = pretraining.fail(*how, environment={"TINY_FAULTS_OF_RANK_0": "sync:1:stall=4000"})
    assert first.exits == [SAVED_TO_RUN_AGAIN] * 2, first.log
    assert Checkpoints(root).published() == [1]
    again = pretraining.fail(*how)
    assert "Will rerun step" in again.log
