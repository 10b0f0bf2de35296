"""In Megatron's loop the next optimizer step waits for slow copies, so that none of its changes is saved."""

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import STEPS, Reference
from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining

SAVED_AT = 3


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_steps_during_a_slow_copy_do_not_reach_the_checkpoint(
    layout: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    checkpoints, report = Checkpoints(tmp_path / "checkpoints"), tmp_path / "report.jsonl"
    common = [*LAYOUTS[layout], "--train-iters", str(STEPS), "--ckpt-format", "datastates"]
    slow = ["--async-save", "--save-interval", str(SAVED_AT), "--datastates-copy-limit", "700kB"]
    saved = pretraining.run(
        *common, *slow, "--save", checkpoints.root, "--datastates-report-file", report, timeout_seconds=120
    )
    assert saved.differences(reference(layout)) == []
    (checkpoints.root / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))

    resumed = pretraining.run(*common, "--load", checkpoints.root)

    assert resumed.resumed_from(reference(layout)) == SAVED_AT
    assert resumed.differences(reference(layout)) == []
    first = json.loads(report.read_text().splitlines()[0])
    assert first["iteration"] == SAVED_AT
    assert first["lazy_bytes"] > 100 * first["eager_bytes"], "parameters and optimizer state are lazy"
    assert first["fence_ms"] > 0, (
        "the copy must be slow enough for the step to wait, or this test shows nothing"
    )


@pytest.mark.conformance
def test_saves_around_skipped_steps_and_evaluations_are_whole(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """With fp16 and a loss scale that doubles after every step, every other step is skipped."""
    checkpoints, report = Checkpoints(tmp_path / "checkpoints"), tmp_path / "report.jsonl"
    common = [*LAYOUTS["tp2"], "--train-iters", "6", "--fp16", "--hysteresis", "1"]
    common += ["--initial-loss-scale", str(2**18), "--loss-scale-window", "1"]
    common += ["--eval-interval", "1", "--eval-iters", "1"]
    ours = ["--ckpt-format", "datastates", "--datastates-copy-limit", "4MB"]
    saving = ["--async-save", "--save-interval", "1", "--datastates-report-file", report]
    untouched = pretraining.run(*common)

    saved = pretraining.run(*common, *ours, *saving, "--save", checkpoints.root, timeout_seconds=120)

    assert "number of skipped iterations:   1" in saved.log
    assert saved.differences(untouched) == []
    assert checkpoints.published() == [1, 2, 3, 4, 5, 6]
    for step in (3, 4):  # of which one was skipped
        resumed = pretraining.run(*common, *ours, "--load", checkpoints.root, "--ckpt-step", str(step))
        assert resumed.resumed_from(untouched) == step
    saves = [json.loads(line) for line in report.read_text().splitlines()]
    assert any(save["fence_ms"] > 0 for save in saves), "some step has to wait for a copy"
