"""Loads optimizer state into another parallel layout than it was saved from, without conversion.

A load asks for optimizer state in buckets, as its own layout has them, or by parameter. A checkpoint has it
in the buckets of the run that saved it, with a map that says which parameters they hold, or by parameter.
Where the two differ, the request is restated before Megatron sees it:
  1. Each bucket tensor becomes ShardedTensors of the parameters in it, in the optimizer's own memory. So
     each rank reads what it needs and nothing else, and nothing is gathered.
  2. The keys of parameters' states are keys of the checkpoint. If it stores buckets, the reader presents
     those states as tensors (metadata.py, reader.py).
  3. What an optimizer stores beside tensors is matched by parameter group
     (pipeline/loading/optimizer_groups.py).
A request that fits the stored buckets is not touched: Megatron's own path serves it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from megatron_datastates.errors import MismatchError
from megatron_datastates.format.values import is_of_optimizer, is_optimizer_map
from megatron_datastates.mcore.errors import LoadMismatch, load_errors
from megatron_datastates.mcore.load.agreement import Agreement
from megatron_datastates.mcore.load.opening import is_ours, open_checkpoint, read_common_state
from megatron_datastates.mcore.load.optimizer_names import StateNames
from megatron_datastates.mcore.load.optimizer_places import holds_the_same
from megatron_datastates.mcore.load.optimizer_request import (
    OwnBuckets,
    bucket_of,
    bucket_tensors,
    filled,
    is_offloaded,
    own_buckets,
    own_shards,
)
from megatron_datastates.mcore.load.state import Restated
from megatron_datastates.mcore.save.buckets import CARRIER
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer import (
    PREFIX,
    BucketStates,
    has_optimizer_maps,
    optimizer_map,
)
from megatron_datastates.pipeline.loading.optimizer_groups import (
    StoredOptions,
    from_common_state,
    from_objects,
    matched,
    objects_of_groups,
    packed_part,
)
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.plan.boxes import Box, bounding_box
from megatron_datastates.providers.named import dictionaries

logger = logging.getLogger(__name__)
_ANNOUNCEMENT = (
    "%s holds the optimizer state in other buckets than this run's%s: it is loaded by parameter, and each "
    "rank reads its own part"
)
_OFFLOADED = ", or this one is offloaded to the CPU, and Megatron would not restore its step"
NO_STATE = (
    "the checkpoint has no optimizer state: it was saved without (--no-save-optim), or `datastates prune "
    "--drop-optimizer` removed it. Load it without the optimizer (--no-load-optim)"
)
_SCALER = "grad_scaler"
_TYPE, _STATE = "param_state_sharding_type", "param_state"


def restated_where_needed(
    arguments: dict[str, Any], agreement: Agreement | None, problem: Exception | None
) -> Restated | None:
    """Returns the restated request of a `dist_checkpointing.load`; None if it is to be loaded as it is.

    Args:
        arguments: of the call.
        agreement: of the ranks that load. None: each rank decides, and reads, by itself.
        problem: what has failed on this rank before; raised where all ranks expect it.

    Raises:
        LoadMismatch, LoadFailedError (and CheckpointingExceptions): the optimizer state cannot be loaded.
    """
    directory, request = arguments["checkpoint_dir"], arguments["sharded_state_dict"]

    def here() -> bool:
        if not is_ours(directory):
            return False
        checkpoint = open_checkpoint(directory)
        with _errors(directory):
            return differs(request, checkpoint)

    def part(number: int, count: int) -> dict[str, bytes]:
        return packed_part(open_checkpoint(directory), number, count)

    parts: list[dict[str, bytes]] | None = []
    if agreement is not None:
        parts = agreement.parts_if_any(here, part, problem)
    elif not here():
        parts = None
    if parts is None:
        return None
    checkpoint, common = open_checkpoint(directory), read_common_state(directory)
    with _errors(directory), checkpoint.costs.timing("planning"):
        packed = {key: stored for each in parts for key, stored in each.items()}
        restated = restate(request, checkpoint, common, packed)
    announce(directory, any(is_offloaded(state) for state, _ in _bucket_states(request)))
    return restated


def announce(directory: Any, offloaded: bool = False) -> None:
    """Logs that optimizer state is loaded by parameter, and why."""
    level = logging.WARNING if Collectives().rank == 0 else logging.DEBUG
    logger.log(level, _ANNOUNCEMENT, directory, _OFFLOADED if offloaded else "")


@contextlib.contextmanager
def _errors(directory: Any) -> Iterator[None]:
    """Raises a LoadMismatch from a MismatchError, and MegatronLoadFailedError from other errors of ours."""
    try:
        with load_errors():
            yield
    except CheckpointingException as error:
        if isinstance(error.__cause__, MismatchError):
            raise LoadMismatch(f"{directory}: {error}") from error.__cause__
        raise


def differs(request: dict[str, Any], checkpoint: Checkpoint) -> bool:
    """Returns whether a rank's request for optimizer state does not fit how the checkpoint stores it.

    Raises:
        MismatchError: it does not fit, and the checkpoint has no optimizer maps, or no optimizer state.
        FormatError, StorageError, CorruptDataError: a map cannot be used.
    """
    found = list(_bucket_states(request))
    if found:
        return any(_is_other_layout(checkpoint, state, own) for state, own in found)
    if not has_optimizer_maps(checkpoint):
        return False
    return any(key not in checkpoint.index.tensors for key in _state_keys(request))


def restate(
    request: dict[str, Any], checkpoint: Checkpoint, common: Any, packed: Mapping[str, bytes]
) -> Restated:
    """Restates a request. The given one is not changed.

    Args:
        common: the checkpoint's common state.
        packed: what ranks have read of it, as of `objects_of_groups`.

    Raises:
        MismatchError: the checkpoint lacks something that the optimizer needs.
        FormatError, StorageError, CorruptDataError: the optimizer state cannot be used.
    """
    beside: dict[str, Any] = {}

    def maps() -> Iterator[tuple[str, Any]]:
        for key, value in objects_of_groups(checkpoint, packed):
            if is_optimizer_map(key):
                yield key, value
            else:
                beside[key] = value

    states = BucketStates(checkpoint, _wanted(request), maps())
    has_maps = has_optimizer_maps(checkpoint)
    stored = from_common_state(common)
    if has_maps:  # an optimizer of a chain may be stored by parameter, as Muon is beside Adam's buckets
        stored = from_objects(checkpoint, values=beside).joined(stored)
    return restated_from(request, StateNames(checkpoint.index.tensors, states), stored, states)


def restated_from(
    request: dict[str, Any], names: StateNames, stored: StoredOptions, states: BucketStates | None
) -> Restated:
    """Restates a request for what is stored, as `restate`."""
    paths = tuple(key for key, value in request.items() if _is_optimizer(value))
    copied = {
        key: _Optimizer(names, stored).restated(value) if key in paths else value
        for key, value in request.items()
    }
    return Restated(copied, paths, states)


# -- what a request is ----------------------------------------------------------------------------------


def _bucket_states(request: dict[str, Any]) -> Iterator[tuple[dict[Any, Any], OwnBuckets]]:
    for node in dictionaries(request):
        own = own_buckets(node)
        if own is not None:
            yield node, own


def asks_for_buckets(request: dict[str, Any]) -> bool:
    """Returns whether a request is one for the buckets of a run that knows what they hold."""
    return any(True for _ in _bucket_states(request))


def _wanted(request: dict[str, Any]) -> dict[str, Box] | None:
    """Returns by key the slices of parameters that this rank needs states of, or more; None: unknown."""
    if any(True for _ in _state_keys(request)):
        return None
    shards = [
        shard
        for _, own in _bucket_states(request)
        for bucket in own.map.buckets
        for parameter in bucket.parameters
        for shard in parameter.shards
    ]
    found: dict[str, Box] = {}
    for shard in shards:
        box = shard.offset, shard.shape
        found[shard.key] = bounding_box(found.get(shard.key, box), box)
    return found


def _state_keys(request: dict[str, Any]) -> Iterator[str]:
    """Yields the keys of states by parameter that a request has."""
    for node in dictionaries(request):
        for item in node.values():
            for one in item if isinstance(item, list) else [item]:
                if isinstance(one, ShardedTensor | ShardedTensorFactory) and f"{PREFIX}." in one.key:
                    yield one.key


def _is_optimizer(value: Any) -> bool:
    return any(_TYPE in node or "param_groups" in node or CARRIER in node for node in dictionaries(value))


def _is_other_layout(checkpoint: Checkpoint, state: dict[Any, Any], own: OwnBuckets) -> bool:
    """Returns whether the optimizer's buckets are not stored with the same parameters at the same places.

    Buckets that are stored and that the optimizer does not have are a difference, too. So is a state that
    Megatron would load wrongly, although its layout is the stored one.
    """
    if has_optimizer_maps(checkpoint):
        stored = optimizer_map(checkpoint, state[CARRIER].key.removesuffix(CARRIER))
        return stored is None or is_offloaded(state) or not holds_the_same(stored, own.map, checkpoint)
    keys = [item.key for _, _, item in bucket_tensors(state) if item.key in checkpoint.index.tensors]
    problem = bucket_mismatch(state, {key: checkpoint.index.describe(key)[1] for key in keys})
    if problem is not None and not _has_states(checkpoint):
        raise MismatchError(problem if any(map(is_of_optimizer, checkpoint.index.tensors)) else NO_STATE)
    return problem is not None


def bucket_mismatch(nested: Any, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Returns how requested buckets differ from stored ones that have no map; None if they do not."""
    for _, _, item in bucket_tensors(nested):
        shape = shapes.get(item.key)
        if shape is None:
            return _without_map(item.key, "is not there")
        if shape != tuple(item.global_shape):
            return _without_map(item.key, f"has {shape[0]} elements, and {item.global_shape[0]} in this run")
    return None


