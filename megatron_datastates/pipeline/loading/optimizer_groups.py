"""What an optimizer stores beside tensors: options of its parameter groups, the step, the loss scaler.

Bucket layouts store them once for each data-parallel group, as objects beside the optimizer map; all other
layouts in the common state. Here they are found in either place and matched with the groups of another
optimizer. Belongs here: values only. What Megatron's optimizers ask for is in mcore/load/.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_datastates.errors import FormatError, MismatchError
from megatron_datastates.format.directory import SHARDING_KEY
from megatron_datastates.format.values import OPTIMIZER_MAP_NAME, is_optimizer_map
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer import WHOLE_OBJECT
from megatron_datastates.providers.named import dictionaries

Options = Mapping[str, Any]  # of a parameter group
_SIZES = ("per_bucket_numel", "per_bucket_numel_unpadded")
_BUCKETS = (*_SIZES, OPTIMIZER_MAP_NAME)
_NO_PREFIX = "chained_optim_avoid_prefix"  # in the same: no key begins with the number of an optimizer
_TYPE = "param_state_sharding_type"  # in an optimizer's state
_BUCKETS_TYPE, _RESHARDABLE_TYPE = "dp_reshardable", "fully_reshardable"
_EXPERT = "is_expert_parallel"
_GROUPS_AT_A_TIME = 32


@dataclasses.dataclass(frozen=True)
class StoredOptions:
    """All parameter groups of a checkpoint, and the other values of its optimizers, by name.

    Options that are classes are left out: they say how an optimizer was made, which is the run's choice.
    """

    groups: tuple[Options, ...]
    others: Mapping[str, Any]  # grad_scaler, for instance; the same in all optimizers

    @property
    def step(self) -> Any:
        """The step of the first group that has one, as all have the same; None if none has."""
        return next((group["step"] for group in self.groups if group.get("step") is not None), None)

    def joined(self, more: StoredOptions) -> StoredOptions:
        """Returns these and those of other optimizers of the same chain. Of values in both, these count."""
        return StoredOptions(_distinct([*self.groups, *more.groups]), {**more.others, **self.others})


def packed_part(checkpoint: Checkpoint, part: int, parts: int) -> dict[str, bytes]:
    """Returns, by key, compressed, what `objects_of_groups` yields of a part of the data-parallel groups.

    Raises:
        FormatError, StorageError, CorruptDataError: as all reading.
    """
    packed: dict[str, bytes] = {}
    for keys in _batches(checkpoint, part, parts):
        objects = checkpoint.plan_objects(keys)
        checkpoint.read(objects.scheduled)
        packed |= {key: zlib.compress(objects.stored(key), 1) for key in keys}
    return packed


def objects_of_groups(checkpoint: Checkpoint, packed: Mapping[str, bytes]) -> Iterator[tuple[str, Any]]:
    """Yields, by key, optimizer maps and the objects beside them, few of them in memory at a time.

    Args:
        packed: parts that ranks have read. Only what is not among them is read.

    Raises:
        FormatError, StorageError, CorruptDataError: as all reading.
    """
    for keys in _batches(checkpoint):
        found = checkpoint.read_objects([key for key in keys if key not in packed])
        for key in keys:
            known = packed.get(key)
            stored = None if known is None else zlib.decompress(known)
            yield key, found[key] if stored is None else checkpoint.decode_object(key, stored)


def _batches(checkpoint: Checkpoint, part: int = 0, parts: int = 1) -> Iterator[list[str]]:
    """Yields keys of a part of the groups, few groups at a time. What one group has stored is in one file."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key, name in beside_maps(checkpoint).items():
        if name not in _SIZES:
            groups[key.removesuffix(f"{name}{WHOLE_OBJECT}")].append(key)
    mine = [groups[prefix] for prefix in sorted(groups)[part::parts]]
    for begin in range(0, len(mine), _GROUPS_AT_A_TIME):
        yield [key for keys in mine[begin : begin + _GROUPS_AT_A_TIME] for key in keys]


def from_objects(
    checkpoint: Checkpoint, link: int | None = None, values: Mapping[str, Any] | None = None
) -> StoredOptions:
    """Finds what data-parallel groups have stored beside their optimizer maps.

    Args:
        link: of one optimizer of a chain; by default of all.
        values: these objects, by key. None: they are read.

    Raises:
        FormatError: an object is not what Megatron stores, or two groups store different values.
        StorageError, CorruptDataError: as all reading.
    """
    names = {
        key: name
        for key, name in beside_maps(checkpoint).items()
        if name not in _BUCKETS and (link is None or key.startswith(f"chained_{link}."))
    }
    values = checkpoint.read_objects(names) if values is None else values
    groups: list[Options] = []
    others: dict[str, Any] = {}
    for key, name in sorted(names.items()):
        stored = values[key]
        if not (isinstance(stored, list) and len(stored) == 1):
            raise FormatError(f"the object {key!r} is not a list of one element, as Megatron stores objects")
        if name == "optimizer":
            groups += _groups_in(stored[0], key)
        elif name not in others:
            others[name] = stored[0]
        elif not equal(others[name], stored[0]):
            raise FormatError(f"data-parallel groups store different values of {name!r}: see {key!r}")
    return StoredOptions(_distinct(groups), others)


