"""Where the shards of Megatron-FSDP's DTensors lie, for all tensors of a state dict at once.

Shards are uneven, so each rank has to learn the sizes of those before its own. In every save and load,
Megatron gathers them with a collective call for each tensor, of which a model has thousands. Here the ranks
of a process group exchange all their sizes in one call, and only if a rank's shards are not as in the last
save or load: whether they are, the world finds out in one call, too. A rank that has no state of some
parameters, because it holds no element of them, counts as one with empty shards; in Megatron's way, all ranks
would wait forever. It takes part in a group's call because it has another tensor that the group shares, as
each rank of Megatron's has its model's; if it has none, all ranks raise an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_datastates.errors import some_of
from megatron_datastates.mcore.hooks.attach import replaced
from megatron_datastates.pipeline.publishing.collectives import gather_objects, max_now, ranks_of

_ALL = "preprocess_state_dict_for_uneven_dtensor"  # of a state dict; imported by Megatron's checkpointing
_ONE = "gather_and_compute_chunk_metadata"  # of a tensor; in the module of the other
_Path = tuple[str, ...]
_RECORD = np.dtype([("key", "<u8"), ("size", "<i8")])
# Of the last call: what this rank's shards were, and where they lay. None unless the call ended well.
_last: tuple[list[Any], list[ChunkStorageMetadata]] | None = None


class _Shard:
    """The shard that this rank has of a tensor.

    Attributes:
        steps: the groups whose ranks share the tensor, in Megatron-FSDP's order, each with the dimension cut.
        shape: of what the ranks of the steps so far have together.
    """

    def __init__(self, path: _Path, dtensor: DTensor) -> None:
        self.path, self.dtensor = path, dtensor
        self.steps = list(_steps_of(dtensor))
        self.own_shape = dtensor._local_tensor.shape
        self.shape, self.offsets = list(self.own_shape), [0] * len(self.own_shape)

    def facts(self) -> Any:
        """Returns all that this rank contributes to where shards lie. Groups made anew are other ones."""
        return self.path, self.own_shape, self.steps

    def key(self) -> int:
        """Returns what stands for the path in records.

        Of 100,000 tensors, two have the same with a probability of 3e-10; DCP then refuses to plan a save.
        """
        digest = hashlib.blake2b("\0".join(self.path).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little")


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
        RuntimeError: another rank has raised such an error, or any other; or, on all ranks, a rank has no
            tensor at all that others of its group share.
    """
    global _last
    (last, _last), failure = (_last, None), None
    shards: list[_Shard] = []
    try:
        found = sorted(_dtensors(state_dict), key=lambda one: one[0])
        shards = [_Shard(path, dtensor) for path, dtensor in found]
    except Exception as error:  # raised below: the other ranks are in the call, or will be
        failure = error
    facts = [shard.facts() for shard in shards]
    is_new = last is None or last[0] != facts
    failed, is_new_somewhere = max_now([-1 if failure is None else dist.get_rank(), is_new])
    if failure is not None:
        raise failure
    if failed >= 0:
        raise RuntimeError(
            f"rank {failed} could not say which shards of Megatron-FSDP's tensors it has: see the error there"
        )
    if last is None or is_new_somewhere:
        _check_groups(shards)
        last = facts, _gathered(shards)
    _last = last
    return {id(shard.dtensor): chunk for shard, chunk in zip(shards, last[1], strict=True)}


def _check_groups(shards: Sequence[_Shard]) -> None:
    """Raises RuntimeError as `chunks_of` where `_gathered` would wait for a rank forever. Collective."""
    groups = {(step, group) for shard in shards for step, (group, _) in enumerate(shard.steps)}
    # Groups of different ranks may have one name; the hash of numbers is the same in all processes.
    everyone: list[dict[Any, int]] = gather_objects(
        {(step, group.group_name, hash(tuple(ranks_of(group)))): group.size() for step, group in groups}
    )
    calls = Counter(call for own in everyone for call in own.items())
    for (call, size), count in calls.items():
        if count < size:
            ranks = [f"rank {rank}" for rank, own in enumerate(everyone) if call in own]
            raise RuntimeError(
                f"of the {size} ranks that share tensors of Megatron-FSDP's, only {count} have any of them "
                f"({some_of(ranks, 3)}): expected at least an empty shard of one tensor on each rank"
            )


def _gathered(shards: Sequence[_Shard]) -> list[ChunkStorageMetadata]:
    """Returns where shards lie. Collective."""
    for step in range(max((len(shard.steps) for shard in shards), default=0)):
        members: dict[dist.ProcessGroup, list[_Shard]] = defaultdict(list)
        for shard in shards:
            if step < len(shard.steps):
                members[shard.steps[step][0]].append(shard)
        # Each rank has this order, whatever tensors it lacks: those of two groups do not wait for each other.
        for group in sorted(members, key=lambda group: group.group_name):
            _take_step(step, group, members[group])
    return [ChunkStorageMetadata(torch.Size(shard.offsets), shard.own_shape) for shard in shards]


def _take_step(step: int, group: dist.ProcessGroup, shards: Sequence[_Shard]) -> None:
    """Adds to each offset what the ranks before this one have, and to each shape what all have."""
    keyed = sorted(((shard.key(), shard) for shard in shards), key=lambda one: one[0])
    own = np.array([(key, shard.shape[shard.steps[step][1]]) for key, shard in keyed], _RECORD)
    everyone = gather_objects(own[own["size"] != 0].tobytes(), group)
    before = sums_of(own["key"], everyone[: dist.get_rank(group)])
    total = sums_of(own["key"], everyone)
    for (_, shard), offset, size in zip(keyed, before.tolist(), total.tolist(), strict=True):
        dimension = shard.steps[step][1]
        shard.offsets[dimension] += offset
        shard.shape[dimension] = size


def sums_of(keys: npt.NDArray[np.uint64], records: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Returns the sum of the sizes that ranks' records have for each of some sorted keys."""
    found = np.frombuffer(b"".join(records), _RECORD)
    at = np.minimum(np.searchsorted(keys, found["key"]), len(keys) - 1)
    is_known = keys[at] == found["key"]  # others may have tensors that this rank lacks
    sums = np.zeros(len(keys), np.int64)
    np.add.at(sums, at[is_known], found["size"][is_known])
    return sums


def _dtensors(state: Mapping[str, Any], path: _Path = ()) -> Iterator[tuple[_Path, DTensor]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _dtensors(value, (*path, key))
        elif isinstance(value, DTensor):
            yield (*path, key), value


def _steps_of(dtensor: DTensor) -> Iterator[tuple[dist.ProcessGroup, int]]:
    """Yields the groups of ranks that share a tensor, and dimensions. Raises ValueError as `chunks_of`."""
    dimensions = range(dtensor._local_tensor.dim())
    for dim in _order_of(dtensor):
        placement = dtensor.placements[dim]
        if isinstance(placement, Shard | _StridedShard) and placement.dim in dimensions:
            yield dtensor.device_mesh.get_group(dim), placement.dim
        elif not isinstance(placement, Replicate):
            raise ValueError(
                f"a tensor of Megatron-FSDP's, of {len(dimensions)} dimensions, is placed by {placement}: "
                "expected Shard, of one of them, or Replicate"
            )


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