def _has_states(checkpoint: Checkpoint) -> bool:
    return any(f"{PREFIX}." in key for key in checkpoint.index.tensors)


def _without_map(key: str, what: str) -> str:
    return (
        f"the optimizer state was saved in buckets of another parallel layout: {key!r} {what}. The "
        "checkpoint has no optimizer map, which would say where each parameter lies in them. Resume with the "
        "layout that saved it, save once with --ckpt-format datastates, and resume from that in any layout; "
        "or load without the optimizer (--no-load-optim)."
    )


# -- restating ------------------------------------------------------------------------------------------


class _Optimizer:
    """Restates what one optimizer, or a chain of them, asks for."""

    def __init__(self, names: StateNames, stored: StoredOptions) -> None:
        self._names, self._stored = names, stored
        self._identifiers = _identifiers()

    def restated(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.restated(item) for item in node]
        if not isinstance(node, dict):
            return self._leaf(node)
        own = own_buckets(node)
        if own is not None:
            return self._buckets(node, own)
        if _TYPE in node or own_buckets(node.get(_STATE)) is not None:
            return self._distributed(node)
        if isinstance(node.get("param_groups"), list):
            return self._inner(node)
        return self._with_others({key: self.restated(value) for key, value in node.items()}, node)

    def _leaf(self, item: Any) -> Any:
        if isinstance(item, ShardedTensor | ShardedTensorFactory) and f"{PREFIX}." in item.key:
            return dataclasses.replace(item, key=self._names.of_request(item.key))
        return item

    def _buckets(self, state: dict[Any, Any], own: OwnBuckets) -> Any:
        """Replaces a bucket state by one factory: it asks for parameters, and returns the whole state."""
        shards: list[ShardedTensor] = []
        for _, name, item in bucket_tensors(state):
            key = functools.partial(self._names.of, name)
            shards += own_shards(own, bucket_of(own, state, item), item, key)
        memory = [shard.data for shard in shards]
        result = filled(state, self._stored.step)
        if not shards:
            return LocalNonpersistentObject(result)

        def merge(loaded: list[Any]) -> Any:
            if len(loaded) != len(memory):  # a lenient strictness left some out
                raise LoadMismatch(
                    f"the checkpoint lacks {len(memory) - len(loaded)} of {len(memory)} parts of the "
                    f"optimizer state that {state[CARRIER].key!r} needs, whatever the "
                    "--dist-ckpt-strictness: load without it to see their keys, or "
                    "without the optimizer (--no-load-optim)"
                )
            for target, found in zip(memory, loaded, strict=True):
                if found.data_ptr() != target.data_ptr():  # a fully parallel load returns other memory
                    target.copy_(found)
            return result

        return ShardedTensorFactory(state[CARRIER].key, memory[0], lambda *_: list(shards), merge)

    def _distributed(self, node: dict[Any, Any]) -> dict[Any, Any]:
        """Restates what a distributed optimizer asks for: objects in buckets, plain values elsewhere."""
        result: dict[Any, Any] = {}
        for name, value in node.items():
            if name == _STATE:
                result[name] = self.restated(value)
                continue
            own = value.data if isinstance(value, ShardedObject) else value
            if _TYPE in name:  # a MimoOptimizer makes an object of it, with a name that contains this one
                result[name] = LocalNonpersistentObject(own)
            else:
                found = self._value(name, own)
                if found is not None:
                    result[name] = LocalNonpersistentObject(found)
        return result

    def _value(self, name: str, own: Any) -> Any:
        """Returns the stored value for one of an optimizer's values beside tensors; None if there is none."""
        if name != "optimizer":
            if name not in self._stored.others and name != _SCALER:  # which Megatron does without
                raise MismatchError(
                    f"the optimizer has {name!r}, and the checkpoint stores nothing of that name"
                )
            return self._stored.others.get(name)
        groups = [matched(group, self._stored, self._identifiers) for group in own["param_groups"]]
        return {**own, "param_groups": groups}

    def _inner(self, node: dict[Any, Any]) -> dict[Any, Any]:
        """Restates a plain optimizer's state dict: its groups keep their own parameters."""
        result = {key: self.restated(value) for key, value in node.items() if key != "param_groups"}
        result["param_groups"], steps = [], []
        for group in node["param_groups"]:
            found = matched(group, self._stored, self._identifiers)
            steps += [found["step"]] if "step" in found else []
            params = {key: value for key, value in group.items() if key == "params"}
            plain = {key: LocalNonpersistentObject(value) for key, value in found.items()}
            result["param_groups"].append(params | plain)
        if steps and _keeps_step_by_parameter() and isinstance(result.get("state"), dict):
            step = torch.tensor(float(steps[0]), device="cpu")
            result["state"]["common_step"] = LocalNonpersistentObject(step)
        return result

    def _with_others(self, result: dict[Any, Any], node: dict[Any, Any]) -> dict[Any, Any]:
        """Replaces the loss scaler of an optimizer that is not distributed, or leaves it out."""
        if _SCALER in node:
            del result[_SCALER]
            if _SCALER in self._stored.others:
                result[_SCALER] = LocalNonpersistentObject(self._stored.others[_SCALER])
        return result


def _keeps_step_by_parameter() -> bool:
    """Returns whether the run's optimizers are torch's own, which keep the step in each parameter's state."""
    from megatron.core.optimizer import distrib_optimizer

    return not getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)


def _identifiers() -> tuple[str, ...]:
    """Returns the options by which Megatron recognizes parameter groups."""
    from megatron.core.optimizer import optimizer

    default = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    return tuple(getattr(optimizer, "param_group_identifier_keys", default))
