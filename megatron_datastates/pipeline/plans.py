"""What is known of a state before it is saved again: its layout in the file, and what is copied where."""

from __future__ import annotations

import dataclasses
from operator import attrgetter, eq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.engine.exchange import describe
from megatron_datastates.errors import MismatchError
from megatron_datastates.format.values import Fragment
from megatron_datastates.plan.boxes import Runs, strided_runs
from megatron_datastates.plan.copies import CopyPlan, plan_copies
from megatron_datastates.plan.layout import Layout, plan_layout
from megatron_datastates.providers.base import Mutability, Place, Tensors
from megatron_datastates.providers.tensors import dtype_name

Words = npt.NDArray[np.uint64]
_facts = attrgetter("dtype", "shape", "device")


@dataclasses.dataclass(frozen=True)
class Structure:
    """All about tensors but where they are: tensors that have the same structure are saved alike.

    Element i of each list is about tensor i.
    """

    keys: list[str]
    mutability: list[Mutability]
    places: list[Place | None]
    facts: list[Any]  # dtype, shape and device
    strides: list[tuple[int, ...]]  # elements
    description: bytes | None  # of dtypes, devices, shapes and strides, if there is one

    def is_of(self, tensors: Tensors, description: bytes | None) -> bool:
        """Whether `tensors` have this structure. `description` as in engine/exchange.py, or None.

        The trainer waits for this at every save, so what loops there are, are the interpreter's own: about a
        microsecond a tensor, or one comparison of bytes where both have a description.
        """
        if (self.keys, self.mutability, self.places) != (tensors.keys, tensors.mutability, tensors.places):
            return False
        if self.description is not None and description is not None:
            return self.description == description
        return all(map(eq, map(_facts, tensors.tensors), self.facts)) and all(
            map(eq, map(torch.Tensor.stride, tensors.tensors), self.strides)
        )

    def fragments(self) -> list[Fragment]:
        """One of each tensor.

        Raises:
            MismatchError: a tensor has another number of elements than its place, or is neither on the host
                nor on a CUDA device.
        """
        return [_fragment(*one) for one in zip(self.keys, self.facts, self.places, strict=True)]

    def runs(self) -> list[Runs]:
        """Where the bytes of each tensor are, relative to its first element."""
        return [
            strided_runs(shape, strides, dtype.itemsize)
            for (dtype, shape, _), strides in zip(self.facts, self.strides, strict=True)
        ]

    def eager(self) -> list[bool]:
        """Which tensors must be copied before the trainer goes on."""
        return [mutability is Mutability.NOW for mutability in self.mutability]

    def devices(self) -> list[int | None]:
        """The CUDA device that each tensor is on; None for host memory."""
        return [device.index if device.type == "cuda" else None for _, _, device in self.facts]


def structure_of(tensors: Tensors, description: bytes | None = None) -> Structure:
    """The structure of `tensors`.

    Raises:
        MismatchError: a tensor is sparse, or otherwise without strides.
    """
    strides = []
    for key, tensor in zip(tensors.keys, tensors.tensors, strict=True):
        if tensor.layout is not torch.strided:
            raise MismatchError(f"tensor {key!r} is {tensor.layout}: only strided tensors can be saved")
        strides.append(tensor.stride())
    facts = list(map(_facts, tensors.tensors))
    return Structure(tensors.keys, tensors.mutability, tensors.places, facts, strides, description)


def _fragment(key: str, facts: tuple[torch.dtype, torch.Size, torch.device], place: Place | None) -> Fragment:
    dtype, shape, device = facts
    if device.type not in ("cpu", "cuda"):
        raise MismatchError(f"tensor {key!r} is on {device}: only host and CUDA tensors can be saved")
    if place is None:
        place = Place(tuple(shape), (0,) * len(shape), tuple(shape))
    fragment = Fragment(key, dtype_name(dtype), *place)
    if fragment.bytes != shape.numel() * dtype.itemsize:
        raise MismatchError(f"tensor {key!r}: cannot store {tuple(shape)} as shape {place.shape}")
    return fragment


def are_plain(tensors: Tensors, has_complex: bool = True) -> bool:
    """Whether the bytes in memory are the values: no view is negated or, if some are complex, conjugated."""
    views = tensors.tensors
    return not any(map(torch.Tensor.is_neg, views)) and not (
        has_complex and any(map(torch.Tensor.is_conj, views))
    )


