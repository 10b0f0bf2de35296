"""State as nested mappings of tensors and objects, which a program saves without Megatron."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from megatron_datastates.errors import MismatchError
from megatron_datastates.format.values import is_optimizer_map
from megatron_datastates.plan.boxes import checked_slice, integers
from megatron_datastates.providers.base import (
    Entry,
    Mutability,
    Place,
    StateProvider,
    StateReader,
    Tensors,
)
from megatron_datastates.providers.collect import collect, kind_of, renamed
from megatron_datastates.providers.objects import ObjectSource
from megatron_datastates.providers.tensors import is_frozen

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")  # in ASCII


class Shard(NamedTuple):
    """The part of a global tensor that this rank holds.

    Attributes:
        tensor: this rank's part, on the host or on a CUDA device.
        global_shape: shape of the whole tensor.
        offset: position of the part's first element in the whole tensor, in elements per dimension.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    def place_of(self, key: str) -> Place:
        """Returns where the part lies in the global tensor of this name.

        Raises:
            MismatchError: outside it, or the part is no tensor.
        """
        if not isinstance(self.tensor, torch.Tensor):
            raise MismatchError(
                f"tensor {key!r}: its shard has a {type(self.tensor).__qualname__}: expected a torch.Tensor, "
                "such as torch.from_numpy makes of an array"
            )
        whole = integers(key, "global shape", self.global_shape)
        offset, shape = checked_slice(key, whole, self.offset, self.tensor.shape)
        return Place(whole, offset, shape)


def _is_inner(value: Any) -> bool:
    """Returns whether a value is a mapping whose own values have names: it has some, and is no provider."""
    return _is_mapping(value) and bool(value)


def _is_mapping(value: Any) -> bool:
    cls = type(value)
    known = _mappings.get(cls)
    if known is None:
        known = _mappings[cls] = issubclass(cls, Mapping) and not issubclass(cls, StateProvider)
    return known


# By class: to look for a protocol's methods takes microseconds, and a model has thousands of mappings.
_mappings: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _is_provider(value: Any) -> bool:
    return type(value) not in _VALUES and isinstance(value, StateProvider)


# What most values are. To look for a protocol's methods takes ten microseconds, and a state may hold 100,000.
_VALUES = {bool, int, float, str, bytes, type(None), list, tuple, torch.Tensor, torch.nn.Parameter}


