"""Checkpoints of Megatron's loop: compared with each other, and exported under the names of its modules."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining


def datastates(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_datastates", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def fused(name: str) -> str:
    """Returns Transformer Engine's name of a fused layer: Megatron saves its local layers under it, too."""
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


@pytest.mark.conformance
def test_trained_weights_are_exported_under_module_names_and_diff_reports_drift(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "ck")
    saving = ["--save", checkpoints.root, "--exit-interval", "4", "--ckpt-format", "datastates"]
    ending = pretraining.run(*LAYOUTS["tp2"], "--train-iters", "6", *saving)

    exported = datastates("export", checkpoints.at(4), tmp_path / "out")
    compared = datastates("diff", checkpoints.at(2), checkpoints.at(4), "--keys", "decoder.*", "--json")

    assert exported.returncode == 0, exported.stderr
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        names = set(file.keys())
    trained = {name for name in ending.ranks[0].begun if name.startswith("model")}
    assert names == {fused(name.removeprefix("model 0 module.module.")) for name in trained}
    assert compared.returncode == 1, compared.stderr
    difference = json.loads(compared.stdout)
    assert (
        difference["first_layer"] == "decoder.layers.0"
        and not difference["added"]
        and not difference["removed"]
    )
