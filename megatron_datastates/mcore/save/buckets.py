"""Buckets of Megatron's distributed optimizer: zeroes their padding and makes the optimizer map.

The map (format/optimizer_map.py) is made here because both the optimizer and the model's sharded state are
known. It is read in pipeline/loading/optimizer.py. A state dict made for a load gets the same description of
the run's own buckets (mcore/load/optimizer_request.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

from megatron_datastates.format.optimizer_map import (
    MAP_FORMAT_VERSION,
    Bucket,
    OptimizerMap,
    Parameter,
    ParameterShard,
    cover,
)
from megatron_datastates.format.values import OPTIMIZER_MAP_NAME
from megatron_datastates.plan.boxes import contiguous_strides
from megatron_datastates.providers.named import dictionaries

logger = logging.getLogger(__name__)
CARRIER = "per_bucket_numel"  # an object that every data-parallel group stores once, like the map
_ATTRIBUTE = "_datastates_map"
_SHARDED = (ShardedTensor, ShardedTensorFactory)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
Named = tuple[str, Any]  # a name in a model's sharded state, and its ShardedTensor or factory
# By optimizer: the fingerprint of what the map was made from, and the map. Both rarely change.
_made: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def attach_map(optimizer: Any, state: dict[Any, Any], model_state: Any, metadata: Any) -> None:
    """Attaches the optimizer map to the CARRIER of a bucket state that was made for a save.

    Megatron stores that object anyway, and only our saves look for the map: those in other formats do not
    change.
    """
    carrier = state.get(CARRIER)
    if isinstance(carrier, ShardedObject) and is_main_replica(carrier.replica_id):
        try:
            setattr(carrier, _ATTRIBUTE, _map_of(optimizer, state, model_state, metadata))
        except Exception as error:  # the state itself is complete: no reason to end the training
            logger.warning("the checkpoint will have no optimizer map: %r", error)


def zero_padding(state: Any) -> list[torch.Tensor]:
    """Zeroes padding, which Megatron leaves uninitialized: equal states then have equal checkpoints.

    Padding is a dictionary of tensors with a true 'padding' entry. Returns these tensors.
    """
    found = []
    for entry in dictionaries(state):
        if getattr(entry.get("padding"), "obj", False) is True:
            for item in entry.values():
                if isinstance(item, ShardedTensor) and item.data is not None:
                    found.append(item.data.zero_())
    return found


def carried_map(item: ShardedObject) -> tuple[str, str] | None:
    """Returns (key, text) of the optimizer map attached to an object of a sharded state; None without one."""
    text = getattr(item, _ATTRIBUTE, None)
    if text is None:
        return None
    prefix = item.key.removesuffix(CARRIER)
    return dataclasses.replace(item, key=prefix + OPTIMIZER_MAP_NAME).unique_key, text


class ModelShards:
    """What a model's sharded state has of each parameter.

    Usually one ShardedTensor or factory, whose data is the parameter. Megatron's fused down projection of
    multi-latent attention stores two tensors instead, which are views of one parameter.
    """

    def __init__(self, model_state: Any) -> None:
        self.named: dict[int, Named] = {id(item.data): (name, item) for name, item in _named(model_state, "")}

    def name_and_shards(self, param: torch.Tensor) -> tuple[str, tuple[ParameterShard, ...]]:
        """Returns a name of the parameter, and the shards that the model stores of it; none if unknown."""
        if id(param) in self.named:
            name, item = self.named[id(param)]
            return name, _shards(item)
        return self._views_of(param)

    def _views_of(self, param: torch.Tensor) -> tuple[str, tuple[ParameterShard, ...]]:
        if not _is_plain(param):
            return "", ()
        begins, views = self._by_place.get(_memory_of(param), ([], []))
        begin = int(param.storage_offset())
        first = bisect.bisect_left(begins, begin)
        end = bisect.bisect_left(begins, begin + param.numel())
        shards = [
            _shard(item, at - begin, item.data.stride())
            for at, (_, item) in zip(begins[first:end], views[first:end], strict=True)
        ]
        return (views[first][0], tuple(shards)) if shards and cover(shards, param.numel()) else ("", ())

    @functools.cached_property
    def _by_place(self) -> dict[Any, tuple[list[int], list[Named]]]:
        """Sharded tensors by memory, in its order, each with where it begins there, in elements."""
        found: dict[Any, list[tuple[int, Named]]] = {}
        for name, item in self.named.values():
            if isinstance(item, ShardedTensor) and _is_plain(item.data) and item.data.numel():
                begin = int(item.data.storage_offset())
                found.setdefault(_memory_of(item.data), []).append((begin, (name, item)))
        for placed in found.values():
            placed.sort(key=lambda one: one[0])
        return {kind: tuple(map(list, zip(*placed, strict=True))) for kind, placed in found.items()}  # type: ignore[misc]


def _memory_of(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    # Not an address: storages that were released, as while a model is offloaded, all have the same.
    return tensor.untyped_storage()._cdata, tensor.dtype


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta


def _map_of(optimizer: Any, state: dict[Any, Any], model_state: Any, metadata: Any) -> str:
    shards = ModelShards(model_state)
    source = _fingerprint(optimizer, state, shards, metadata)
    made = _made.get(optimizer)
    if made is None or made[0] != source:
        described = describe_buckets(optimizer, state, shards)
        for parameter in (one for bucket in described.buckets for one in bucket.parameters):
            if not parameter.shards:
                logger.warning(
                    "the optimizer map lacks the parameter %r: its place in the model is unknown",
                    parameter.name,
                )
        made = _made[optimizer] = source, described.encode()
    return made[1]


def _fingerprint(optimizer: Any, state: dict[Any, Any], shards: ModelShards, metadata: Any) -> Any:
    """Returns all that a map depends on. On the trainer's path in every save that is not prepared."""
    own = {id(param): param for buffer in optimizer.buffers for param in buffer.param_index_map}
    model = [
        (number, item.key, getattr(item, "global_offset", None), getattr(item, "global_shape", None))
        for number, (_, item) in shards.named.items()
        if number in own  # other items may be new objects in every save
    ]
    others = [(number, shards.name_and_shards(own[number])) for number in own.keys() - shards.named.keys()]
    places = [id(buffer.param_index_map) for buffer in optimizer.buffers]  # made with the buffer
    states = [list(entries[0]) for _, _, entries in _buckets(optimizer, state)]
    # Part of the metadata decides which shards factories build.
    plain = {key: value for key, value in (metadata or {}).items() if isinstance(value, str | int)}
    return model, others, places, states, plain


