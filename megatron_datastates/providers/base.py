"""What every provider offers."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch


class Mutability(enum.Enum):
    """Until when the bytes of a source stay as they are."""

    NOW = "may change as soon as the save returns"  # copied, or serialized, before that
    AT_FENCE = "do not change before the next fence"  # copied behind the trainer, fenced
    NEVER = "belong to nobody else"  # copied at any time


class Place(NamedTuple):
    """The part of a global tensor that a fragment is, in elements."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]  # may have more dimensions (of size 1) than the tensor in memory


@dataclasses.dataclass(slots=True)
class Tensors:
    """Tensors in memory, each of which is one fragment. Column by column: every save goes through them anew.

    Element i of each list is about tensor i.
    """

    keys: list[str] = dataclasses.field(default_factory=list)
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    mutability: list[Mutability] = dataclasses.field(default_factory=list)
    places: list[Place | None] = dataclasses.field(default_factory=list)  # None: a global tensor of its own

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: str, tensor: torch.Tensor, mutability: Mutability, place: Place | None = None) -> None:
        self.keys.append(key)
        self.tensors.append(tensor)
        self.mutability.append(mutability)
        self.places.append(place)

    def extend(self, others: Tensors) -> None:
        self.keys.extend(others.keys)
        self.tensors.extend(others.tensors)
        self.mutability.extend(others.mutability)
        self.places.extend(others.places)


class ObjectSource(Protocol):
    """A Python object; its size is known when it has been serialized."""

    @property
    def key(self) -> str: ...

    def secured(self) -> ObjectSource:
        """The same object as it is now, which nobody changes any more."""
        ...

    def serialize(self) -> bytes:
        """Called on another thread, of what `secured` gave."""
        ...


class StateProvider(Protocol):
    """Yields one kind of state."""

    def tensors(self) -> Tensors: ...

    def objects(self) -> Iterable[ObjectSource]: ...


class CompositeProvider:
    """Several providers as one."""

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
