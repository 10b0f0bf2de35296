"""The interface of state providers, and the values that they return."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch


class Mutability(enum.Enum):
    """How long the bytes of a source stay unchanged."""

    NOW = "may change as soon as the save returns"  # so they are copied or serialized before it returns
    AT_FENCE = "do not change before the next fence"  # copied while the trainer runs on to the fence
    NEVER = "never change"  # nobody else has them: copied at any time


class Place(NamedTuple):
    """Where a fragment lies in its global tensor, in elements."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]  # may have more dimensions (of size 1) than the tensor in memory


@dataclasses.dataclass(slots=True)
class Tensors:
    """Tensors in memory, each of which is one fragment: element i of each list describes tensor i.

    Lists and not objects, since every save compares all of them with the last one's.
    """

    keys: list[str] = dataclasses.field(default_factory=list)
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    mutability: list[Mutability] = dataclasses.field(default_factory=list)
    places: list[Place | None] = dataclasses.field(default_factory=list)  # None: the whole global tensor

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: str, tensor: torch.Tensor, mutability: Mutability, place: Place | None = None) -> None:
        """Adds one tensor; without a place it is the whole global tensor `key`."""
        self.keys.append(key)
        self.tensors.append(tensor)
        self.mutability.append(mutability)
        self.places.append(place)

    def extend(self, others: Tensors) -> None:
        """Adds all tensors of `others`, in their order."""
        self.keys.extend(others.keys)
        self.tensors.extend(others.tensors)
        self.mutability.extend(others.mutability)
        self.places.extend(others.places)


class ObjectSource(Protocol):
    """A Python object. Its size is unknown until it is serialized."""

    @property
    def key(self) -> str: ...

    def snapshot(self) -> ObjectSource:
        """Returns the object as it is now: nothing that its owner does later changes what is returned."""
        ...

    def serialize(self) -> bytes:
        """Returns the object's bytes. Called on the finishing thread, only on what `snapshot` returned."""
        ...


class StateProvider(Protocol):
    """One kind of state, as tensors and objects under keys that are unique on this rank."""

    def tensors(self) -> Tensors:
        """Returns the tensors as they are at the time of the call."""
        ...

    def objects(self) -> Iterable[ObjectSource]:
        """Returns the objects as they are at the time of the call."""
        ...


class CompositeProvider:
    """Several providers as one, in their order."""

    def __init__(self, *providers: StateProvider) -> None:
        self._providers = providers

    def tensors(self) -> Tensors:
        found = Tensors()
        for provider in self._providers:
            found.extend(provider.tensors())
        return found

    def objects(self) -> Iterator[ObjectSource]:
        for provider in self._providers:
            yield from provider.objects()
