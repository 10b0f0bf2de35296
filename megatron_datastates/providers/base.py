"""What every provider offers."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Protocol

from megatron_datastates.format.values import Fragment
from megatron_datastates.plan.boxes import Runs


class Mutability(enum.Enum):
    """Until when the bytes of a source stay as they are."""

    NOW = "may change as soon as the save returns"  # copied, or serialized, before that
    AT_FENCE = "do not change before the next fence"  # copied behind the trainer, fenced
    NEVER = "belong to nobody else"  # copied at any time


class TensorSource(Protocol):
    """One fragment whose size is known and whose bytes lie in memory."""

    @property
    def fragment(self) -> Fragment: ...

    @property
    def mutability(self) -> Mutability: ...

    @property
    def device(self) -> int | None:
        """The CUDA device whose memory the addresses are; None for host memory."""
        ...

    @property
    def owner(self) -> object:
        """Keeps the memory alive as long as it is referenced."""
        ...

    def made_eager(self) -> TensorSource:
        """The same source, copied at once although it could wait."""
        ...

    def runs(self) -> Runs:
        """Where the bytes are, now: asked anew at every save."""
        ...


class ObjectSource(Protocol):
    """A Python object; its size is known when it has been serialized."""

    @property
    def key(self) -> str: ...

    @property
    def mutability(self) -> Mutability: ...

    def serialize(self) -> bytes:
        """May be called on another thread if the mutability is NEVER."""
        ...


class StateProvider(Protocol):
    """Yields one kind of state."""

    def tensors(self) -> Iterable[TensorSource]: ...

    def objects(self) -> Iterable[ObjectSource]: ...


class CompositeProvider:
    """Several providers as one."""

    def __init__(self, *providers: StateProvider) -> None:
        self._providers = providers

    def tensors(self) -> Iterator[TensorSource]:
        for provider in self._providers:
            yield from provider.tensors()

    def objects(self) -> Iterator[ObjectSource]:
        for provider in self._providers:
            yield from provider.objects()