def beside_maps(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns key -> name of the objects that stand beside optimizer maps, and of these."""
    objects = checkpoint.index.objects
    prefixes = {key[: key.rindex(OPTIMIZER_MAP_NAME)] for key in objects if is_optimizer_map(key)}
    found = {}
    for key in objects:
        prefix, _, name = key.removesuffix(WHOLE_OBJECT).rpartition(".")
        if key.endswith(WHOLE_OBJECT) and f"{prefix}." in prefixes:
            found[key] = name
    return found


def reshardable_common_state(checkpoint: Checkpoint, stored: Any) -> list[dict[str, Any]]:
    """Returns a common state as it would be with fully reshardable optimizer state.

    Args:
        stored: the object that is the common state.

    Raises:
        FormatError: it is not a common state of a bucket layout, or as `from_objects`.
        StorageError, CorruptDataError: as all reading.
    """
    common = stored[0] if isinstance(stored, list) and len(stored) == 1 else None
    content = common.get("content_metadata") if isinstance(common, dict) else None
    kind = content.get(SHARDING_KEY) if isinstance(content, dict) else None
    if common is None or content is None or kind != _BUCKETS_TYPE:
        raise FormatError(
            f"the common state of {checkpoint.directory} has {SHARDING_KEY} {kind!r}, expected "
            f"{_BUCKETS_TYPE!r}"
        )
    optimizer = common.get("optimizer", {})
    if _TYPE in optimizer:
        changed: dict[Any, Any] = _reshardable(from_objects(checkpoint))
    else:
        changed = {link: _reshardable(from_objects(checkpoint, link)) for link in optimizer}
    content = {**content, SHARDING_KEY: _RESHARDABLE_TYPE, _NO_PREFIX: True}
    return [{**common, "content_metadata": content, "optimizer": changed}]


def _reshardable(stored: StoredOptions) -> dict[str, Any]:
    groups = [dict(group) for group in stored.groups]
    return {"optimizer": {"param_groups": groups}, **stored.others, _TYPE: _RESHARDABLE_TYPE}


def from_common_state(common: Any) -> StoredOptions:
    """Finds the options in the common state of a checkpoint that stores optimizer state by parameter."""
    groups: list[Options] = []
    others: dict[str, Any] = {}
    for node in dictionaries(common.get("optimizer") if isinstance(common, dict) else None):
        if isinstance(node.get("param_groups"), list):
            step = node["state"].get("common_step") if isinstance(node.get("state"), dict) else None
            default = {} if step is None else {"step": _plain_step(step)}
            groups += [default | dict(group) for group in _groups_in(node, "the common state")]
        if "grad_scaler" in node:
            others["grad_scaler"] = node["grad_scaler"]
    return StoredOptions(_distinct(groups), others)


def _plain_step(step: Any) -> Any:
    return int(step) if isinstance(step, torch.Tensor) else step


def _groups_in(state: Any, where: str) -> list[Options]:
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise FormatError(f"{where} has no list of parameter groups")
    return [
        {name: value for name, value in group.items() if name != "params" and not isinstance(value, type)}
        for group in groups
    ]


def _distinct(groups: Iterable[Options]) -> tuple[Options, ...]:
    found: list[Options] = []
    for group in groups:
        if not any(equal(group, other) for other in found):
            found.append(group)
    return tuple(found)


def equal(one: Any, other: Any) -> bool:
    """Returns whether two nested values are equal, tensors included."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def matched(own: Options, stored: StoredOptions, identifiers: Sequence[str]) -> dict[str, Any]:
    """Returns the stored options of one of a run's parameter groups.

    Groups are the same if they agree in all `identifiers`, as in Megatron. Whether experts have a group of
    their own depends on expert parallelism, so a group may match one that differs in that alone. Classes are
    the run's own.

    Raises:
        MismatchError: no stored group matches, or several do that differ.
    """
    for names in (identifiers, [name for name in identifiers if name != _EXPERT]):
        groups = [group for group in stored.groups if _identity(group, names) == _identity(own, names)]
        if groups:
            break
    else:
        stored_ones = [_identity(group, identifiers) for group in stored.groups]
        raise MismatchError(
            f"the checkpoint has no parameter group with {_identity(own, identifiers)}, as the optimizer "
            f"has; it has {stored_ones}"
        )
    result: dict[str, Any] = {}
    for group in groups:
        for name, value in group.items():
            if name != _EXPERT and not equal(result.setdefault(name, value), value):
                raise MismatchError(
                    f"parameter groups of the checkpoint with {_identity(own, identifiers)} differ: {name!r} "
                    f"is {result[name]!r} in one, and {value!r} in another"
                )
    return result | {name: value for name, value in own.items() if name == _EXPERT or isinstance(value, type)}


def _identity(group: Options, names: Sequence[str]) -> dict[str, Any]:
    """Returns the identifying options that are set. NeMo names some of them with `pre_`."""
    found = {name: group.get(name, group.get(f"pre_{name}")) for name in names}
    return {name: value for name, value in found.items() if value is not None}
