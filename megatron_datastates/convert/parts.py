"""Chooses tensors by pattern, and finds the layers that their elements belong to.

Megatron stores layers of the same kind under one key (`decoder.layers.mlp.linear_fc1.weight`), stacked along
the first axis; other layers have their number in the key (`decoder.layers.3.mlp...`), as its modules do.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Collection, Sequence

from megatron_datastates.errors import MissingKeyError

_LAYERS = re.compile(r"(?P<stack>(?:^|\.)layers)\.(?:(?P<number>\d+)\.)?")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.")
_MOST_LAYERS = 1 << 16  # an index that is damaged or hostile may say anything
_OPTIMIZER = re.compile(r"(?:^|\.)optimizer\.")
_BY_MODULE = "module"  # Megatron-FSDP: optimizer.state.module.….weight.exp_avg, with the state's name last
_GENERATORS = "rng_state"  # Megatron-FSDP stores states of random generators as tensors, below this name


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One layer's elements of a tensor, or all of a tensor that belongs to one layer or to none."""

    name: str  # with the layer's number in it, as Megatron names modules
    layer: tuple[str, int] | None  # a stack of layers, such as `decoder.layers`, and a number in it
    offset: tuple[int, ...]  # in the global tensor
    shape: tuple[int, ...]
    stacked: bool  # the first axis counts layers, and `shape` is 1 there


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The parts of a tensor that are asked for, and whether these are all."""

    parts: list[Part]
    whole: bool


def is_weight(key: str) -> bool:
    """Returns whether a tensor belongs to the model and not to its optimizer."""
    return _OPTIMIZER.search(key) is None


def group_of(key: str) -> str:
    """Returns `model`, `optimizer` and the name of the state, such as `optimizer exp_avg`, or `rng_state`."""
    if key.startswith(f"{_GENERATORS}."):
        return _GENERATORS
    if is_weight(key):
        return "model"
    state = _STATE.match(key)
    # In bucket space the state's name comes last, too.
    return f"optimizer {state[1] if state and state[1] != _BY_MODULE else key.rpartition('.')[2]}"


def place_of(key: str, layer: tuple[str, int] | None) -> str:
    """Returns where in the model elements of a tensor are: `decoder.layers.3`, or a module without layers."""
    if layer is not None:
        return f"{layer[0]}.{layer[1]}"
    state = _STATE.match(key)
    name = key[state.end() if state else 0 :]
    if "bucket_idx_" in name:  # optimizer state in bucket space, without a map
        return "buckets"
    return name.rpartition(".")[0] or name


def is_layer(place: str) -> bool:
    """Returns whether a place is a layer, and not a module without layers."""
    stack, _, number = place.rpartition(".")
    return number.isdigit() and stack.rpartition(".")[2] == "layers"


def place_order(place: str) -> tuple[int, str, int, str]:
    """Returns a sort key for places, as the data flows: embeddings, layers by number, the rest."""
    stack, _, number = place.rpartition(".")
    if is_layer(place):
        return 1, stack, int(number), ""
    return (0 if place.startswith("embedding") else 2), "", 0, place


def parts_of(key: str, global_shape: Sequence[int]) -> list[Part]:
    """Splits a tensor by layer if layers are stacked under its key; otherwise returns it as one part."""
    shape, found = tuple(global_shape), _LAYERS.search(key)
    whole = (0,) * len(shape)
    if found is None:
        return [Part(key, None, whole, shape, False)]
    state = _STATE.match(key)
    stack = key[state.end() if state else 0 : found.end("stack")]
    if found["number"] is not None:
        return [Part(key, (stack, int(found["number"])), whole, shape, False)]
    if not shape or not 0 < shape[0] <= _MOST_LAYERS:
        return [Part(key, None, whole, shape, False)]
    before, after = key[: found.end()], key[found.end() :]
    return [
        Part(f"{before}{n}.{after}", (stack, n), (n, *whole[1:]), (1, *shape[1:]), True)
        for n in range(shape[0])
    ]


def stacked_key(name: str) -> tuple[str, int] | None:
    """Returns the key that a layer's tensor is stacked under, and its number; None for a name without one."""
    found = _LAYERS.search(name)
    if found is None or found["number"] is None:
        return None
    return name[: found.end("stack") + 1] + name[found.end() :], int(found["number"])


def choose_parts(
    keys: Collection[str], shape_of: Callable[[str], Sequence[int]], patterns: Sequence[str], where: str
) -> dict[str, Choice]:
    """Returns, by sorted key, what matches any of the shell patterns (`*`, `?`, `[..]`); all, without any.

    A pattern matches a key as it is stored, with all its layers, or one layer by its name.

    Args:
        shape_of: returns a tensor's global shape.
        where: name of the checkpoint, for the message.

    Raises:
        MissingKeyError: a pattern matches nothing.
    """
    chosen: dict[str, Choice] = {}
    matchers = {pattern: re.compile(fnmatch.translate(pattern)).match for pattern in patterns or ["*"]}
    found: set[str] = set()
    for key in sorted(keys):
        parts, whole = parts_of(key, shape_of(key)), {p for p, matches in matchers.items() if matches(key)}
        layers = {p: {part.name for part in parts if matchers[p](part.name)} for p in matchers.keys() - whole}
        found |= whole | {pattern for pattern, names in layers.items() if names}
        some = (
            parts if whole else [part for part in parts if any(part.name in one for one in layers.values())]
        )
        if whole or some:
            chosen[key] = Choice(some, bool(whole))
    missing = next((pattern for pattern in patterns if pattern not in found), None)
    if missing is not None:
        if not keys:
            raise MissingKeyError(f"{where} holds no tensors")
        known = ", ".join(map(repr, sorted(keys)[:3]))
        raise MissingKeyError(
            f"no tensor in {where} matches {missing!r}: expected a key such as {known}, "
            "or a pattern (* matches anything)"
        )
    return chosen
