"""The write items of a DCP save plan as entries of a save: each is a fragment, or an object."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from megatron_datastates.errors import FormatError, MismatchError
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.values import is_optimizer_map
from megatron_datastates.providers.base import CopyBudget, Mutability, Place, StateReader, Tensors, Write
from megatron_datastates.providers.members import PICKLE, find_members

_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype)


def _never(tensor: torch.Tensor) -> Mutability:
    return Mutability.NEVER


class PlannedState:
    """What one rank's final plan stores. The planner looks each item up, and may transform it.

    Args:
        classify: returns when a tensor may change. Without it, nothing changes until the save is over: DCP's
            own call waits for it, or has copied the state before.
    """

    def __init__(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        classify: Callable[[], Callable[[torch.Tensor], Mutability]] | None = None,
    ) -> None:
        self._plan, self._planner, self._classify = plan, planner, classify

    def entries(self) -> Iterator[Tensors | PlannedObject]:
        """Yields the tensors, all at once, then the objects.

        Raises:
            MismatchError: an item is reserved, or is not what the plan says.
        """
        found, objects = Tensors(), []
        classify = self._classify() if self._classify is not None else _never
        for item in self._plan.items:
            if is_optimizer_map(item.index.fqn):
                raise MismatchError(
                    f"the name {item.index.fqn!r} is reserved for optimizer maps: rename that value"
                )
            if item.type is WriteItemType.BYTE_IO:
                changes = self._classify is not None and not self._is_constant(item)
                mutability = Mutability.NOW if changes else Mutability.NEVER
                objects.append(PlannedObject(item, self._planner, mutability))
            else:
                tensor, place = _resolved(item, self._planner)
                found.add(item.index.fqn, tensor, classify(tensor), place)
        yield found
        yield from objects

    def restore(self, reader: StateReader) -> None:
        """Does nothing: DCP itself requests what it loads."""

    def _is_constant(self, item: WriteItem) -> bool:
        """Returns whether an object is a plain value, as most are: nobody can change it."""
        look = getattr(self._planner, "lookup_object", None)  # of DCP's own planner
        return look is not None and type(look(item.index)) in _CONSTANT


def _resolved(item: WriteItem, planner: SavePlanner) -> tuple[torch.Tensor, Place]:
    tensor, planned = planner.resolve_data(item), item.tensor_data
    if planned is None or not isinstance(tensor, torch.Tensor):
        raise MismatchError(
            f"the plan says that {item.index.fqn!r} is a tensor, and its planner made a "
            f"{type(tensor).__qualname__}"
        )
    place = Place(tuple(planned.size), tuple(planned.chunk.offsets), tuple(planned.chunk.sizes))
    if tuple(tensor.shape) != place.shape:
        raise MismatchError(
            f"tensor {item.index.fqn!r} has shape {tuple(tensor.shape)}, and the plan says {place.shape}"
        )
    return tensor.detach(), place


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedObject:
    """An object that the planner serializes with torch.save."""

    item: WriteItem
    planner: SavePlanner
    mutability: Mutability

    kind = Kind.OBJECT

    @property
    def key(self) -> str:
        return self.item.index.fqn

    def snapshot(self, budget: CopyBudget) -> Serialized | None:
        """Returns it serialized; None if that takes more memory than the budget has."""
        found = Serialized(self.key, self._serialized())
        size = found.stream.seek(0, io.SEEK_END)
        if size > budget.left:
            return None
        budget.left -= size
        return found

    def write(self, write: Write) -> bytes:
        """Passes on what the planner serialized, and returns its pickle.

        Raises:
            MismatchError: it is not what torch.save writes.
        """
        return Serialized(self.key, self._serialized()).write(write)

    def _serialized(self) -> io.BytesIO:
        stream = self.planner.resolve_data(self.item)
        if not isinstance(stream, io.BytesIO):
            raise MismatchError(
                f"the plan says that {self.key!r} is an object, and its planner made a "
                f"{type(stream).__qualname__}: expected a BytesIO"
            )
        return stream


@dataclasses.dataclass(frozen=True, slots=True)
class Serialized:
    """The bytes of an object that a planner has serialized."""

    key: str
    stream: io.BytesIO

    kind = Kind.OBJECT
    mutability = Mutability.NEVER

    def snapshot(self, budget: CopyBudget) -> Serialized:
        """Returns itself: it does not change."""
        return self

    def write(self, write: Write) -> bytes:
        """Passes it on, and returns its pickle. Raises as PlannedObject.write."""
        # Not a view: CPython 3.12 crashes if it collects one before its BytesIO.
        data = self.stream.getvalue()
        try:
            pickle = find_members(self.stream)[PICKLE]
        except FormatError as error:
            raise MismatchError(
                f"the bytes of the object {self.key!r} cannot be stored: {error}. A planner has to serialize "
                "objects with torch.save, as DCP's own does"
            ) from error
        write(data)
        return data[pickle.offset : pickle.offset + pickle.size]
