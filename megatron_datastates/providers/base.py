"""The interface of state providers, and the values that they yield.

What belongs here: what every provider and every consumer of providers must know. What does not: kinds of
objects and streams (objects.py, streams.py), and putting providers together (collect.py).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from megatron_datastates.errors import MismatchError, OptionError
from megatron_datastates.format.tail import Kind

if TYPE_CHECKING:
    import torch

# Appends a buffer (bytes, a memoryview, a numpy array, ...) and returns its size in bytes. The buffer may
# change once the call has returned. Waits while staging memory is full.
Write = Callable[[Any], int]


class Mutability(enum.Enum):
    """How long the bytes of a source stay unchanged."""

    NOW = "may change as soon as the save returns"  # so they are copied or serialized before it returns
    AT_FENCE = "do not change before the next fence"  # copied while the trainer runs on to the fence
    NEVER = "never change"  # nobody else has them: copied at any time


def bad_mutability(what: str, found: object) -> OptionError:
    """Returns the error of a value that is no Mutability."""
    return OptionError(
        f"the mutability of {what} is {found!r}: expected Mutability.NOW, Mutability.AT_FENCE or "
        "Mutability.NEVER (megatron_datastates.providers.Mutability)"
    )


class Place(NamedTuple):
    """Where a fragment lies in its global tensor, in elements."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]  # may have more dimensions (of size 1) than the tensor in memory


class TensorSource(NamedTuple):
    """One tensor in host or device memory.

    Attributes:
        key: name of the global tensor, relative to the provider's name.
        tensor: strided, of any shape, and of any dtype but quantized ones and those whose elements have less
            than a byte or no meaning (`uint4`, `bits8`).
        mutability: how long its values stay unchanged.
        place: the part of the global tensor that it is; None for the whole.
        stable: whether its values are expected to be the same at the next save. Nothing relies on it: it
            decides which tensors share a data file, which is written again as soon as one of them differs.
    """

    key: str
    tensor: torch.Tensor
    mutability: Mutability = Mutability.NOW
    place: Place | None = None
    stable: bool = False


@dataclasses.dataclass(slots=True)
class Tensors:
    """Many tensors in memory, each of which is one fragment: element i of each list describes tensor i.

    Lists and not objects, since every save compares all of them with the last one's.
    """

    keys: list[str] = dataclasses.field(default_factory=list)
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    mutability: list[Mutability] = dataclasses.field(default_factory=list)
    places: list[Place | None] = dataclasses.field(default_factory=list)  # None: the whole global tensor
    stable: list[bool] = dataclasses.field(default_factory=list)  # as in TensorSource; if not given, none is
    # What engine.exchange.describe finds, if it is known and no tensor is a negated or conjugated view.
    described: Any = None

    def __post_init__(self) -> None:
        self.stable = self.stable or [False] * len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def add(
        self,
        key: str,
        tensor: torch.Tensor,
        mutability: Mutability,
        place: Place | None = None,
        stable: bool = False,
    ) -> None:
        """Adds one tensor; without a place it is the whole global tensor `key`."""
        self.keys.append(key)
        self.tensors.append(tensor)
        self.mutability.append(mutability)
        self.places.append(place)
        self.stable.append(stable)
        self.described = None

    def check_lengths(self) -> None:
        """Raises MismatchError if a list is shorter or longer than the keys: a tensor would be left out."""
        for name in ("tensors", "mutability", "places", "stable"):
            found = len(getattr(self, name))
            if found != len(self.keys):
                raise MismatchError(
                    f"its Tensors have {len(self.keys)} keys, and {name} for {found}: expected one for each"
                )

    def sources(self) -> Iterator[TensorSource]:
        """Yields the tensors one by one. Raises as `check_lengths`."""
        self.check_lengths()
        return map(TensorSource, self.keys, self.tensors, self.mutability, self.places, self.stable)

    def extend(self, others: Tensors, prefix: str = "") -> None:
        """Adds all tensors of `others`, in their order, with `prefix` before their keys.

        Raises as `check_lengths`.
        """
        others.check_lengths()
        self.described = None if self.keys else others.described
        self.keys.extend([prefix + key for key in others.keys] if prefix else others.keys)
        self.tensors.extend(others.tensors)
        self.mutability.extend(others.mutability)
        self.places.extend(others.places)
        self.stable.extend(others.stable)


@dataclasses.dataclass(slots=True)
class CopyBudget:
    """The bytes of host memory that copies of mutable objects may still take in one save.

    Attributes:
        left: bytes; a snapshot subtracts what its copies take.
    """

    left: int


class Encoding(NamedTuple):
    """How frames are encoded on their way to the tail (format/codecs.py)."""

    codec: int
    item_bytes: int
    level: int


class TailSource(Protocol):
    """Bytes whose number is unknown until they have been written: an object, a stream or an encoded tensor.

    They go to the tail of the data file, after its tensors, while those are being copied and written. One
    that has an attribute `encoding` that is not None is encoded on the way.
    """

    @property
    def key(self) -> str: ...

    @property
    def mutability(self) -> Mutability: ...

    @property
    def kind(self) -> Kind:
        """What the bytes are."""
        ...

    def snapshot(self, budget: CopyBudget) -> TailSource | None:
        """Returns a source of the same bytes that nothing changes; None if that would exceed the budget.

        Called only if the mutability is NOW. Without a snapshot the source is written before the save
        returns.
        """
        ...

    def write(self, write: Write) -> bytes | None:
        """Passes all bytes to `write`, in order.

        Called once, on the save's finishing thread or, without a snapshot, on the trainer's.

        Returns:
            The pickle that a load would execute, which is then checked; None if there is none.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class EmptyObjects:
    """Many objects that are [None], as Megatron has some for each layer: for its modules without extra state.

    Attributes:
        keys: of all of them, relative to the provider's name. The same tuple in the next save is fastest.
    """

    keys: tuple[str, ...]


# What a provider yields. A sequence of many tensors is fastest as one `Tensors`.
Entry = Tensors | TensorSource | TailSource | EmptyObjects


class StateReader(Protocol):
    """What a checkpoint has under a provider's name. Keys are relative to that name."""

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """The global shape of each tensor, in elements."""
        ...

    @property
    def objects(self) -> Iterable[str]: ...

    @property
    def streams(self) -> Iterable[str]: ...

    def read_into(self, targets: Mapping[str, torch.Tensor | TensorSource]) -> None:
        """Fills tensors in place, each with the whole global tensor or the part that its source names."""
        ...

    def read_object(self, key: str) -> Any:
        """Returns an object, unpickled with the allow list."""
        ...

    def open_stream(self, key: str) -> Iterator[memoryview]:
        """Yields the bytes of a stream, checked, in buffers of at most 16 MiB."""
        ...

    def below(self, name: str) -> StateReader:
        """Returns a reader of what is under `name`, relative to this one; of all of it for ""."""
        ...


@runtime_checkable
class StateProvider(Protocol):
    """One kind of state: yields what a save stores, and takes back what a load finds.

    Its keys begin with its name, which its user chooses: the key in a tree of providers
    (`{"model": ..., "data": MyProvider()}`), or its attribute `name` where providers are listed.
    """

    def entries(self) -> Iterable[Entry]:
        """Yields the state as it is at the time of the call, under keys that are unique on this rank.

        Called on the trainer's thread. An exception fails the save, on all ranks.
        """
        ...

    def restore(self, reader: StateReader) -> None:
        """Restores the state from a checkpoint. An exception fails the load, on all ranks."""
        ...
