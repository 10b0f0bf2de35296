"""Chooses tensors by pattern, and finds the layers that their elements belong to.

Megatron stores layers of the same kind under one key (`decoder.layers.mlp.linear_fc1.weight`), stacked along
the first axis; other layers have their number in the key (`decoder.layers.3.mlp...`), as its modules do.

Optimizer state by parameter has the name of the state before that of the parameter; in checkpoints of
PyTorch's DCP, as of Megatron-FSDP, after it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping, Sequence

from megatron_datastates.errors import MissingKeyError
from megatron_datastates.format.values import is_of_optimizer

_LAYERS = re.compile(r"(?P<stack>(?:^|\.)layers)\.(?:(?P<number>\d+)\.)?")
_STATE = re.compile(r"(?:chained_\d+\.)?optim(?:izer)?\.(?:\d+\.)?state\.")
# States of torch's optimizers and of Transformer Engine's, where their names come last.
_LAST = frozenset(
    (
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "step",
        "master_param",
    )
)
_WRAPPED = "module"  # begins a parameter's name in Megatron-FSDP, and is no state's name
_MOST_LAYERS = 1 << 16  # an index that is damaged or hostile may say anything
_GENERATORS = re.compile(r"rng_state[./]")  # tensors only where DCP saves
GENERATORS = "random generators"


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


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """What the key of a state by parameter says: its name, and where the parameter's name is in the key."""

    name: str
    parameter: slice


def _state_of(key: str) -> _State | None:
    match = _STATE.match(key)
    if match is None:
        return None
    begin = match.end()
    first, dot, _ = key[begin:].partition(".")
    last = key[begin:].rpartition(".")[2]
    if not dot:
        return None
    if first == _WRAPPED or last in _LAST:
        return _State(last, slice(begin, len(key) - len(last) - 1))
    return _State(first, slice(begin + len(first) + 1, len(key)))


def is_state(key: str) -> bool:
    """Returns whether a tensor is optimizer state that is stored by parameter, not in buckets."""
    return _state_of(key) is not None


def is_of_generators(key: str) -> bool:
    """Returns whether a tensor is the state of a random generator."""
    return _GENERATORS.match(key) is not None


def is_weight(key: str) -> bool:
    """Returns whether a tensor belongs to the model, not to its optimizer or to a random generator."""
    return not is_of_optimizer(key) and not is_of_generators(key)


def group_of(key: str) -> str:
    """Returns `model`, GENERATORS, or `optimizer` and the name of the state, such as `optimizer exp_avg`."""
    if is_of_generators(key):
        return GENERATORS
    if not is_of_optimizer(key):
        return "model"
    state = _state_of(key)
    # In bucket space the state's name comes last.
    return f"optimizer {state.name if state else key.rpartition('.')[2]}"


def layer_name(layer: tuple[str, int]) -> str:
    """Returns the name of a layer, such as `decoder.layers.3`."""
    return f"{layer[0]}.{layer[1]}"


def place_of(key: str, layer: tuple[str, int] | None) -> str:
    """Returns where in the model elements of a tensor are: `decoder.layers.3`, or a module without layers."""
    if layer is not None:
        return layer_name(layer)
    state = _state_of(key)
    name = key[state.parameter] if state else key
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
    shape, match = tuple(global_shape), _LAYERS.search(key)
    whole = (0,) * len(shape)
    if match is None:
        return [Part(key, None, whole, shape, False)]
    state = _state_of(key)
    stack = key[state.parameter.start if state else 0 : match.end("stack")]
    if match["number"] is not None:
        return [Part(key, (stack, int(match["number"])), whole, shape, False)]
    if not shape or not 0 < shape[0] <= _MOST_LAYERS:
        return [Part(key, None, whole, shape, False)]
    before, after = key[: match.end()], key[match.end() :]
    return [
        Part(f"{before}{n}.{after}", (stack, n), (n, *whole[1:]), (1, *shape[1:]), True)
        for n in range(shape[0])
    ]


def stacked_key(name: str) -> tuple[str, int] | None:
    """Returns the key that a layer's tensor is stacked under, and its number; None for a name without one."""
    match = _LAYERS.search(name)
    if match is None or match["number"] is None:
        return None
    return name[: match.end("stack") + 1] + name[match.end() :], int(match["number"])


def choose_parts(
    shapes: Mapping[str, Sequence[int]], patterns: Sequence[str], where: str
) -> dict[str, Choice]:
    """Returns, by sorted key, what matches any of the shell patterns (`*`, `?`, `[..]`); all, without any.

    A pattern matches a key as it is stored, with all its layers, or one layer by its name.

    Args:
        shapes: global shapes of tensors by key.
        where: name of the checkpoint, for the message.

    Raises:
        MissingKeyError: a pattern matches nothing.
    """
    chosen: dict[str, Choice] = {}
    matchers = {pattern: re.compile(fnmatch.translate(pattern)).match for pattern in patterns or ["*"]}
    matched: set[str] = set()
    for key, shape in sorted(shapes.items()):
        parts, whole = parts_of(key, shape), {p for p, matches in matchers.items() if matches(key)}
        layers = {p: {part.name for part in parts if matchers[p](part.name)} for p in matchers.keys() - whole}
        matched |= whole | {pattern for pattern, names in layers.items() if names}
        some = (
            parts if whole else [part for part in parts if any(part.name in one for one in layers.values())]
        )
        if whole or some:
            chosen[key] = Choice(some, bool(whole))
    missing = next((pattern for pattern in patterns if pattern not in matched), None)
    if missing is not None:
        if not shapes:
            raise MissingKeyError(f"{where} holds no tensors")
        known = ", ".join(map(repr, sorted(shapes)[:3]))
        raise MissingKeyError(
            f"no tensor in {where} matches {missing!r}: expected a key such as {known}, "
            "or a pattern (* matches anything)"
        )
    return chosen
