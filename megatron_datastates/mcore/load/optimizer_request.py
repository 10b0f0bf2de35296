"""What a run's distributed optimizer asks for in buckets, restated by parameter.

A sharded state dict of bucket tensors does not say which parameters they belong to, and a load does not know
the optimizer. So the state dict, when it is made for a load, gets a description of the run's own buckets: the
same map that a save stores. From it `own_shards` makes ShardedTensors of the parameters, whose memory is the
optimizer's own.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor

from megatron_datastates.errors import MismatchError
from megatron_datastates.format.directory import SHARDING_KEY
from megatron_datastates.format.optimizer_map import Bucket, OptimizerMap, Parameter
from megatron_datastates.mcore.hooks.calls import parameters_of
from megatron_datastates.mcore.save.buckets import CARRIER, ModelShards, describe_buckets
from megatron_datastates.plan.strided import boxes_in_range
from megatron_datastates.providers.named import dictionaries

logger = logging.getLogger(__name__)
BY_OWN_BUCKETS = "datastates_own_buckets"  # in the metadata of a sharded state dict
_ATTRIBUTE = "_datastates_own_buckets"
State = dict[Any, Any]  # what sharded_param_state_dp_reshardable returns


class OwnBuckets:
    """The buckets of the run's optimizer, described when a load first asks.

    Until then, Megatron may give the model's tensors other keys: those of a GPT's checkpoint, for a hybrid
    model.

    Args:
        describe: makes the map.
        named: the model's tensors.
    """

    def __init__(self, describe: Callable[[], OptimizerMap], named: Iterable[Any] = ()) -> None:
        self._describe, self._named = describe, named

    @functools.cached_property
    def map(self) -> OptimizerMap:
        return self._describe()

    @functools.cached_property
    def flexible(self) -> frozenset[str]:
        """Keys of the model's tensors that may have another stored shape."""
        return frozenset(item.key for item in self._named if getattr(item, "allow_shape_mismatch", False))


