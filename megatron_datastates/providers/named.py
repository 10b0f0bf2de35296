"""State as nested mappings: tensors and objects under names, which a program saves without Megatron."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from megatron_datastates.errors import MismatchError
from megatron_datastates.format.values import is_optimizer_map
from megatron_datastates.providers.base import Mutability, Place, Tensors
from megatron_datastates.providers.objects import PickledObject


class Shard(NamedTuple):
    """The part of a global tensor that this rank holds.

    Attributes:
        tensor: this rank's part, on the host or on a CUDA device.
        global_shape: of the whole tensor, in elements.
        offset: of the part's first element in each dimension, in elements.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def place(self) -> Place:
        return Place(tuple(self.global_shape), tuple(self.offset), tuple(self.tensor.shape))


def leaves(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for each value of nested mappings; the keys on the way are joined by dots.

    A mapping that is empty is a value itself, and so are lists and tuples.

    Raises:
        MismatchError: a key is neither text nor a whole number.
    """
    for key, value in state.items():
        if not isinstance(key, str | int):
            raise MismatchError(
                f"the state has the key {key!r} at {prefix or 'its top'!r}: expected text or a whole number"
            )
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, name)
        else:
            yield name, value


def replaced(state: Mapping[Any, Any], value_of: Callable[[str], Any], prefix: str = "") -> dict[Any, Any]:
    """Returns nested dictionaries of the same keys, with `value_of(name)` in place of each value."""
    found = {}
    for key, value in state.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        is_inner = isinstance(value, Mapping) and value
        found[key] = replaced(value, value_of, name) if is_inner else value_of(name)
    return found


def named_values(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the values of nested mappings by name.

    Raises:
        MismatchError: two values have the same name, or one has a name that is not free.
    """
    found: dict[str, Any] = {}
    for name, value in leaves(state):
        if name in found:
            raise MismatchError(f"two values of the state are both called {name!r}: rename one of them")
        if is_optimizer_map(name):
            raise MismatchError(f"the name {name!r} is reserved: rename that value")
        found[name] = value
    return found


class NamedState:
    """Tensors, shards and objects under names. See `leaves` for the names.

    Args:
        mutability: until when tensors stay as they are. Objects are always copied before the save returns.
    """

    def __init__(self, state: Mapping[Any, Any], mutability: Mutability = Mutability.NOW) -> None:
        self._state = state
        self._mutability = mutability

    @functools.cached_property
    def _values(self) -> dict[str, Any]:
        return named_values(self._state)  # raises in the save, which then fails on all ranks

    def tensors(self) -> Tensors:
        found = Tensors()
        for name, value in self._values.items():
            if isinstance(value, Shard):
                found.add(name, value.tensor, self._mutability, value.place)
            elif isinstance(value, torch.Tensor):
                found.add(name, value, self._mutability)
        return found

    def objects(self) -> Iterator[PickledObject]:
        for name, value in self._values.items():
            if not isinstance(value, Shard | torch.Tensor):
                yield PickledObject(name, value, Mutability.NOW)
