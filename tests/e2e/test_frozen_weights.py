"""Training some of the weights: the others are written once, checkpoints are whole, every resume is exact."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining
from tests.unit.command import run

# The embedding and the MLPs of all layers.
FROZEN = {"TINY_FROZEN": r"embedding|linear_fc", "MEGATRON_DATASTATES_LINK_FROM": "64KiB"}
# A save links to the last one that is published, which takes a few polls, one an iteration.
STEPS = ["--train-iters", "32"]
SLOWLY = ["--step-delay-ms", "100"]
SAVED = (8, 16, 24, 32)


def saves(report: Path) -> dict[int, dict[str, Any]]:
    """Returns the reports of saves by iteration."""
    events = [json.loads(line) for line in report.read_text().splitlines()]
    return {event["iteration"]: event for event in events if event["event"] == "save"}


def assert_whole(checkpoint: Path) -> None:
    code, printed, errors = run("verify", checkpoint)
    assert code == 0, printed + errors


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_frozen_weights_are_written_once(layout: str, pretraining: Pretraining, tmp_path: Path) -> None:
    checkpoints, report = Checkpoints(tmp_path / "ck"), tmp_path / "report.jsonl"
    how: list[str | Path] = [*LAYOUTS[layout], *STEPS, "--ckpt-format", "datastates"]
    saving = ["--save", checkpoints.root, "--save-interval", "8", "--async-save", *SLOWLY]
    reference = pretraining.run(*how, environment=FROZEN)
    saved = pretraining.run(*how, *saving, "--datastates-report-file", report, environment=FROZEN)

    assert saved.differences(reference) == []
    assert checkpoints.published() == list(SAVED)
    reports = saves(report)
    linked = reports[16]["linked_bytes"]
    assert [reports[step]["linked_bytes"] for step in SAVED] == [0, linked, linked, linked]
    assert linked > 250_000, "less than the frozen weights, 2 bytes each"
    assert reports[8]["written_bytes"] - reports[16]["written_bytes"] == linked

    shutil.rmtree(checkpoints.at(8))
    for step in SAVED[1:]:
        assert_whole(checkpoints.at(step))
    for step in (16, 24):
        resumed = pretraining.run(
            *how, "--load", checkpoints.root, "--ckpt-step", str(step), environment=FROZEN
        )
        assert resumed.resumed_from(reference) == step
        assert resumed.differences(reference) == []


@pytest.mark.long
def test_frozen_weights_that_change_are_written_again(pretraining: Pretraining, tmp_path: Path) -> None:
    checkpoints, report = Checkpoints(tmp_path / "ck"), tmp_path / "report.jsonl"
    how: list[str | Path] = [*LAYOUTS["dp2"], *STEPS, "--ckpt-format", "datastates"]
    saving = ["--save", checkpoints.root, "--save-interval", "8", "--async-save", *SLOWLY]
    changing = {**FROZEN, "TINY_FROZEN_CHANGES_AFTER": "20"}
    saved = pretraining.run(*how, *saving, "--datastates-report-file", report, environment=changing)

    reports = saves(report)
    assert [reports[step]["linked_bytes"] > 0 for step in SAVED] == [False, True, False, True]
    for step in SAVED:
        assert_whole(checkpoints.at(step))
    resumed = pretraining.run(*how, "--load", checkpoints.root, "--ckpt-step", "24", environment=FROZEN)
    assert resumed.resumed_from(saved) == 24
    assert resumed.differences(saved) == []


@pytest.mark.long
def test_weights_that_are_trained_from_the_middle_on_are_written_from_there_on(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """Unfreezing is a resume: Megatron makes its optimizer once."""
    checkpoints, report = Checkpoints(tmp_path / "ck"), tmp_path / "report.jsonl"
    how: list[str | Path] = [*LAYOUTS["dp2"], *STEPS, "--ckpt-format", "datastates", "--async-save"]
    how += ["--save", checkpoints.root, "--save-interval", "8", *SLOWLY, "--datastates-report-file", report]
    pretraining.run(*how, "--exit-interval", "16", environment=FROZEN)
    thawed = pretraining.run(*how, "--load", checkpoints.root, "--no-load-optim", environment={})

    reports = saves(report)
    assert [reports[step]["linked_bytes"] > 0 for step in SAVED] == [False, True, False, False]
    for step in SAVED:
        assert_whole(checkpoints.at(step))
    resumed = pretraining.run(
        *LAYOUTS["dp2"],
        *STEPS,
        "--ckpt-format",
        "datastates",
        "--load",
        checkpoints.root,
        "--ckpt-step",
        "24",
        environment={},
    )
    assert resumed.resumed_from(thawed) == 24
    assert resumed.differences(thawed) == []


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize(
    ("frozen", "said"),
    [
        (r"layers\.0", "and this run trains more of it"),  # of tensors that hold all layers
        (r"linear_fc1", "was not trained by the run that saved it"),
    ],
)
def test_weights_that_were_frozen_when_they_were_saved_have_no_optimizer_state(
    frozen: str, said: str, layout: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    """The checkpoint is not damaged: no older one is recommended in its place."""
    place = ["--save", tmp_path / "ck", "--load", tmp_path / "ck", "--ckpt-format", "datastates"]
    pretraining.run(*LAYOUTS["tp2"], *place, "--exit-interval", "2", environment={"TINY_FROZEN": frozen})
    thawed = pretraining.fail(*LAYOUTS[layout], *place)
    assert all(thawed.exits)
    assert said in thawed.log and "Load without the optimizer (--no-load-optim)" in thawed.log
    assert "--datastates-fallback" not in thawed.log