def wrap_sharded_state_dict(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `DistributedOptimizer.sharded_state_dict`: describes the run's own buckets in a load.

    Metadata with BY_OWN_BUCKETS asks for buckets, whatever sharding type it names.
    """
    parameters = parameters_of(original)
    call = parameters.of_call(args, kwargs)
    if not call.get("is_loading"):
        return original(*args, **kwargs)
    metadata = call.get("metadata") or {}
    if metadata.get(BY_OWN_BUCKETS):
        metadata = {**metadata, SHARDING_KEY: "dp_reshardable"}
        args, kwargs = parameters.replaced(args, kwargs, "metadata", metadata)
    state = original(*args, **kwargs)
    if isinstance(state, dict) and isinstance(state.get("param_state"), dict):
        _attach_own_buckets(call["self"], state["param_state"], call["model_sharded_state_dict"])
    return state


def wrap_load_parameter_state(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `DistributedOptimizer.load_parameter_state_from_dp_reshardable`, in any format.

    Without mixed precision, main parameters are views of the model's, which torch lets nobody write to while
    gradients are recorded. Megatron forgets that here, unlike in its loads of other sharding types.
    """
    with torch.no_grad():
        return original(*args, **kwargs)


def _attach_own_buckets(optimizer: Any, state: State, model_state: Any) -> None:
    """Attaches the description to the CARRIER of a bucket state that was made for a load."""
    carrier = state.get(CARRIER)
    if isinstance(carrier, ShardedObject):
        shards = ModelShards(model_state)
        # The carrier must not refer to itself: all that its state dict holds would stay until a collection.
        state = {**state, CARRIER: weakref.proxy(carrier)}
        describe = functools.partial(describe_buckets, optimizer, state, shards)
        setattr(carrier, _ATTRIBUTE, OwnBuckets(describe, [item for _, item in shards.named.values()]))


def own_buckets(state: Any) -> OwnBuckets | None:
    """Returns the description attached to a bucket state; None for anything else. Never raises."""
    carrier = state.get(CARRIER) if isinstance(state, dict) else None
    found = getattr(carrier, _ATTRIBUTE, None)
    if not isinstance(found, OwnBuckets):
        return None
    try:
        return found if found.map else None
    except Exception as error:  # the layout may be the stored one, and then nobody needs it
        logger.warning("this optimizer loads from its own parallel layout only: %r", error)
        delattr(carrier, _ATTRIBUTE)
        return None


def bucket_tensors(state: State) -> Iterator[tuple[State, str, Any]]:
    """Yields (entry, name of the state, ShardedTensor) of a bucket state, padding left out."""
    for entry in _entries(state):
        if not _is_padding(entry):
            for name, item in entry.items():
                if isinstance(item, ShardedTensor):
                    yield entry, name, item


def is_offloaded(state: State) -> bool:
    """Returns whether parts of a bucket state have a step of their own, as with CPU offload, or no tensor.

    Megatron's own load of such a state fails if the number of parts is another one on the rank that stored
    it, because it merges lists, and it restores no step.
    """
    return any(
        "step" in entry or not any(isinstance(item, ShardedTensor) for item in entry.values())
        for entry in _entries(state)
    )


def _entries(nested: Any) -> Iterator[State]:
    return (entry for entry in dictionaries(nested) if "padding" in entry)


def _is_padding(item: Any) -> bool:
    padding = item.get("padding") if isinstance(item, dict) else None
    return getattr(padding, "obj", padding) is True


def bucket_of(own: OwnBuckets, state: State, item: Any) -> Bucket:
    """Returns the description of the bucket that a ShardedTensor of the state is a part of."""
    prefix = state[CARRIER].key.removesuffix(CARRIER)
    name = item.key.removeprefix(prefix)
    for bucket in own.map.buckets:
        if name.startswith(f"{bucket.name}."):
            return bucket
    raise MismatchError(f"the optimizer asks for {item.key!r}, which is in none of its own buckets")


def own_shards(
    own: OwnBuckets, bucket: Bucket, item: Any, name: Callable[[str], str]
) -> Iterator[ShardedTensor]:
    """Yields ShardedTensors of parameters that together fill the memory of a part of a bucket.

    Args:
        item: the part, of one dimension.
        name: the key of a parameter -> the key of its state in the checkpoint.

    Raises:
        MismatchError: the place in the model of some of its elements is not known.
    """
    begin = int(item.global_offset[0])
    end = begin + int(item.local_shape[0])
    parameter = _parameter_at(bucket, begin, end, item.key)
    found = 0
    for shard in parameter.shards:
        low, high = begin - parameter.begin - shard.start, end - parameter.begin - shard.start
        for offset, shape in boxes_in_range(shard.shape, shard.strides, low, high):
            at = sum(o * s for o, s in zip(offset, shard.strides, strict=True)) - low
            place = tuple(a + b for a, b in zip(shard.offset, offset, strict=True))
            memory = _view(item.data, at, shape, shard.strides)
            yield ShardedTensor(
                key=name(shard.key),
                data=memory,
                dtype=memory.dtype,
                local_shape=shape,
                global_shape=shard.global_shape,
                global_offset=place,
                axis_fragmentations=None,
                replica_id=item.replica_id,
                allow_shape_mismatch=shard.key in own.flexible,
            )
            found += memory.numel()
    if found != end - begin:
        raise MismatchError(
            f"{end - begin - found} of {end - begin} elements of the parameter {parameter.name!r} in "
            f"{item.key!r} have no known place in the model, so this optimizer loads from its own parallel "
            "layout only"
        )


def _parameter_at(bucket: Bucket, begin: int, end: int, key: str) -> Parameter:
    for parameter in bucket.parameters:
        if parameter.begin <= begin and end <= parameter.end:
            return parameter
    raise MismatchError(f"elements [{begin}, {end}) of {key!r} are in no parameter of the optimizer")


def _view(line: torch.Tensor, at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    line = line.detach()
    step = line.stride(0)
    return line.as_strided(shape, [n * step for n in strides], line.storage_offset() + at * step)


def filled(state: State, step: Any) -> State:
    """Returns the bucket state as a load returns it, with the memory of the tensors, and without padding.

    Args:
        step: for parts that have a step of their own, the stored one; None if none is stored.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()} | _own_step(value, step)
        if isinstance(value, list):
            return [plain(item) for item in value if not _is_padding(item)]
        if isinstance(value, LocalNonpersistentObject):
            return value.unwrap()
        return value.data if isinstance(value, ShardedTensor | ShardedObject) else value

    result: State = plain(state)
    return result


def _own_step(entry: State, step: Any) -> State:
    """Returns a step for one part, which its optimizer will count on in place."""
    if step is None or "padding" not in entry or "step" not in entry:
        return {}
    return {"step": torch.tensor(float(step), device="cpu")}
