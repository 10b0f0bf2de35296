"""The states that benchmarks.load saves and loads: ShardedTensors with the shapes of a Llama-like model.

Every element is a function of its key and its position in the global tensor, so that any rank can check what
it has loaded, whatever the sharding.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

SMALL_WEIGHTS = 7  # tensors of a layer of a model of small tensors
_BUCKET_STATES = 3
_STATES = {"": torch.bfloat16, "optimizer.state.exp_avg.": torch.float32}  # by prefix of their keys
State = dict[str, Any]  # ShardedTensors


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a state is cut, which decides what it is: `data` cuts buckets of an optimizer, the others a model.

    `small`: the model's tensors are small, and each layer's have their own keys. `copies`: so many ranks have
    the same part of the model, as with data parallelism.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 0
    small: bool = False
    copies: int = 1

    @property
    def ranks(self) -> int:
        return self.data or self.tensor * self.pipeline * self.copies


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of the model that every rank holds a part of."""

    layers: int
    hidden: int = 2048
    ffn: int = 5632
    vocabulary: int = 32000
    small_layers: int = 400  # of the model of small tensors

    @property
    def bytes(self) -> int:
        """The size of all layers: weights in bfloat16, one optimizer state in float32."""
        return self.layers * 6 * (4 * self.hidden + 3 * self.ffn) * self.hidden

    @staticmethod
    def of_bytes(size: int) -> Model:
        """Returns a model of about that size, with layers for an even number of pipeline stages."""
        return Model(layers=max(2, 2 * round(size / Model(layers=1).bytes / 2)))


