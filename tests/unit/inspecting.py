"""Shared by tests of the inspecting commands: a run with odd tensors, and calling commands."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from click.testing import CliRunner, Result

from megatron_datastates.cli.main import app
from tests.unit.states import new_saver, save
from tests.unit.test_optimizer_state import BUCKET, GROUP, bucket, map_of, parameter, shard

WEIGHT = torch.arange(24.0).reshape(2, 3, 4)
ODD = torch.tensor([1.0, math.nan, math.inf, -3.0, -math.inf, math.nan])
TENSORS = {
    "decoder.weight": WEIGHT,
    "decoder.bias": torch.tensor([0.5, -1.5]).bfloat16(),
    "odd [bold]": ODD,
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
    f"{GROUP}0.{BUCKET}.exp_avg": torch.arange(6.0),
}
MAP = map_of(bucket(6, parameter("w", 2, 6, shard("w", (2, 2), (0, 0), (2, 2), 0, (2, 1)))))
OBJECTS = {
    "common_state/shard_0_1": [{"iteration": 5}],
    f"{GROUP}0.datastates_map/shard_0_1": [MAP],
}


def save_run(root: Path) -> None:
    """Saves iterations 5 and 10, each with TENSORS and OBJECTS."""
    saver = new_saver()
    for number in (5, 10):
        directory = root / f"iter_{number:07d}"
        save(saver, directory, TENSORS, OBJECTS)
        (directory / "metadata.json").write_text('{"sharded_backend": "datastates"}')
    saver.close()


def call(*arguments: object) -> Result:
    """Runs a command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def output_of(*arguments: object) -> str:
    """Runs a command that has to succeed, and returns its output."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object, code: int = 2) -> str:
    """Runs a command that has to fail with an exit code, and returns its one line on stderr."""
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("datastates: ")
    return line


def all_files(root: Path) -> dict[str, int]:
    """Returns the paths below a directory and their sizes."""
    return {str(path): path.stat().st_size for path in root.rglob("*")}