def _named(nested: Any, path: str) -> Iterator[Named]:
    """Yields sharded tensors and factories of them, each with its name."""
    if isinstance(nested, _SHARDED):
        yield path, nested
    elif isinstance(nested, dict | list):
        items = nested.items() if isinstance(nested, dict) else enumerate(nested)
        for key, item in items:
            yield from _named(item, f"{path}.{key}" if path else str(key))


def _buckets(optimizer: Any, state: dict[Any, Any]) -> Iterator[tuple[Any, int, list[dict[str, Any]]]]:
    """Yields (buffer, number of the bucket in it, the parts of the bucket that this rank stores)."""
    for gbuf_idx, buffer in enumerate(optimizer.buffers):
        for by_bucket in state[gbuf_idx].values():
            for number, entries in enumerate(by_bucket):
                yield buffer, number, entries


def describe_buckets(optimizer: Any, state: dict[Any, Any], shards: ModelShards) -> OptimizerMap:
    """Returns the map of an optimizer's buckets.

    Args:
        state: what `sharded_param_state_dp_reshardable` returns.
    """
    prefix = state[CARRIER].key.removesuffix(CARRIER)
    buckets = [
        _bucket(buffer, number, entries, prefix, shards)
        for buffer, number, entries in _buckets(optimizer, state)
    ]
    return OptimizerMap(MAP_FORMAT_VERSION, tuple(buckets))


def _bucket(
    buffer: Any, number: int, entries: list[dict[str, Any]], prefix: str, shards: ModelShards
) -> Bucket:
    tensors = {name: item for name, item in entries[0].items() if isinstance(item, ShardedTensor)}
    name, stored = next(iter(tensors.items()))
    first = buffer.buckets[number].offset
    parameters = [
        _parameter(param, begin - first, end - first, shards)
        for param, (begin, end, bucket) in buffer.param_index_map.items()
        if bucket == number
    ]
    return Bucket(
        stored.key.removeprefix(prefix).removesuffix("." + name),
        int(stored.global_shape[0]),
        tuple(tensors),
        tuple(parameters),
    )


def _parameter(param: Any, begin: int, end: int, shards: ModelShards) -> Parameter:
    name, found = shards.name_and_shards(param)
    return Parameter(name, begin, end, found)


def _shards(item: Any) -> tuple[ParameterShard, ...]:
    """Returns the shards that the model stores of a parameter; none if any is not a view of the parameter."""
    if isinstance(item, ShardedTensor):
        return (_shard(item, 0, contiguous_strides(item.local_shape)),)
    # A factory's views of a tensor on the meta device show which elements of the parameter each shard takes.
    probe = torch.empty(item.data.shape, dtype=item.data.dtype, device="meta")
    built = [
        shard
        for shard in nested_values(dataclasses.replace(item, data=probe).build())
        if isinstance(shard, ShardedTensor)
    ]
    if any(shard.data.untyped_storage()._cdata != probe.untyped_storage()._cdata for shard in built):
        return ()
    return tuple(_shard(shard, shard.data.storage_offset(), shard.data.stride()) for shard in built)


def _shard(item: ShardedTensor, start: int, strides: tuple[int, ...]) -> ParameterShard:
    prepended = item.prepend_axis_num
    return ParameterShard(
        item.key,
        tuple(map(int, item.global_shape)),
        tuple(map(int, item.global_offset)),
        (1,) * prepended + tuple(item.local_shape),
        start,
        (0,) * prepended + tuple(strides),
        is_main_replica(item.replica_id),
    )
