"""Where the shards of Megatron-FSDP's DTensors lie, for all tensors of a state dict at once.

Shards are uneven, so each rank has to learn the sizes of those before its own. In every save and load,
Megatron gathers them with a collective call for each tensor, of which a model has thousands. Here the ranks
of a process group exchange all their sizes in one call. A rank that has no state of some parameters, because
it holds no element of them, counts as one with empty shards; in Megatron's way, all ranks would wait forever.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_datastates.mcore.hooks.attach import replaced
from megatron_datastates.pipeline.publishing.collectives import gather_objects

_ALL = "preprocess_state_dict_for_uneven_dtensor"  # of a state dict; imported by Megatron's checkpointing
_ONE = "gather_and_compute_chunk_metadata"  # of a tensor; in the module of the other
_Path = tuple[str, ...]
_RECORD = np.dtype([("key", "V16"), ("size", "<i8")])


class _Shard:
    """The shard that this rank has of a tensor.

    Attributes:
        key: stands for the tensor's place in the state dict.
        steps: the dimensions of the device mesh over which it is sharded.
        shape: of what the ranks of the steps so far have together.
    """

    def __init__(self, path: _Path, dtensor: DTensor) -> None:
        self.key = hashlib.blake2b("\0".join(path).encode(), digest_size=16).digest()
        self.dtensor = dtensor
        self.steps = [dim for dim in _order_of(dtensor) if _is_sharded(dtensor, dim)]
        self.own_shape = dtensor._local_tensor.shape
        self.shape, self.offsets = list(self.own_shape), [0] * len(self.own_shape)

    def dimension(self, step: int) -> int:
        """Returns the dimension of the tensor that a step has sharded."""
        return int(self.dtensor.placements[self.steps[step]].dim)  # type: ignore[attr-defined]

    def group(self, step: int) -> dist.ProcessGroup:
        return self.dtensor.device_mesh.get_group(self.steps[step])


@contextlib.contextmanager
def gathered_at_once() -> Iterator[None]:
    """Lets Megatron find out at once where shards lie, in the saves and loads within."""
    from megatron.training import checkpointing

    original: Callable[[Any], Any] | None = getattr(checkpointing, _ALL, None)
    home = sys.modules.get(getattr(original, "__module__", ""))
    if original is None or not hasattr(home, _ONE):  # Megatron-FSDP is not installed, or another release
        yield
        return

    def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> Any:
        chunks = chunks_of(state_dict)
        with replaced(home, _ONE, lambda dtensor: chunks[id(dtensor)]):
            return original(state_dict)

    with replaced(checkpointing, _ALL, preprocess_state_dict_for_uneven_dtensor):
        yield


def chunks_of(state_dict: Mapping[str, Any]) -> dict[int, ChunkStorageMetadata]:
    """Returns this rank's chunk of each DTensor in a nested state dict, by the tensor's id. Collective.

    Raises:
        ValueError: a tensor is placed in a way that Megatron-FSDP does not use.
    """
    shards = [_Shard(path, found) for path, found in sorted(_dtensors(state_dict), key=lambda one: one[0])]
    for step in range(max((len(shard.steps) for shard in shards), default=0)):
        members: dict[dist.ProcessGroup, list[_Shard]] = defaultdict(list)
        for shard in shards:
            if step < len(shard.steps):
                members[shard.group(step)].append(shard)
        # Each rank has this order, whatever tensors it lacks: those of two groups do not wait for each other.
        for group in sorted(members, key=lambda group: group.group_name):
            _take_step(step, group, members[group])
    return {id(one.dtensor): ChunkStorageMetadata(torch.Size(one.offsets), one.own_shape) for one in shards}


def _take_step(step: int, group: dist.ProcessGroup, shards: list[_Shard]) -> None:
    """Adds to each offset what the ranks before this one have, and to each shape what all have."""
    own = np.zeros(len(shards), _RECORD)
    own["key"] = [np.void(shard.key) for shard in shards]
    own["size"] = [shard.shape[shard.dimension(step)] for shard in shards]
    everyone = gather_objects(own.tobytes(), group)
    rank = dist.get_rank(group)
    before: dict[bytes, int] = defaultdict(int)
    total: dict[bytes, int] = defaultdict(int)
    for number, records in enumerate(everyone):
        found = np.frombuffer(records, _RECORD)
        for key, size in zip(found["key"].tolist(), found["size"].tolist(), strict=True):
            total[key] += size
            if number < rank:
                before[key] += size
    for shard in shards:
        dimension = shard.dimension(step)
        shard.offsets[dimension] += before[shard.key]
        shard.shape[dimension] = total[shard.key]


def _dtensors(state: Mapping[str, Any], path: _Path = ()) -> Iterator[tuple[_Path, DTensor]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _dtensors(value, (*path, key))
        elif isinstance(value, DTensor):
            yield (*path, key), value


def _is_sharded(dtensor: DTensor, dim: int) -> bool:
    """Returns whether a dimension of the mesh shards a tensor. Raises ValueError as `chunks_of`."""
    placement = dtensor.placements[dim]
    if not isinstance(placement, Shard | _StridedShard | Replicate):
        raise ValueError(f"a tensor of Megatron-FSDP's is placed by {placement}: expected Shard or Replicate")
    return not isinstance(placement, Replicate)


def _order_of(dtensor: DTensor) -> list[int]:
    """Returns the dimensions of the mesh in the order in which Megatron-FSDP adds shards up."""
    order = getattr(dtensor.device_mesh, "_shard_order", None)
    if order is not None:
        return list(reversed(order))
    dims = range(len(dtensor.placements))
    strided = [dim for dim in dims if isinstance(dtensor.placements[dim], _StridedShard)]
    if len(strided) > 1:
        raise ValueError(
            f"a tensor of Megatron-FSDP's has {len(strided)} strided shards: expected at most one"
        )
    return [*strided, *(dim for dim in dims if dim not in strided)]
