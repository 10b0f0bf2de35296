"""Chooses tensors by pattern, and finds the layers that their elements belong to.

Megatron stores layers of the same kind under one key (`decoder.layers.mlp.linear_fc1.weight`), stacked along
the first axis; other layers have their number in the key (`decoder.layers.3.mlp...`), as its modules do.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Collection, Sequence

from megatron_datastates.errors import MissingKeyError

_LAYERS = re.compile(r"(?P<stack>(?:^|\.)layers)\.(?:(?P<number>\d+)\.)?")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.")
_OPTIMIZER = re.compile(r"(?:^|\.)optimizer\.")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One layer's elements of a tensor, or all of a tensor that belongs to one layer or to none."""

    name: str  # with the layer's number in it, as Megatron names modules
    layer: tuple[str, int] | None  # a stack of layers, such as `decoder.layers`, and a number in it
    offset: tuple[int, ...]  # in the global tensor
    shape: tuple[int, ...]
    stacked: bool  # the first axis counts layers, and `shape` is 1 there


def is_weight(key: str) -> bool:
    """Returns whether a tensor belongs to the model and not to its optimizer."""
    return _OPTIMIZER.search(key) is None


def group_of(key: str) -> str:
    """Returns `model`, or `optimizer` followed by the name of the state, such as `optimizer exp_avg`."""
    if is_weight(key):
        return "model"
    state = _STATE.match(key)
    # In bucket space the state's name comes last.
    return f"optimizer {state[1] if state else key.rpartition('.')[2]}"


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
    if not shape:
        return [Part(key, None, whole, shape, False)]
    before, after = key[: found.end()], key[found.end() :]
    return [
        Part(f"{before}{n}.{after}", (stack, n), (n, *whole[1:]), (1, *shape[1:]), True)
        for n in range(shape[0])
    ]


def choose_keys(keys: Collection[str], patterns: Sequence[str], where: str) -> list[str]:
    """Returns the sorted keys that match any of the shell patterns (`*`, `?`, `[..]`); all, without patterns.

    Args:
        where: name of the checkpoint, for the message.

    Raises:
        MissingKeyError: a pattern matches nothing.
    """
    if not patterns:
        return sorted(keys)
    chosen: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(keys, pattern)
        if not found:
            known = ", ".join(map(repr, sorted(keys)[:3])) or "none"
            raise MissingKeyError(
                f"no tensor in {where} matches {pattern!r}: expected a key such as {known}, "
                "or a pattern (* matches anything)"
            )
        chosen.update(found)
    return sorted(chosen)
