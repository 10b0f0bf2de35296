"""What a user registers with --datastates-providers to watch a run, with a stand-in for TensorBoard.

The environment variable MONITORED names the folder that gets a file of JSON lines from each rank.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import global_vars

import megatron_datastates as ds


def write(name: str, value: Any) -> None:
    with Path(os.environ["MONITORED"], f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(value) + "\n")


class Writer:
    """TensorBoard's, as far as scalars of checkpoints are concerned."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if name.startswith("datastates/"):
            write("scalars", [name, value, step])

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def watch() -> dict[str, Any]:
    rank = dist.get_rank()
    ds.on_report(functools.partial(write, f"rank{rank}"))
    if rank == dist.get_world_size() - 1:
        global_vars._GLOBAL_TENSORBOARD_WRITER = Writer()
    return {}