def leaves(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for each value of nested mappings; a name joins the keys that lead to it by dots.

    An empty mapping is a value itself, and so are lists, tuples and state providers.

    Raises:
        MismatchError: this is no mapping, a key is neither a str nor an int, a state provider's name is
            empty, or a mapping contains itself.
    """
    if not _is_mapping(state):
        raise MismatchError(
            f"expected nested mappings, such as {{'model': model.state_dict()}}, found a "
            f"{type(state).__qualname__}"
        )
    for key, value in state.items():
        if not isinstance(key, str | int):
            raise MismatchError(
                f"the state has the key {key!r} of type {type(key).__name__} in "
                f"{repr(prefix) if prefix else 'its outermost mapping'}: expected str or int; rename it"
            )
        name = f"{prefix}.{key}" if prefix else str(key)
        if _is_inner(value):
            try:
                yield from leaves(value, name)
            except RecursionError:
                if prefix:
                    raise
                raise MismatchError(
                    f"the mapping {name!r} contains itself, or mappings in more levels than Python can "
                    "follow: expected nested mappings of some levels; store a flatter one"
                ) from None
        elif not name and _is_provider(value):
            raise MismatchError(
                f"the state has a {kind_of(value)} under the key '': expected a name for the state provider, "
                "which its keys begin with; rename the key"
            )
        else:
            yield name, value


def map_leaves(state: Mapping[Any, Any], value_of: Callable[[str], Any], prefix: str = "") -> dict[Any, Any]:
    """Returns nested dictionaries with the same keys, and `value_of(name)` instead of each value."""
    found = {}
    for key, value in state.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        found[key] = map_leaves(value, value_of, name) if _is_inner(value) else value_of(name)
    return found


def nested(values: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns nested dictionaries of which `leaves` makes these names; whole numbers in names are ints.

    Raises:
        MismatchError: a name is both that of a value and of a dictionary that is not empty.
    """
    found: dict[Any, Any] = {}
    for name, value in values.items():
        parts, inner = name.split("."), found
        for end in range(1, len(parts)):
            outer = ".".join(parts[:end])
            if outer in values and not is_empty(values[outer]):
                raise MismatchError(
                    f"there are the values {outer!r} and {name!r}, and no nested dictionaries that have "
                    "both: name them in `into`"
                )
            inner = inner.setdefault(_key(parts[end - 1]), {})
        if not is_empty(value) or _key(parts[-1]) not in inner:
            inner[_key(parts[-1])] = value
    return found


def is_empty(value: Any) -> bool:
    """Returns whether a stored value is an empty dictionary, beside which values below its name may be."""
    return isinstance(value, dict) and not value


def _key(text: str) -> str | int:
    return int(text) if _NUMBER.fullmatch(text) else text


def dictionaries(nested: Any) -> Iterator[dict[Any, Any]]:
    """Yields every dictionary in nested dictionaries and lists, the outer ones first."""
    if isinstance(nested, dict):
        yield nested
    if isinstance(nested, dict | list):
        for item in nested.values() if isinstance(nested, dict) else nested:
            yield from dictionaries(item)


def named_values(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the values of nested mappings by name.

    Raises:
        MismatchError: two values have the same name, a name is reserved, or a key is neither str nor int.
    """
    found: dict[str, Any] = {}
    for name, value in leaves(state):
        if name in found:
            raise MismatchError(f"two values of the state are both called {name!r}: rename one of them")
        if is_optimizer_map(name):
            raise MismatchError(f"the name {name!r} is reserved for optimizer maps: rename that value")
        found[name] = value
    return found


class NamedState:
    """The tensors, shards and objects of nested mappings, under the names that `leaves` yields.

    State providers among the values are not part of it; `tree_of` finds them.

    Args:
        mutability: how long the tensors stay unchanged. Objects may always change at once.
    """

    def __init__(self, state: Mapping[Any, Any], mutability: Mutability = Mutability.NOW) -> None:
        self._state = state
        self._mutability = mutability

    def entries(self) -> Iterator[Tensors | ObjectSource]:
        tensors, objects = self._entries()
        yield tensors
        yield from objects

    def _entries(self) -> tuple[Tensors, list[ObjectSource]]:
        tensors, objects = Tensors(), []
        # Here, not in __init__: an error then fails the save on all ranks.
        for name, value in named_values(self._state).items():
            if isinstance(value, Shard):
                place = value.place_of(name)
                tensors.add(name, value.tensor, self._mutability, place, is_frozen(value.tensor))
            elif isinstance(value, torch.Tensor):
                tensors.add(name, value, self._mutability, None, is_frozen(value))
            elif not _is_provider(value):
                objects.append(ObjectSource(name, value, Mutability.NOW))
        return tensors, objects

    def restore(self, reader: StateReader) -> None:
        """Fills the tensors in place, and puts stored objects in the place of those in the mappings."""
        tensors, _ = self._entries()
        reader.read_into({source.key: source for source in tensors.sources()})
        _replace_objects(self._state, reader.read_object)


def _replace_objects(state: Mapping[Any, Any], read: Callable[[str], Any], prefix: str = "") -> None:
    for key, value in state.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if _is_inner(value):
            _replace_objects(value, read, name)
        elif not isinstance(value, Shard | torch.Tensor) and not _is_provider(value):
            if not isinstance(state, MutableMapping):
                raise MismatchError(f"the object {name!r} cannot be restored: its mapping cannot be changed")
            state[key] = read(name)


class Tree:
    """Nested mappings, with the state providers among their values, as one provider.

    Args:
        mutability: how long the tensors that are values stay unchanged.
    """

    def __init__(self, state: Mapping[Any, Any], mutability: Mutability) -> None:
        self._state, self._mutability = state, mutability

    def entries(self) -> Iterator[Entry]:
        found = collect(tree_of(self._state, self._mutability))
        yield found.tensors
        for key, source in zip(found.tail_keys, found.tail, strict=True):
            yield source if source.key == key else renamed(source, key)

    def restore(self, reader: StateReader) -> None:
        """Restores the values in place, and every state provider among them."""
        for name, provider in tree_of(self._state, self._mutability).items():
            provider.restore(reader.below(name))


def tree_of(state: Mapping[Any, Any] | StateProvider, mutability: Mutability) -> dict[str, StateProvider]:
    """Returns the state providers among the values of nested mappings, by name, after the rest of the values.

    Raises:
        MismatchError: as `named_values`.
    """
    if type(state) is not dict and isinstance(state, StateProvider):
        return {"": state}
    found: dict[str, StateProvider] = {"": NamedState(state, mutability)}
    found.update((name, value) for name, value in leaves(state) if _is_provider(value))
    return found
