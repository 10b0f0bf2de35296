"""Optimizer state for benchmarks.load, cut as Megatron's distributed optimizer cuts it, with its map.

In buckets, each rank holds a range of each layer's parameters, one after another. By parameter, as stock's
fully reshardable layout stores and loads them, each rank of a data-parallel group holds all parameters of its
model shard. Every element is a function of its key and its position in the global tensor, in either form.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.load.states import Model, pattern

STATES = ("param", "exp_avg", "exp_avg_sq")
_BUCKET = "gbuf_idx_0.dtype_d.bucket_idx_"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parallel sizes of an optimizer; `by_parameter`: as the fully reshardable layout has it."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    by_parameter: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data


@dataclasses.dataclass(frozen=True)
class Target:
    """A part of the optimizer's memory: of a parameter on this rank, elements [begin, end)."""

    state: str
    parameter: Any  # of the optimizer map
    begin: int
    end: int
    memory: torch.Tensor

    def values(self) -> np.ndarray:
        """Returns what it holds."""
        whole = [
            pattern(f"{self.state}.{shard.key}", shard.global_shape, shard.offset, shard.shape).reshape(-1)
            for shard in self.parameter.shards
        ]
        return np.concatenate(whole)[self.begin : self.end]

    def fill(self) -> None:
        self.memory.view(torch.int32).copy_(torch.from_numpy(self.values()))

    def check(self) -> None:
        """Raises ValueError if an element has another value."""
        if not np.array_equal(self.memory.view(torch.int32).numpy(), self.values()):
            raise ValueError(f"{self.state} of {self.parameter.name} was not loaded as it was saved")


def make(layout: Layout, model: Model, rank: int) -> tuple[dict[str, Any], list[Target]]:
    """Returns a rank's sharded state dict for a load or a save, and its memory, not yet filled."""
    place, data = divmod(rank, layout.data)
    stage, tensor = divmod(place, layout.tensor)
    described = _map_of(layout, model, stage, tensor)
    if layout.by_parameter:
        return _by_parameter(described, data)
    return _in_buckets(layout, described, place, data)


def _map_of(layout: Layout, model: Model, stage: int, tensor: int) -> Any:
    from megatron_datastates.format.optimizer_map import MAP_FORMAT_VERSION, Bucket, OptimizerMap

    each = model.layers // layout.pipeline
    buckets = []
    for number, layer in enumerate(range(each * stage, each * (stage + 1))):
        parameters = list(_parameters(layout, model, layer, tensor))
        buckets.append(Bucket(f"{_BUCKET}{number}", parameters[-1].end, STATES, tuple(parameters)))
    return OptimizerMap(MAP_FORMAT_VERSION, tuple(buckets))


def _parameters(layout: Layout, model: Model, layer: int, tensor: int) -> Iterator[Any]:
    from megatron_datastates.format.optimizer_map import Parameter, ParameterShard

    hidden, ffn = model.hidden, model.ffn
    parts: tuple[tuple[str, tuple[int, ...], int, int], ...] = (
        # key, shape, axis that tensor parallelism cuts, shards of one rank (SwiGLU: gate and up)
        ("self_attention.linear_qkv.weight", (3 * hidden, hidden), 0, 1),
        ("self_attention.linear_proj.weight", (hidden, hidden), 1, 1),
        ("mlp.linear_fc1.weight", (2 * ffn, hidden), 0, 2),
        ("mlp.linear_fc2.weight", (hidden, ffn), 1, 1),
        ("input_layernorm.weight", (hidden,), -1, 1),
    )
    begin = 0
    for name, whole, axis, shards in parts:
        cut = layout.tensor * shards if axis >= 0 else 1
        shape = tuple(size // (cut if d == axis else 1) for d, size in enumerate(whole))
        count, made = math.prod(shape), []
        for number in range(shards):
            at = tuple(
                (number * layout.tensor + tensor) * shape[d] if d == axis else 0 for d in range(len(shape))
            )
            strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
            made.append(
                ParameterShard(
                    f"decoder.layers.{name}",
                    (model.layers, *whole),
                    (layer, *at),
                    (1, *shape),
                    number * count,
                    (0, *strides),
                    axis >= 0 or tensor == 0,
                )
            )
        end = begin + shards * count
        yield Parameter(f"{name}.{layer}", begin, end, tuple(made))
        begin = end


def _in_buckets(layout: Layout, described: Any, place: int, data: int) -> tuple[dict[str, Any], list[Target]]:
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
    )

    from megatron_datastates.format.values import OPTIMIZER_MAP_NAME
    from megatron_datastates.mcore.load import optimizer_request as asked
    from megatron_datastates.mcore.save.buckets import CARRIER

    prefix = f"optimizer.distributed.dp_group_idx_{place}."
    targets, buckets = [], []
    for bucket in described.buckets:
        share = -(-bucket.elements // (64 * layout.data)) * 64  # the last rank's is padded
        entries = []
        for parameter in bucket.parameters:
            low, high = max(parameter.begin, data * share), min(parameter.end, (data + 1) * share)
            if low >= high:
                continue
            entry: dict[str, Any] = {"padding": LocalNonpersistentObject(False)}
            for state in STATES:
                memory, key = torch.empty(high - low), f"{prefix}{bucket.name}.{state}"
                shape = (bucket.elements,)
                entry[state] = ShardedTensor(key, memory, memory.dtype, memory.shape, shape, (low,), None)
                targets.append(
                    Target(state, parameter, low - parameter.begin, high - parameter.begin, memory)
                )
            entries.append(entry)
        buckets.append(entries)
    groups = {"param_groups": [{"wd_mult": 1.0}]}
    values = {CARRIER: [], "optimizer": groups, OPTIMIZER_MAP_NAME: described.encode()}
    replica = (0, 0, data)
    objects = {
        name: ShardedObject(prefix + name, value, (1,), (0,), replica_id=replica)
        for name, value in values.items()
    }
    setattr(objects[CARRIER], asked._ATTRIBUTE, asked.OwnBuckets(lambda: described))
    optimizer = {
        "optimizer": objects["optimizer"],
        "param_state": {CARRIER: objects[CARRIER], 0: {"d": buckets}},
        "param_state_sharding_type": "dp_reshardable",
    }
    return {"optimizer": optimizer, "map": objects[OPTIMIZER_MAP_NAME], "iteration": 1}, targets


def _by_parameter(described: Any, data: int) -> tuple[dict[str, Any], list[Target]]:
    """Returns the whole parameters of a model shard, as stock asks for them on every data-parallel rank."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    tensors, targets = [], []
    for state, parameter in itertools.product(
        STATES, (parameter for bucket in described.buckets for parameter in bucket.parameters)
    ):
        memory = torch.empty(parameter.end - parameter.begin)
        targets.append(Target(state, parameter, 0, len(memory), memory))
        for shard in parameter.shards:
            part = memory[shard.start : shard.start + math.prod(shard.shape)].view(shard.shape)
            fragments = tuple(n // m for n, m in zip(shard.global_shape, shard.shape, strict=True))
            replica = (0, 0 if shard.main else 1, data)
            key = f"optimizer.state.{state}.{shard.key}"
            place = shard.global_shape, shard.offset, fragments
            tensors.append(ShardedTensor(key, part, part.dtype, part.shape, *place, replica))
    return {"optimizer": dict(enumerate(tensors)), "iteration": 1}, targets
