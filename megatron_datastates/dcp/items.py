"""The write items of a DCP save plan as entries of a save: each is a fragment, or an object."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from megatron_datastates.errors import FormatError, MismatchError
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.values import is_optimizer_map
from megatron_datastates.providers.base import CopyBudget, Mutability, Place, StateReader, Tensors, Write
from megatron_datastates.providers.members import PICKLE, find_members

# Nobody can change a value of these types, and any load accepts them.
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype)

# States of random generators have 5 KB each. The trainer would wait for all that shares their slots.
_CLONED_BYTES = 1 << 20  # at most, of a save


def _is_constant(value: object) -> bool:
    return type(value) in _CONSTANT or (type(value) is tuple and all(map(_is_constant, value)))


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
        archives: dict[bytes, _Archive] = {}
        classify = self._classify() if self._classify is not None else lambda tensor: Mutability.NEVER
        by_value, left_bytes = _serializes_by_value(self._planner), _CLONED_BYTES
        with torch.no_grad():  # a DTensor would make its local tensor a differentiable view
            for item in self._plan.items:
                if is_optimizer_map(item.index.fqn):
                    raise MismatchError(
                        f"the name {item.index.fqn!r} is reserved for optimizer maps: rename that value"
                    )
                if item.type is WriteItemType.BYTE_IO:
                    objects.append(self._object(item, archives, by_value))
                else:
                    tensor, place = _resolved(item, self._planner)
                    mutability = classify(tensor)
                    if mutability is Mutability.NOW and tensor.is_cpu and tensor.nbytes <= left_bytes:
                        left_bytes -= tensor.nbytes
                        tensor, mutability = tensor.clone(), Mutability.NEVER
                    found.add(item.index.fqn, tensor, mutability, place)
        yield found
        yield from objects

    def restore(self, reader: StateReader) -> None:
        """Does nothing: DCP itself requests what it loads."""

    def _object(self, item: WriteItem, archives: dict[bytes, _Archive], by_value: bool) -> PlannedObject:
        planner, constant = self._planner, None
        if by_value:
            assert isinstance(planner, DefaultSavePlanner)
            value = planner.lookup_object(item.index)
            constant = pickle.dumps(value) if _is_constant(value) else None
        changes = self._classify is not None and constant is None
        return PlannedObject(
            item, planner, Mutability.NOW if changes else Mutability.NEVER, archives, constant
        )


def _serializes_by_value(planner: SavePlanner) -> bool:
    """Returns whether equal objects become equal bytes: the planner is DCP's own where that is decided."""
    names = ("resolve_data", "lookup_object", "transform_object")
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name) for name in names
    )


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


class _Archive(NamedTuple):
    """What torch.save has made of an object."""

    data: bytes
    pickle: bytes  # in it; what a load executes


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedObject:
    """An object that the planner serializes with torch.save.

    Attributes:
        archives: of the constants of this save, by their pickles: Megatron-FSDP has a dozen for each
            parameter, and few different ones.
        constant: the pickle of this object, if it is one.
        archive: of this object, if it is made already.
    """

    item: WriteItem
    planner: SavePlanner
    mutability: Mutability
    archives: dict[bytes, _Archive]
    constant: bytes | None
    archive: _Archive | None = None

    kind = Kind.OBJECT

    @property
    def key(self) -> str:
        return self.item.index.fqn

    def snapshot(self, budget: CopyBudget) -> PlannedObject | None:
        """Returns it serialized; None if that takes more memory than the budget has."""
        archive = self._serialized()
        if len(archive.data) > budget.left:
            return None
        budget.left -= len(archive.data)
        return dataclasses.replace(self, mutability=Mutability.NEVER, archive=archive)

    def write(self, write: Write) -> bytes | None:
        """Passes on what the planner serialized, and returns its pickle; of a constant, nothing.

        Raises:
            MismatchError: it is not what torch.save writes.
        """
        archive = self.archive or self._serialized()
        write(archive.data)
        return archive.pickle if self.constant is None else None

    def _serialized(self) -> _Archive:
        if self.constant is None:
            return self._serialize()
        if self.constant not in self.archives:
            self.archives[self.constant] = self._serialize()
        return self.archives[self.constant]

    def _serialize(self) -> _Archive:
        stream = self.planner.resolve_data(self.item)
        if not isinstance(stream, io.BytesIO):
            raise MismatchError(
                f"the plan says that {self.key!r} is an object, and its planner made a "
                f"{type(stream).__qualname__}: expected a BytesIO"
            )
        data = stream.getvalue()  # not a view: CPython 3.12 crashes if it collects one before its BytesIO
        try:
            found = find_members(stream)[PICKLE]
        except FormatError as error:
            raise MismatchError(
                f"the bytes of the object {self.key!r} cannot be stored: {error}. A planner has to serialize "
                "objects with torch.save, as DCP's own does"
            ) from error
        return _Archive(data, data[found.offset : found.offset + found.size])
