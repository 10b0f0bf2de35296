"""A run that compresses its checkpoints resumes from them as exactly as from others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import megatron_datastates as ds
from megatron_datastates.format.codecs import PLANES
from tests.e2e.conftest import STEPS, Reference
from tests.support.ranks import RankForge
from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining


@pytest.mark.long
@pytest.mark.parametrize("mode", [[], ["--async-save"]], ids=["sync", "async"])
def test_a_resume_from_compressed_checkpoints_is_exact(
    mode: list[str], pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    how: list[str | Path] = [*LAYOUTS["tp2"], "--train-iters", str(STEPS), "--ckpt-format", "datastates"]
    saving = ["--save", checkpoints.root, "--save-interval", "3", "--datastates-compress", "1", *mode]

    saved = pretraining.run(*how, *saving)
    resumed = pretraining.run(*how, "--load", checkpoints.root, "--ckpt-step", "3")

    assert saved.differences(reference("tp2")) == [], "saving changed what was trained"
    assert resumed.resumed_from(reference("tp2")) == 3
    assert resumed.differences(reference("tp2")) == []
    checkpoint = ds.open(checkpoints.root / "iter_0000003")
    assert checkpoint.manifest.files
    for file in range(len(checkpoint.manifest.files)):
        fragments = checkpoint.footer(file).fragments
        assert fragments and {entry.codec for entry in fragments} == {PLANES}
    command = [sys.executable, "-m", "megatron_datastates", "verify", str(checkpoints.root / "iter_0000003")]
    verified = subprocess.run(command, capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.parametrize("backend", ["datastates", "torch_dist"])
def test_what_a_program_transforms_is_transformed_whatever_format_it_asks_for(
    backend: str, forge: RankForge, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    how = [*LAYOUTS["tp2"], "--train-iters", "2", "--ckpt-format", backend, "--use-distributed-optimizer"]
    Pretraining(forge, tmp_path / "runs", target="casting_rank:main").run(*how, "--save", checkpoints.root)
    stored = ds.open(checkpoints.at(2)).tensors
    moments = {tensor.dtype for key, tensor in stored.items() if "exp_avg" in key}
    assert moments == {"bfloat16"}
    assert "float32" in {tensor.dtype for tensor in stored.values()}, "main parameters are as they were"
