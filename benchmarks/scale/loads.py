"""One rank's load up to its plan: what Megatron requests, and what DCP's planner makes of our metadata.

What belongs here: a rank's request, and Megatron's load of it through our hooks until data would be read. The
tensors to load into are never touched, so they take no memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as strategies
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scale.models import Model, Parallel
from benchmarks.scale.ranks import Group
from megatron_datastates.format.values import OPTIMIZER_MAP_NAME
from megatron_datastates.mcore.load.reader import DataStatesReader
from megatron_datastates.pipeline.loading.load import Checkpoint


def enter_world(rank: int, ranks: int) -> None:
    """Makes this process one of many ranks, as Megatron's load expects; collective calls do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def request_of(model: Model, parallel: Parallel, *, with_optimizer: bool) -> dict[str, Any]:
    """Returns all that rank 0 of this layout loads; without the optimizer, the model's tensors only."""
    group = Group(model, parallel, tp=0, pp=0)
    items: list[ShardedTensor | ShardedObject] = list(_weights(group))
    if with_optimizer:
        items += _optimizer(group)
        keys = [key for key in group.objects(0) if OPTIMIZER_MAP_NAME not in key]  # Megatron knows no maps
        items += [ShardedObject.empty_from_unique_key(key) for key in keys]
    return {str(number): item for number, item in enumerate(items)}


def _weights(group: Group) -> Iterator[ShardedTensor]:
    """Yields shards whose tensors have the axes of layers and experts, which Megatron would prepend.

    The reads are the same. For prepended axes Megatron makes one of torch's ShardedTensors for each key,
    which visits every shard of all ranks: with some hundred experts, Megatron's own code would take many
    minutes.
    """
    for weight in group.weights(0):
        for offset in weight.offsets:
            yield ShardedTensor(
                weight.key,
                torch.empty(weight.shape, dtype=torch.bfloat16),
                torch.bfloat16,
                weight.shape,
                weight.global_shape,
                offset,
                tuple(whole // part for whole, part in zip(weight.global_shape, weight.shape, strict=True)),
            )


def _optimizer(group: Group) -> Iterator[ShardedTensor]:
    for optimizer, rank in group.optimizers(0):
        for fragment, _ in optimizer.fragments(rank):
            data = torch.empty(fragment.shape)
            yield ShardedTensor(
                fragment.key, data, data.dtype, fragment.shape, fragment.global_shape, fragment.offset, None
            )


class _PlannedError(Exception):
    """Ends a load where data would be read."""


class Stages:
    """Replaces functions by timed ones, and adds up the elapsed and the processor seconds of their calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Adds the calls of a function of `owner` to a stage."""
        original = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begin, begin_cpu = time.perf_counter(), time.process_time()
            try:
                return original(*args, **options)
            finally:
                took, took_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
                self.seconds[stage] = self.seconds.get(stage, 0.0) + took
                self.cpu_seconds[stage] = self.cpu_seconds.get(stage, 0.0) + took_cpu

        setattr(owner, name, timed)


def plan_load(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Loads with Megatron's strategy and our hooks, up to the call that would read data; once in a process.

    Megatron's own work on the request, before it asks for metadata, is reported apart and does not count.
    """
    stages = Stages()
    facts: dict[str, float] = {}
    stages.watch(strategies, "mcore_to_pyt_state_dict", "request")
    stages.watch(Checkpoint, "open", "open")
    stages.watch(DataStatesReader, "read_metadata", "metadata")
    stages.watch(strategies.MCoreLoadPlanner, "create_local_plan", "plan")

    def read_data(reader: DataStatesReader, plan: LoadPlan, planner: LoadPlanner) -> None:
        facts["seconds"] = time.perf_counter() - begin - stages.seconds["request"]
        facts["cpu_seconds"] = time.process_time() - begin_cpu - stages.cpu_seconds["request"]
        facts["reads"] = len(plan.items)
        raise _PlannedError

    DataStatesReader.read_data = read_data  # type: ignore[assignment,method-assign]
    begin, begin_cpu = time.perf_counter(), time.process_time()
    try:
        strategies.TorchDistLoadShardedStrategy().load(request, directory)
    except CheckpointException:
        if "seconds" not in facts:
            raise
    facts |= {f"{stage}_seconds": seconds for stage, seconds in stages.seconds.items()}
    return {name: round(value, 4) for name, value in facts.items()} | {"requested": len(request)}
