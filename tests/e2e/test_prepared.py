"""Prepared saves in Megatron's loop: which saves are, and that no change between two saves is missed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining

STEPS: list[str | Path] = ["--train-iters", "8", "--save-interval", "2", "--ckpt-format", "datastates"]
LATENT = [
    *("--multi-latent-attention", "--q-lora-rank", "16", "--kv-lora-rank", "12", "--qk-layernorm"),
    *("--qk-head-dim", "8", "--qk-pos-emb-head-dim", "4", "--v-head-dim", "8", "--mtp-num-layers", "1"),
    "--untie-embeddings-and-output-weights",  # tied ones and two stages: Megatron fails with such a layer
]
LAST = 6
STOP = ["--exit-interval", str(LAST)]


def saves(report: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [json.loads(line) for line in report.read_text().splitlines()]
    return [event for event in events if event["event"] == "save"]


def prepared(report: Path) -> dict[int, bool]:
    """Returns which saves were prepared, by iteration."""
    return {event["iteration"]: event["prepared"] for event in saves(report)}


@pytest.mark.parametrize("mode", [["--async-save"], []], ids=["async", "sync"])
@pytest.mark.parametrize(
    "how",
    [
        pytest.param([*LAYOUTS["tp2"]], id="tp2"),
        pytest.param([*LAYOUTS["pp2"], "--swiglu"], id="pp2, swiglu"),
        pytest.param(["--ckpt-fully-parallel-save", "--ckpt-assume-constant-structure"], id="dp2, constant"),
        pytest.param(["--num-experts", "4", "--expert-model-parallel-size", "2"], id="ep2"),
    ],
)
def test_saves_after_the_first_are_prepared_and_exact(
    how: list[str], mode: list[str], pretraining: Pretraining, tmp_path: Path
) -> None:
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    saving = ["--save", root, "--datastates-report-file", report, *STOP]
    saved = pretraining.run(*how, *mode, *STEPS, *saving)
    assert prepared(report) == {2: False, 4: True, 6: True}
    assert {event["eager_bytes"] for event in saves(report)} == {saves(report)[0]["eager_bytes"]}
    assert not mode or saves(report)[0]["eager_bytes"] < saves(report)[0]["lazy_bytes"]
    for step in (4, LAST):
        resumed = pretraining.run(*how, *STEPS, "--load", root, "--ckpt-step", str(step))
        assert resumed.resumed_from(saved) == step


@pytest.mark.parametrize("down_projections", ["two", "fused"])
def test_saves_of_multi_latent_attention_are_prepared_and_exact(
    down_projections: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    """With --mla-down-proj-fusion, two tensors and two extra states are stored of one layer."""
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    how: list[str | Path] = [*LAYOUTS["tp2"], *STEPS, "--async-save", *LATENT]
    local = {"TINY_LATENT_ATTENTION": down_projections}
    saved = pretraining.run(
        *how, *STOP, "--save", root, "--datastates-report-file", report, environment=local
    )
    assert prepared(report) == {2: False, 4: True, 6: True}
    assert saves(report)[-1]["eager_bytes"] < saves(report)[-1]["lazy_bytes"] / 100
    assert any("linear_kv_down_proj.weight" in key for key in Checkpoint.open(root / "iter_0000006").tensors)
    resumed = pretraining.run(*how, "--load", root, environment=local)
    assert resumed.resumed_from(saved) == LAST
    other = {"TINY_LATENT_ATTENTION": {"two": "fused", "fused": "two"}[down_projections]}
    changed = pretraining.run(*LATENT, *LAYOUTS["pp2"], *STEPS, "--load", root, environment=other)
    assert "it is loaded by parameter" in changed.log


def test_places_that_a_fork_of_megatron_has_in_an_attribute_are_those_of_each_save(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    experts: list[str | Path] = ["--num-experts", "4", "--expert-model-parallel-size", "2"]
    changing = {"TINY_MUTATION": "wandering_experts:1"}
    report, runs = tmp_path / "report.jsonl", {mode: tmp_path / mode for mode in ("on", "off")}
    for mode, root in runs.items():
        how = [*experts, "--datastates-prepared", mode, "--datastates-report-file", report]
        pretraining.run(*how, *STEPS, *STOP, "--save", root, environment=changing)
    reasons = [event["not_prepared_because"] or "" for event in saves(report)]
    assert "the attribute placement of a SequentialMLP has changed" in reasons[1]
    first, later = (Checkpoint.open(runs["off"] / f"iter_000000{step}") for step in (2, 4))
    assert first.tensors.keys() == later.tensors.keys()
    for step in (2, 4, LAST):
        found, expected = (Checkpoint.open(root / f"iter_000000{step}") for root in runs.values())
        for key in expected.tensors:
            assert torch.equal(found.read_tensor(key), expected.read_tensor(key)), (step, key)


def test_prepared_saves_that_copy_at_once_are_exact(pretraining: Pretraining, tmp_path: Path) -> None:
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    how: list[str | Path] = [*LAYOUTS["tp2"], *STEPS, "--async-save", "--datastates-lazy", "off"]
    saved = pretraining.run(*how, *STOP, "--save", root, "--datastates-report-file", report)
    assert prepared(report) == {2: False, 4: True, 6: True}
    resumed = pretraining.run(*how, "--load", root)
    assert resumed.resumed_from(saved) == LAST


def test_saves_after_one_that_storage_failed_are_prepared_and_exact(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """The second save, a prepared one, fails on rank 1; what it prepared for is still true."""
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    saving = ["--async-save", "--save", root, "--datastates-report-file", report]
    failing = {"TINY_FAULTS_OF_RANK_1": "sync:2:EIO"}
    how: list[str | Path] = [*LAYOUTS["tp2"], *STEPS, *STOP, "--datastates-on-failure", "warn"]
    saved = pretraining.run(*how, *saving, environment=failing)
    assert prepared(report) == {2: False, 4: True, 6: True}
    assert Checkpoints(root).published() == [2, 6]
    resumed = pretraining.run(*LAYOUTS["tp2"], *STEPS, "--load", root)
    assert resumed.resumed_from(saved) == LAST


@pytest.mark.parametrize("rank", [0, 1])
def test_saves_may_be_prepared_on_some_ranks_only(
    rank: int, pretraining: Pretraining, tmp_path: Path
) -> None:
    """Megatron checks in the first save that the objects of all ranks are there."""
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    how: list[str | Path] = [*LAYOUTS["tp2"], *STEPS, "--async-save", "--datastates-report-file", report]
    other = {f"TINY_VARIABLE_OF_RANK_{rank}": "MEGATRON_DATASTATES_PREPARED=off"}
    saved = pretraining.run(*how, *STOP, "--save", root, environment=other)
    assert prepared(report) == {2: False, 4: rank == 1, 6: rank == 1}
    resumed = pretraining.run(*LAYOUTS["tp2"], *STEPS, "--load", root)
    assert resumed.resumed_from(saved) == LAST


def test_prepared_saves_can_be_switched_off(pretraining: Pretraining, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    saving = ["--save", tmp_path / "ck", "--datastates-report-file", report, "--datastates-prepared", "off"]
    pretraining.run(*LAYOUTS["tp2"], *STEPS, *STOP, *saving)
    assert prepared(report) == {2: False, 4: False, 6: False}


@pytest.mark.parametrize("how", [["--dist-ckpt-optim-fully-reshardable"], ["--no-save-optim"]])
def test_saves_of_new_tensors_are_never_prepared(
    how: list[str], pretraining: Pretraining, tmp_path: Path
) -> None:
    """What is gathered for one save is not there at the next; without an optimizer there are no buckets."""
    report = tmp_path / "report.jsonl"
    saving = ["--save", tmp_path / "ck", "--datastates-report-file", report]
    pretraining.run(*LAYOUTS["tp2"], *STEPS, *STOP, *how, *saving)
    assert prepared(report) == {2: False, 4: False, 6: False}
    assert all("buckets" in event["not_prepared_because"] for event in saves(report))


@pytest.mark.parametrize(
    ("mutation", "is_prepared"),
    [
        ("moved_data", True),
        ("new_option", True),
        ("replaced_state", False),
        ("frozen_parameter", True),
        ("replaced_optimizer", False),
        ("swapped_meanwhile", False),
        ("moved_late", True),
        ("more_state", False),
        ("switched_off", False),
    ],
)
@pytest.mark.parametrize("rank", ["", ":1"], ids=["all ranks", "rank 1"])
def test_changes_between_saves_are_saved(
    mutation: str, is_prepared: bool, rank: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    how: list[str | Path] = [*LAYOUTS["pp2"], *STEPS, "--async-save", "--save", root]
    changing = {"TINY_MUTATION": f"{mutation}:{LAST}{rank}"}
    saved = pretraining.run(*how, *STOP, "--datastates-report-file", report, environment=changing)
    # Rank 0 reports for itself: ranks need not agree while the structure is declared constant.
    assert prepared(report) == {2: False, 4: True, 6: is_prepared or bool(rank)}
    resumed = pretraining.run(*how, "--load", root)
    assert resumed.resumed_from(saved) == LAST
    stored = Checkpoint.open(Checkpoints(root).at(LAST)).tensors
    assert ("more1" in stored) == (mutation == "more_state")


@pytest.mark.parametrize("mutation", ["filtered_late", "added_late"])
def test_a_save_that_is_not_what_was_prepared_fails_and_the_next_is_full(
    mutation: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    """A program changes what some saves are given; no save may publish a part of the state."""
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    saving = ["--save", root, "--datastates-report-file", report, "--datastates-on-failure", "warn"]
    changing = {"TINY_MUTATION": f"{mutation}:4"}
    saved = pretraining.run(*LAYOUTS["tp2"], *STEPS, *STOP, *saving, environment=changing)
    assert "a prepared save" in saved.log
    assert Checkpoints(root).published() == [2, 6]
    resumed = pretraining.run(*LAYOUTS["tp2"], *STEPS, "--load", root)
    assert resumed.resumed_from(saved) == LAST


def test_what_a_program_left_out_of_one_save_is_in_the_next(pretraining: Pretraining, tmp_path: Path) -> None:
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    saving = ["--save", root, "--datastates-report-file", report]
    changing = {"TINY_MUTATION": "weights_first:1"}
    saved = pretraining.run(*LAYOUTS["tp2"], *STEPS, *STOP, *saving, environment=changing)
    assert prepared(report) == {2: False, 4: False, 6: True}
    resumed = pretraining.run(*LAYOUTS["tp2"], *STEPS, "--load", root)
    assert resumed.resumed_from(saved) == LAST


def test_nothing_is_held_between_saves(pretraining: Pretraining, tmp_path: Path) -> None:
    """Frameworks move optimizer state out of the device's memory between iterations."""
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    saving = ["--save", root, "--datastates-report-file", report]
    changing = {"TINY_MUTATION": f"freed_state:{LAST}"}
    saved = pretraining.run(*LAYOUTS["dp2"], *STEPS, *STOP, *saving, environment=changing)
    assert prepared(report) == {2: False, 4: True, 6: False}
    resumed = pretraining.run(*LAYOUTS["dp2"], *STEPS, "--load", root)
    assert resumed.resumed_from(saved) == LAST


