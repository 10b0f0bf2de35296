"""Ranks that count what a load reads from disk: weights of replicas, and an optimizer."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from saving_rank import join, report, save

from megatron_datastates.mcore import DataStatesSaveStrategy
from megatron_datastates.mcore.load.opening import open_checkpoint

LAYERS, ROWS, COLUMNS, WIDTH = 2, 4096, 4096, 4096


class Place:
    """This rank's tensor-parallel and data-parallel rank, in Megatron's order (tensor-parallel innermost)."""

    def __init__(self, tp: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.tp_size, self.dp_size = tp, ranks // tp
        self.tp, self.dp = rank % tp, rank // tp
        groups = [dist.new_group(list(range(t, ranks, tp))) for t in range(tp)]
        self.dp_group = groups[self.tp]


def filled(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.bfloat16)


def state(place: Place, value: int) -> dict[str, Any]:
    """Returns 64 MiB of weights split over TP, 64 MiB of moments split over both, norms and objects."""
    sharded: dict[str, Any] = {"iteration": value}
    rank, ranks = place.tp * place.dp_size + place.dp, place.tp_size * place.dp_size
    for layer in range(LAYERS):
        name = f"layers.{layer}."
        weight = filled(value + layer + place.tp / 8, ROWS // place.tp_size, COLUMNS)
        moment = filled(value + layer, ROWS // ranks, COLUMNS)
        sharded |= {
            name + "weight": ShardedTensor.from_rank_offsets(
                name + "weight", weight, (0, place.tp, place.tp_size), replica_id=(0, 0, place.dp)
            ),
            name + "norm": ShardedTensor.from_rank_offsets(
                name + "norm", filled(layer, WIDTH), replica_id=(0, place.tp, place.dp)
            ),
            name + "moment": ShardedTensor.from_rank_offsets(
                name + "moment", moment, (0, rank, ranks), replica_id=0
            ),
            name + "extra": ShardedObject(
                name + "extra", {"layer": layer}, (1,), (0,), replica_id=(0, place.tp, place.dp)
            ),
        }
    return sharded


def save_replicas(directory: str, tp: int, folder: str) -> None:
    join()
    place = Place(tp)
    strategy = FullyParallelSaveStrategyWrapper(DataStatesSaveStrategy(), place.dp_group)
    save(Path(directory), state(place, 1), strategy, "sync")
    report(folder)


def count_reads(directory: str, tp: int, how: str, folder: str) -> None:
    """Reports the bytes that this rank read from data files, and the bytes that these hold."""
    join()
    place = Place(tp)
    strategy: Any = TorchDistLoadShardedStrategy()
    if how == "parallel":
        strategy = FullyParallelLoadStrategyWrapper(strategy, place.dp_group)
    loaded = dist_checkpointing.load(state(place, -1), directory, strategy)
    assert loaded["iteration"] == 1 and loaded["layers.1.extra"] == {"layer": 1}
    checkpoint = open_checkpoint(directory)
    report(
        folder,
        read=checkpoint.costs.bytes_read,
        stored=sum(entry.footer_offset for entry in checkpoint.manifest.files),
        norm=float(loaded["layers.1.norm"].sum()),
        first=float(loaded["layers.1.weight"][0, 0]),
    )
