"""One rank's load, up to its plan: what Megatron asks for, and what DCP's planner makes of our metadata.

What belongs here: building a rank's request as Megatron's load does, and planning it with Megatron's planner
and our reader. No data is read, and the tensors to load into are never touched, so they take no memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from scale_states import Group, Model, Parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_datastates.mcore.reader import DataStatesReader
from megatron_datastates.pipeline.load import Checkpoint


class Request:
    """What one rank asks for: the state dict that DCP is given, and Megatron's tensors for shape checks."""

    def __init__(self, items: list[ShardedTensor | ShardedObject]) -> None:
        self.tensors = [item for item in items if isinstance(item, ShardedTensor)]
        grouped, _, _ = _replace_state_dict_keys_with_sharded_keys({str(i): x for i, x in enumerate(items)})
        self.state = mcore_to_pyt_state_dict(grouped, is_loading=True)


def enter_world(rank: int, ranks: int) -> None:
    """Becomes one of many ranks whose collective calls do nothing: Megatron's load asks who it is."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def request_of(model: Model, parallel: Parallel, *, with_optimizer: bool) -> Request:
    """All that rank 0 of this layout loads; without the optimizer, the model's tensors only."""
    group = Group(model, parallel, tp=0, pp=0)
    items: list[ShardedTensor | ShardedObject] = list(_weights(group))
    if with_optimizer:
        items += _optimizer(group)
        items += [ShardedObject.empty_from_unique_key(key) for key in group.objects(0)]
    return Request(items)


def _weights(group: Group) -> Iterator[ShardedTensor]:
    for weight in group.weights(0):
        local = weight.shape[weight.prepended :]
        for offset in weight.offsets:
            yield ShardedTensor(
                weight.key,
                torch.empty(local, dtype=torch.bfloat16),
                torch.bfloat16,
                local,
                weight.global_shape,
                offset,
                tuple(whole // part for whole, part in zip(weight.global_shape, weight.shape, strict=True)),
                prepend_axis_num=weight.prepended,
            )


def _optimizer(group: Group) -> Iterator[ShardedTensor]:
    for optimizer, rank in group.optimizers(0):
        for fragment, _ in optimizer.fragments(rank):
            data = torch.empty(fragment.shape)
            yield ShardedTensor(
                fragment.key, data, data.dtype, fragment.shape, fragment.global_shape, fragment.offset, None
            )


def plan_load(directory: Path, request: Request) -> dict[str, Any]:
    """As torch.distributed.checkpoint.load does in a load of Megatron's, up to the plan of the reads."""
    begin = time.perf_counter()
    checkpoint = Checkpoint.open(directory)
    opened = time.perf_counter()
    reader = DataStatesReader(checkpoint)
    metadata = reader.read_metadata()
    known = time.perf_counter()
    planner = MCoreLoadPlanner(
        shapes_validation_sharded_tensors=request.tensors,
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
    planner.set_up_planner(request.state, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    end = time.perf_counter()
    return {
        "open_seconds": round(opened - begin, 4),
        "metadata_seconds": round(known - opened, 4),
        "plan_seconds": round(end - known, 4),
        "seconds": round(end - begin, 4),
        "requested": len(request.tensors),
        "reads": len(plan.items),
    }