@pytest.mark.parametrize("mutation", ["replaced_parameter", "reloaded_model"])
def test_parameters_that_the_optimizer_does_not_know_are_saved(
    mutation: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    """Megatron's optimizer cannot train such a model, so only its weights are compared."""
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    how: list[str | Path] = [*LAYOUTS["pp2"], *STEPS, "--save", root]
    changing = {"TINY_MUTATION": f"{mutation}:{LAST}"}
    saved = pretraining.run(*how, *STOP, "--datastates-report-file", report, environment=changing)
    is_elsewhere = mutation == "replaced_parameter"  # on the last stage only; rank 0 reports
    assert prepared(report) == {2: False, 4: True, 6: is_elsewhere}
    resumed = pretraining.run(*how, "--load", root, "--no-load-optim")
    for ours, theirs in zip(resumed.ranks, saved.ranks, strict=True):
        assert ours.begun_at == LAST
        then = theirs.states[f"step {LAST}"]
        weights = [name for name in then if name.startswith("model")]
        assert weights and [name for name in weights if ours.begun[name] != then[name]] == []


def test_a_prepared_checkpoint_is_the_same_as_a_full_one(pretraining: Pretraining, tmp_path: Path) -> None:
    """Both runs use the same path, one after the other: the arguments are part of what is saved."""
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    how: list[str | Path] = [*LAYOUTS["tp2"], *STEPS, *STOP, "--save", root]
    pretraining.run(*how, environment={"MEGATRON_DATASTATES_REPORT_FILE": str(report)})
    root.rename(tmp_path / "on")
    pretraining.run(*how, environment={"MEGATRON_DATASTATES_PREPARED": "off"})

    assert prepared(report)[LAST]
    folders = [str(Checkpoints(where).at(LAST)) for where in (tmp_path / "on", root)]
    command = [sys.executable, "-m", "megatron_datastates", "diff", *folders]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr
