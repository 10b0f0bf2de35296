"""Checkpoints of both formats with a stacked weight and training arguments, as Megatron stores them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tests.unit.states import new_saver, save

STACKED = "decoder.layers.mlp.linear_fc1.weight"
WEIGHT = torch.arange(3 * 4 * 2, dtype=torch.float32).reshape(3, 4, 2)
TRACKER = "latest_checkpointed_iteration.txt"


def arguments(**changes: Any) -> argparse.Namespace:
    known = {
        "num_layers": 3,
        "hidden_size": 8,
        "lr": 0.001,
        "train_iters": 1_000_000,
        "consumed_train_samples": 1_024_000_000,
        "global_batch_size": 1024,
        "optimizer": "adam",
        "recompute_granularity": None,
        "params_dtype": torch.bfloat16,
        "save": "runs/gpt",
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "world_size": 2,
        "data_path": ["a", 0.5, None],
    }
    return argparse.Namespace(**(known | changes))


def save_trained(directory: Path, format: str, **changes: Any) -> None:
    """Saves a checkpoint. `changes`: of the arguments."""
    tensors = {STACKED: WEIGHT, "embedding.weight": torch.ones(5)}
    common = {"common_state/shard_0_1": [{"args": arguments(**changes), "iteration": 5}]}
    if format == "torch_dist":
        planner = DefaultSavePlanner(flatten_state_dict=False)  # as Megatron's: a list is one object
        writer = dcp.FileSystemWriter(directory)
        dcp.save({**tensors, **common}, storage_writer=writer, planner=planner, no_dist=True)
    else:
        saver = new_saver()
        save(saver, directory, tensors, common)
        saver.close()
    (directory / "metadata.json").write_text(
        f'{{"sharded_backend": "{format}", "sharded_backend_version": 1}}'
    )


def save_run_of(root: Path, format: str, iterations: tuple[int, ...] = (5, 10)) -> Path:
    """Saves a run whose tracker names the first iteration."""
    for number in iterations:
        save_trained(root / f"iter_{number:07d}", format, lr=number / 1000)
    (root / TRACKER).write_text(str(iterations[0]))
    return root
