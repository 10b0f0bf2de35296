"""Prepared saves with optimizers that store their state by parameter: no change between saves is missed."""

import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.e2e.test_prepared import LAST, STEPS, STOP, prepared, saves
from tests.support.tiny import LAYOUTS, Checkpoints, Ending, Pretraining

ALL = ("--use-distributed-optimizer", "--bf16")
needs_muon = pytest.mark.skipif(
    not find_spec("emerging_optimizers") or metadata.version("megatron-core") < "0.19",
    reason="emerging-optimizers is not installed, or Megatron makes Muon in another way",
)
BUCKETS = "buckets"  # the parameters that Muon does not train have a distributed optimizer
MUON = ["--optimizer", "muon"]
WHOLE = ("--use-distributed-optimizer",)
STAGES = [*LAYOUTS["pp2"], "--untie-embeddings-and-output-weights"]  # each tensor is on one rank only
HOW = [
    pytest.param([*LAYOUTS["tp2"], "--swiglu"], WHOLE, id="tp2, swiglu"),
    pytest.param(["--ckpt-fully-parallel-save"], WHOLE, id="dp2, fully parallel"),
    pytest.param(["--fp16", "--initial-loss-scale", "64"], ALL, id="dp2, fp16"),
    pytest.param([*LAYOUTS["pp2"]], ALL, id="pp2, fp32"),
    pytest.param(["--num-experts", "4", "--expert-model-parallel-size", "2"], WHOLE, id="ep2"),
    pytest.param([*LAYOUTS["tp2"], *MUON], WHOLE, id="tp2, muon", marks=needs_muon),
    pytest.param([*LAYOUTS["pp2"], *MUON], (), id="pp2, layer-wise muon", marks=needs_muon),
    pytest.param([*MUON], (), id="dp2, layer-wise muon", marks=needs_muon),
    pytest.param([*MUON, BUCKETS], (), id="dp2, layer-wise muon, buckets", marks=needs_muon),
]


def run(pretraining: Pretraining, how: list[str], *more: str | Path, **named: Any) -> Ending:
    environment = named.pop("environment", {}) | ({"TINY_MODEL_PROVIDER": "1"} if BUCKETS in how else {})
    how = [name for name in how if name != BUCKETS]
    return pretraining.run(*how, *STEPS, *more, environment=environment, **named)


@pytest.mark.parametrize(("how", "without"), HOW)
def test_saves_after_the_first_are_prepared_and_exact(
    how: list[str], without: tuple[str, ...], pretraining: Pretraining, tmp_path: Path
) -> None:
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    saving = ["--async-save", "--save", root, "--datastates-report-file", report, *STOP]
    saved = run(pretraining, how, *saving, without=without)
    assert prepared(report) == {2: False, 4: True, 6: True}
    assert {event["eager_bytes"] for event in saves(report)} == {saves(report)[0]["eager_bytes"]}
    for step in (4, LAST):
        resumed = run(pretraining, how, "--load", root, "--ckpt-step", str(step), without=without)
        assert resumed.resumed_from(saved) == step


@pytest.mark.parametrize(
    ("mutation", "is_prepared"),
    [
        ("moved_data", True),
        ("moved_data:1", True),
        ("new_option", True),  # all ranks load that of rank 0
        ("replaced_state", False),
        ("replaced_state:1", False),
        ("replaced_main_parameters", False),
        ("replaced_main_parameters:1", False),
    ],
)
@pytest.mark.parametrize(
    ("how", "without"),
    [
        pytest.param([*STAGES], WHOLE, id="adam"),
        pytest.param([*STAGES, *MUON], (), id="layer-wise muon", marks=needs_muon),
    ],
)
def test_changes_between_saves_are_saved(
    how: list[str],
    without: tuple[str, ...],
    mutation: str,
    is_prepared: bool,
    pretraining: Pretraining,
    tmp_path: Path,
) -> None:
    """Layer-wise optimizers make collective calls in full saves: then all ranks make one, or none."""
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    saving = ["--async-save", "--save", root, *STOP, "--datastates-report-file", report]
    name, _, rank = mutation.partition(":")
    changing = {"TINY_MUTATION": f"{name}:{LAST}{rank and ':'}{rank}"}
    saved = run(pretraining, how, *saving, environment=changing, without=without)
    is_elsewhere = bool(rank) and "--optimizer" not in how
    assert prepared(report) == {2: False, 4: True, 6: is_prepared or is_elsewhere}
    resumed = run(pretraining, how, "--load", root, without=without)
    assert resumed.resumed_from(saved) == LAST


@needs_muon
@pytest.mark.parametrize("rank", [0, 1])
def test_saves_of_layer_wise_optimizers_are_prepared_on_all_ranks_or_none(
    rank: int, pretraining: Pretraining, tmp_path: Path
) -> None:
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    saving = ["--async-save", "--save", root, *STOP, "--datastates-report-file", report]
    other = {f"TINY_VARIABLE_OF_RANK_{rank}": "MEGATRON_DATASTATES_PREPARED=off"}
    saved = run(pretraining, MUON, *saving, environment=other)
    assert prepared(report) == {2: False, 4: False, 6: False}
    assert run(pretraining, MUON, "--load", root).resumed_from(saved) == LAST


@needs_muon
def test_an_error_in_a_collective_call_of_megatrons_ends_all_ranks(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """As in a full save: the other rank waits in that call, and a sum of ours is not what it waits for."""
    how = [*STAGES, *MUON, *STEPS, *STOP, "--async-save", "--save", str(tmp_path / "ck")]
    failed = pretraining.fail(*how, environment={"TINY_MUTATION": f"failing_gather:{LAST}:1"})
    assert "MemoryError: no memory to gather" in failed.log


@pytest.mark.parametrize(
    ("how", "without"),
    [
        pytest.param([*LAYOUTS["tp2"], "--optimizer", "sgd"], WHOLE, id="sgd"),
        pytest.param([*MUON, BUCKETS], (), id="layer-wise muon, buckets", marks=needs_muon),
    ],
)
def test_a_prepared_checkpoint_is_the_same_as_a_full_one(
    how: list[str], without: tuple[str, ...], pretraining: Pretraining, tmp_path: Path
) -> None:
    """Both runs use the same path, one after the other: the arguments are part of what is saved."""
    root, report = tmp_path / "ck", tmp_path / "report.jsonl"
    saving = [*STOP, "--save", root]
    environment = {"MEGATRON_DATASTATES_REPORT_FILE": str(report)}
    run(pretraining, how, *saving, environment=environment, without=without)
    root.rename(tmp_path / "on")
    run(pretraining, how, *saving, environment={"MEGATRON_DATASTATES_PREPARED": "off"}, without=without)

    assert prepared(report)[LAST]
    folders = [Checkpoints(where).at(LAST) for where in (tmp_path / "on", root)]
    command = [sys.executable, "-m", "megatron_datastates", "diff", *map(str, folders)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr
    ours, theirs = map(Checkpoint.open, folders)
    assert ours.objects == theirs.objects
    unequal = [key for key in ours.objects if ours.read_object_bytes(key) != theirs.read_object_bytes(key)]
    assert unequal == []