def make_state(sharding: Sharding, model: Model, rank: int) -> State:
    """Returns a rank's ShardedTensors, their memory not yet filled."""
    if sharding.data:
        return dict(_buckets(sharding, model, rank))
    if sharding.small:
        return dict(_small_model(sharding, model, rank))
    copy, part = divmod(rank, sharding.tensor * sharding.pipeline)
    return dict(_model(sharding, model, part % sharding.tensor, part // sharding.tensor, copy))


def fill(tensor: Any) -> None:
    """Gives every element of a shard its value."""
    for line, expected in _rows(tensor):
        line.copy_(torch.from_numpy(expected))


def check(tensor: Any) -> None:
    """Raises ValueError if an element of a shard has another value than `fill` wrote."""
    for line, expected in _rows(tensor):
        if not np.array_equal(line.numpy(), expected):
            raise ValueError(f"{tensor.key} at {tensor.global_offset} was not loaded as it was saved")


def _model(sharding: Sharding, model: Model, tensor: int, stage: int, copy: int) -> Iterator[tuple[str, Any]]:
    layers, each = model.layers, model.layers // sharding.pipeline
    mine = range(each * stage, each * (stage + 1))
    parts: tuple[tuple[str, tuple[int, int], int, int], ...] = (
        # key, shape, axis that tensor parallelism cuts, shards of one rank (SwiGLU: gate and up)
        ("self_attention.linear_qkv.weight", (3 * model.hidden, model.hidden), 0, 1),
        ("self_attention.linear_proj.weight", (model.hidden, model.hidden), 1, 1),
        ("mlp.linear_fc1.weight", (2 * model.ffn, model.hidden), 0, 2),
        ("mlp.linear_fc2.weight", (model.hidden, model.ffn), 1, 1),
    )
    for prefix, dtype in _STATES.items():
        for layer, (key, shape, axis, shards) in itertools.product(mine, parts):
            name = f"{prefix}decoder.layers.{key}"
            for shard in range(shards):
                part = (1 + axis, shard * sharding.tensor + tensor, shards * sharding.tensor)
                local = [size // (part[2] if d == axis else 1) for d, size in enumerate(shape)]
                cuts = (0, layer, layers), part
                yield f"{name}.{layer}.{shard}", _sharded(name, local, dtype, *cuts, replica_id=(0, 0, copy))
        norm = f"{prefix}decoder.layers.input_layernorm.weight"
        for layer in mine:
            axis_of_layers = (0, layer, layers)
            replica = (0, tensor, copy)
            yield (
                f"{norm}.{layer}",
                _sharded(norm, [model.hidden], dtype, axis_of_layers, replica_id=replica),
            )
        if stage == 0:
            local = [model.vocabulary // sharding.tensor, model.hidden]
            name = f"{prefix}embedding.word_embeddings.weight"
            cut = (0, tensor, sharding.tensor)
            yield name, _sharded(name, local, dtype, cut, prepended=0, replica_id=(0, 0, copy))


def _small_model(sharding: Sharding, model: Model, rank: int) -> Iterator[tuple[str, Any]]:
    for (prefix, dtype), layer, part in itertools.product(
        _STATES.items(), range(model.small_layers), range(SMALL_WEIGHTS)
    ):
        name, cut = f"{prefix}decoder.layers.{layer}.weight{part}", (0, rank, sharding.tensor)
        yield name, _sharded(name, [64 // sharding.tensor, 64], dtype, cut, prepended=0)


def _sharded(
    key: str,
    local: Sequence[int],
    dtype: torch.dtype,
    *cuts: tuple[int, int, int],
    prepended: int = 1,
    replica_id: Any = 0,
) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor

    memory = torch.empty(tuple(local), dtype=dtype)
    return ShardedTensor.from_rank_offsets(
        key, memory, *cuts, replica_id=replica_id, prepend_axis_num=prepended
    )


def _buckets(sharding: Sharding, model: Model, rank: int) -> Iterator[tuple[str, Any]]:
    """Yields a rank's parts of one bucket a layer, cut where parameters end, as with `dp_reshardable`."""
    from megatron.core.dist_checkpointing import ShardedTensor

    hidden, ffn = model.hidden, model.ffn
    sizes = [3 * hidden * hidden, hidden * hidden, 2 * ffn * hidden, ffn * hidden, hidden]
    ends = list(itertools.accumulate(sizes))
    share = -(-ends[-1] // (64 * sharding.data)) * 64  # the last rank's is padded
    begin, end = min(rank * share, ends[-1]), min((rank + 1) * share, ends[-1])
    cuts = [begin, *(cut for cut in ends if begin < cut < end), end]
    for bucket, kind in itertools.product(range(model.layers), range(_BUCKET_STATES)):
        key = f"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_{bucket}.state_{kind}"
        for a, b in itertools.pairwise(cuts):
            data, shape = torch.empty(b - a), (ends[-1],)
            shard = ShardedTensor(key, data, torch.float32, (b - a,), shape, (a,), None, replica_id=0)
            yield f"{key}.{a}", shard


def pattern(
    key: str, whole: Sequence[int], offset: Sequence[int], shape: Sequence[int], kind: Any = np.int32
) -> np.ndarray:
    """Returns the values of a box of a global tensor, as integers of its elements' size."""
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    at = np.full(tuple(shape), zlib.crc32(key.encode()), np.int64)
    for axis, (start, size) in enumerate(zip(offset, shape, strict=True)):
        line = (np.arange(start, start + size, dtype=np.int64) * strides[axis]) * 2654435761
        at += line.reshape([-1 if d == axis else 1 for d in range(len(shape))])
    return at.astype(kind)


def _rows(tensor: Any) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    """Yields each row of a shard, as integers of its element's size, with the values that it should have."""
    kind = {2: np.int16, 4: np.int32}[tensor.data.element_size()]
    lines = tensor.data.view(getattr(torch, np.dtype(kind).name)).reshape(-1, tensor.local_shape[-1])
    salt = zlib.crc32(tensor.key.encode())
    offsets, shape = tensor.global_offset, tensor.global_shape
    local = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)  # Megatron reshapes `data`
    across = np.arange(local[-1], dtype=np.int64) + offsets[-1]
    for line, place in zip(lines, np.ndindex(*local[:-1]), strict=True):
        first = 0
        for at, offset, size in zip(place, offsets, shape, strict=False):
            first = first * size + at + offset
        yield line, ((first * shape[-1] + across) * 2654435761 + salt).astype(kind)