def with_plain_values(tensors: Tensors) -> Tensors:
    """The same, with a tensor of its own in place of a negated or conjugated view."""
    plain = Tensors()
    columns = (tensors.keys, tensors.tensors, tensors.mutability, tensors.places)
    for key, tensor, mutability, place in zip(*columns, strict=True):
        if tensor.is_neg() or tensor.is_conj():
            tensor, mutability = tensor.resolve_conj().resolve_neg(), Mutability.NEVER  # nobody else has it
        plain.add(key, tensor, mutability, place)
    return plain


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where tensors are now. Element i is about tensor i."""

    addresses: Words  # of the first elements
    owners: list[Any]  # keep the memory: a tensor may be given other memory while this is being copied


def look_up(tensors: Tensors, addresses: Words | None = None) -> Memory:
    """Where `tensors` are: at `addresses`, if these are known. The trainer waits for this, too.

    Raises:
        MismatchError: a tensor has no memory at present.
    """
    storages = list(map(torch.Tensor.untyped_storage, tensors.tensors))
    if addresses is None:
        addresses = np.fromiter(map(torch.Tensor.data_ptr, tensors.tensors), np.uint64, len(tensors))
    if 0 in map(torch.UntypedStorage.nbytes, storages) or not addresses.all():
        _check_memory(tensors, storages, addresses)
    return Memory(addresses, storages)


def _check_memory(tensors: Tensors, storages: list[Any], addresses: Words) -> None:
    columns = (tensors.keys, tensors.tensors, storages, addresses.tolist())
    for key, tensor, storage, address in zip(*columns, strict=True):
        if tensor.numel() and not storage.nbytes():
            raise MismatchError(
                f"tensor {key!r} has no memory: it was offloaded; bring it back before a save"
            )
        if tensor.numel() and not address:
            raise MismatchError(
                f"tensor {key!r} has no memory of its own: it is a {type(tensor).__qualname__} that wraps "
                "others; save those"
            )


@dataclasses.dataclass
class StatePlan:
    """Of one structure: names, shapes, memory layouts, devices, and what may change when."""

    structure: Structure
    object_keys: list[str]
    layout: Layout
    copies: CopyPlan
    eager_bytes: int  # of tensors: copied before the save returns
    lazy_bytes: int
    object_bytes: int = 0  # as serialized in the last save: a guess for the next


def plan_state(tensors: Tensors, object_keys: list[str], description: bytes | None = None) -> StatePlan:
    """Plans saves of `tensors` (whose `description` may be known) and of objects with these keys.

    Raises:
        MismatchError: a tensor cannot be stored as its place says.
        FormatError: fragments of one key contradict each other, or two objects have one key.
    """
    structure = structure_of(tensors, description)
    fragments, eager = structure.fragments(), structure.eager()
    layout = plan_layout(fragments, eager, object_keys)
    copies = plan_copies(layout, structure.runs(), eager, structure.devices())
    sizes = [fragment.bytes for fragment in fragments]
    eager_bytes = sum(size for size, first in zip(sizes, eager, strict=True) if first)
    return StatePlan(structure, object_keys, layout, copies, eager_bytes, sum(sizes) - eager_bytes)


class Plans:
    """The plans of the structures saved last. Used by the trainer's thread alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._plans: list[StatePlan] = []  # the most recent is last

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, tensors: Tensors, object_keys: list[str]) -> tuple[StatePlan, Memory]:
        """The plan for `tensors`, made if there is none yet, and where they are.

        Raises:
            MismatchError: as plan_state and look_up.
            FormatError: as plan_state.
        """
        seen = describe(tensors.tensors)
        if not are_plain(tensors, seen is None or seen.has_complex):
            tensors = with_plain_values(tensors)
            seen = describe(tensors.tensors)
        addresses, description = (seen.addresses, seen.description) if seen is not None else (None, None)
        plan = next((p for p in reversed(self._plans) if _fits(p, tensors, object_keys, description)), None)
        if plan is None:
            plan = plan_state(tensors, object_keys, description)
        self._plans = [*(p for p in self._plans if p is not plan), plan][-self._most :]
        return plan, look_up(tensors, addresses)


def _fits(plan: StatePlan, tensors: Tensors, object_keys: list[str], description: bytes | None) -> bool:
    return plan.object_keys == object_keys and plan.structure.is_of(tensors, description)
