"""What one save learns of a state for the next: its layout in the file, and which bytes are copied where."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from operator import attrgetter, eq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.engine.exchange import Described, Facts, describe, measured
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.errors import MismatchError
from megatron_datastates.format.strides import footprint_elements
from megatron_datastates.format.tables import Words
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.values import Fragment
from megatron_datastates.plan.boxes import PairedSpans, contiguous_strides, paired_spans
from megatron_datastates.plan.copies import CopyPlan, plan_copies
from megatron_datastates.plan.layout import Layout, TailItem, plan_layout
from megatron_datastates.providers.base import Mutability, Place, TailSource, Tensors, bad_mutability
from megatron_datastates.providers.collect import Collected
from megatron_datastates.providers.tensors import check_dtype, dtype_name

_facts = attrgetter("dtype", "shape", "device")
_DESCRIBED_TWICE = (torch.int8, torch.uint8)
_LARGEST_OFFSET = 1 << 40  # bytes; hosts' memory is at higher addresses


@dataclasses.dataclass(frozen=True)
class Structure:
    """Everything that a plan depends on: all that describes tensors, except their addresses.

    Element i of each list describes tensor i.
    """

    keys: list[str]
    mutability: list[Mutability]
    places: list[Place | None]
    facts: list[Any]  # dtype, shape and device
    strides: list[tuple[int, ...]]  # elements
    stable: list[bool]  # is not expected to change
    description: bytes | None  # of dtypes, devices, shapes and strides, if there is one

    @functools.cached_property
    def extents(self) -> Words:
        """Bytes from the first element of each tensor to the end of its last one; 0 if it has none."""
        reached = [
            footprint_elements(fact[1], strides)
            for fact, strides in zip(self.facts, self.strides, strict=True)
        ]
        items = [dtype.itemsize for dtype, _, _ in self.facts]
        return np.array(reached, np.uint64) * np.array(items, np.uint64)

    @functools.cached_property
    def ambiguous(self) -> list[tuple[int, torch.dtype]]:
        """Numbers and dtypes of the tensors whose description others share: uint4 is described as uint8."""
        return [(i, dtype) for i, (dtype, _, _) in enumerate(self.facts) if dtype in _DESCRIBED_TWICE]

    def matches(self, tensors: Tensors, description: bytes | None) -> bool:
        """Returns whether `tensors` have this structure.

        The trainer waits for this at every save. With descriptions it is one comparison of bytes; without,
        loops in C (`map`) take about a microsecond a tensor.

        Args:
            description: of `tensors`, as engine/exchange.py makes it; None if torch is too old for one.
        """
        ours = (self.keys, self.mutability, self.places, self.stable)
        if ours != (tensors.keys, tensors.mutability, tensors.places, tensors.stable):
            return False
        if self.description is not None and description is not None:
            return self.description == description and all(
                tensors.tensors[i].dtype is dtype for i, dtype in self.ambiguous
            )
        return all(map(eq, map(_facts, tensors.tensors), self.facts)) and all(
            map(eq, map(torch.Tensor.stride, tensors.tensors), self.strides)
        )

    def fragments(self) -> list[Fragment]:
        """Returns one fragment for each tensor.

        Raises:
            MismatchError: a tensor and its place differ in the number of elements, or a tensor is neither on
                the host nor on a CUDA device.
        """
        return [_fragment(*one) for one in zip(self.keys, self.facts, self.places, strict=True)]

    def spans(self) -> list[PairedSpans]:
        """Returns where the bytes of each tensor are, from its first element on; see plan_copies."""
        return [
            paired_spans(shape, strides, contiguous_strides(shape), dtype.itemsize)
            for (dtype, shape, _), strides in zip(self.facts, self.strides, strict=True)
        ]

    def eager(self) -> list[bool]:
        """Returns, for each tensor, whether it has to be copied before the save returns.

        Raises:
            OptionError: a provider passed something that is no Mutability.
        """
        for key, mutability in zip(self.keys, self.mutability, strict=True):
            if not isinstance(mutability, Mutability):
                raise bad_mutability(repr(key), mutability)
        return [mutability is Mutability.NOW for mutability in self.mutability]

    def devices(self) -> list[int | None]:
        """Returns the number of the CUDA device that each tensor is on; None for host memory."""
        return [device.index if device.type == "cuda" else None for _, _, device in self.facts]


def structure_of(tensors: Tensors, description: bytes | None) -> Structure:
    """Returns the structure of `tensors`.

    Args:
        description: as in Structure.matches.

    Raises:
        MismatchError: a tensor is sparse, or otherwise without strides.
    """
    strides = []
    for key, tensor in zip(tensors.keys, tensors.tensors, strict=True):
        if tensor.layout is not torch.strided:
            raise MismatchError(
                f"tensor {key!r} has layout {tensor.layout}: only strided tensors can be saved"
            )
        strides.append(tensor.stride())
    facts = list(map(_facts, tensors.tensors))
    return Structure(
        tensors.keys, tensors.mutability, tensors.places, facts, strides, tensors.stable, description
    )


def _fragment(key: str, facts: tuple[torch.dtype, torch.Size, torch.device], place: Place | None) -> Fragment:
    dtype, shape, device = facts
    if device.type not in ("cpu", "cuda"):
        raise MismatchError(f"tensor {key!r} is on {device}: only host and CUDA tensors can be saved")
    check_dtype(key, dtype)
    if place is None:
        place = Place(tuple(shape), (0,) * len(shape), tuple(shape))
    fragment = Fragment(key, dtype_name(dtype), *place)
    if fragment.bytes != shape.numel() * dtype.itemsize:
        raise MismatchError(
            f"tensor {key!r} has shape {tuple(shape)}: expected as many elements as its place of shape "
            f"{place.shape}"
        )
    return fragment


def has_unresolved_views(tensors: list[torch.Tensor], facts: Facts | None) -> bool:
    """Returns whether a tensor is a negated or conjugated view: then its bytes in memory are not its values.

    Args:
        facts: what engine/exchange.py has found out about the tensors.
    """
    if facts is not None and not (facts.has_negative or facts.has_complex):
        return False
    return any(map(torch.Tensor.is_neg, tensors)) or any(map(torch.Tensor.is_conj, tensors))


def resolve_views(tensors: Tensors) -> Tensors:
    """Returns the tensors with a copy instead of each negated or conjugated view."""
    resolved = Tensors()
    columns = (tensors.keys, tensors.tensors, tensors.mutability, tensors.places, tensors.stable)
    for key, tensor, mutability, place, stable in zip(*columns, strict=True):
        if tensor.is_neg() or tensor.is_conj():
            tensor = tensor.resolve_conj().resolve_neg()
            mutability = Mutability.NEVER  # nobody else has the copy
        resolved.add(key, tensor, mutability, place, stable)
    return resolved


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where tensors are at the time of a save. Element i is about tensor i."""

    addresses: Words  # of the first elements
    owners: list[Any]  # storages, held until they are copied: a tensor may be given another one meanwhile

    def of(self, members: Sequence[int] | None) -> Memory:
        """Returns where the tensors with these numbers are; None: where all are."""
        if members is None:
            return self
        return Memory(self.addresses[members], [self.owners[i] for i in members])


def locate(tensors: Tensors, seen: Described | None = None) -> Memory:
    """Returns where `tensors` are. The trainer waits for this at every save.

    Args:
        seen: what engine/exchange.py has found out about them already.

    Raises:
        MismatchError: a tensor has elements but no memory.
    """
    if seen is not None:
        addresses, storages = seen.addresses, seen.storages
    else:
        addresses = np.fromiter(map(torch.Tensor.data_ptr, tensors.tensors), np.uint64, len(tensors))
        storages = list(map(torch.Tensor.untyped_storage, tensors.tensors))
    # A tensor in a storage without memory is at its offset from 0.
    if len(addresses) and addresses.min() < _LARGEST_OFFSET:
        _check_memory(tensors, storages, addresses)
    return Memory(addresses, storages)


def _check_memory(tensors: Tensors, storages: list[Any], addresses: Words) -> None:
    columns = (tensors.keys, tensors.tensors, storages, addresses.tolist())
    for key, tensor, storage, address in zip(*columns, strict=True):
        if tensor.numel() and not storage.nbytes():
            raise MismatchError(
                f"tensor {key!r} has no memory: it was offloaded; bring it back before the save"
            )
        if tensor.numel() and not address:
            raise MismatchError(
                f"tensor {key!r} has no memory of its own: it is a {type(tensor).__qualname__} that wraps "
                "other tensors; save those instead, as a ds.Shard where they are parts, or a DTensor with "
                "megatron_datastates.dcp"
            )


def check_bounds(structure: Structure, tensors: Tensors, memory: Memory) -> None:
    """Checks that tensors are inside their storages, which programs can shrink: torch does not look, either.

    Raises:
        MismatchError: one is not.
    """
    starts, sizes = measured(memory.owners)
    extents = structure.extents
    is_outside = (memory.addresses < starts) | (memory.addresses + extents > starts + sizes)
    for i in np.flatnonzero(is_outside & (extents > 0)).tolist():
        raise MismatchError(
            f"tensor {tensors.keys[i]!r} ends beyond its storage of {sizes[i]} bytes: that was resized; "
            "resize it back before the save"
        )


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """Of one data file: which tensors it holds, and what is copied where."""

    members: list[int] | None  # positions among all tensors; None: all
    layout: Layout
    copies: CopyPlan
    has_eager: bool  # some of it is copied before the save returns


@dataclasses.dataclass
class StatePlan:
    """The plan for saves of one structure (names, shapes, memory layouts, devices, what may change when)."""

    structure: Structure
    tail: list[TailItem]
    least_stable: int | None
    first: FilePlan  # has the tail
    stable: FilePlan | None  # of the tensors that are not expected to change
    # Element i of each array is about tensor i.
    sizes: npt.NDArray[np.int64]  # bytes
    eager: npt.NDArray[np.bool_]  # copied before the save returns; the others are lazy
    on_device: npt.NDArray[np.bool_]
    tail_bytes: int = 0  # of the last save: a guess for the next
    names: list[str] | None = None  # of the providers whose keys were compared with the rest (check_names)
    # Addresses at which all tensors were inside their storages, and how much had been freed until then.
    checked: tuple[Words, int] | None = None

    @property
    def eager_bytes(self) -> int:
        """Returns the bytes of tensors that are copied before the save returns."""
        return int(self.sizes[self.eager].sum())

    @property
    def lazy_bytes(self) -> int:
        """Returns the bytes of the other tensors."""
        return int(self.sizes[~self.eager].sum())

    @property
    def layout(self) -> Layout:
        return self.first.layout

    def is_checked(self, memory: Memory) -> bool:
        """Returns whether nothing has moved or was freed since all tensors were inside their storages."""
        if self.checked is None:
            return False
        addresses, frees = self.checked
        return frees == FENCE.frees and np.array_equal(addresses, memory.addresses)

    def layouts(self) -> list[Layout]:
        """Returns the layouts of the data files, in the order of groups."""
        return [self.first.layout, *([self.stable.layout] if self.stable is not None else [])]


def plan_state(
    tensors: Tensors,
    tail: list[TailItem],
    description: bytes | None = None,
    least_stable: int | None = None,
) -> StatePlan:
    """Plans saves of `tensors` (whose `description` may be known) and of a tail of these entries.

    Args:
        least_stable: bytes; stable tensors that have so many together get a data file of their own. None:
            they never do.

    Raises:
        MismatchError: a tensor cannot be stored as its place says.
        OptionError: as Structure.eager.
        FormatError: as plan_layout.
    """
    structure = structure_of(tensors, description)
    fragments, eager, devices = structure.fragments(), structure.eager(), structure.devices()
    columns = (fragments, eager, structure.spans(), devices)
    sizes = np.array([fragment.bytes for fragment in fragments], np.int64)
    on_device = np.array([device is not None for device in devices], bool)
    stable = np.flatnonzero(np.array(structure.stable, bool)).tolist()
    changing, second = None, None
    if least_stable is not None and stable and sizes[stable].sum() >= least_stable:
        changing = [i for i, is_stable in enumerate(structure.stable) if not is_stable]
        second = _plan_file(columns, stable, [])
    first = _plan_file(columns, changing, tail)
    return StatePlan(structure, tail, least_stable, first, second, sizes, np.array(eager, bool), on_device)


def _plan_file(columns: tuple[list[Any], ...], members: list[int] | None, tail: list[TailItem]) -> FilePlan:
    if members is not None:
        columns = tuple([column[i] for i in members] for column in columns)
    fragments, eager, spans, devices = columns
    layout = plan_layout(fragments, eager, tail)
    return FilePlan(members, layout, plan_copies(layout, spans, eager, devices), any(eager))


@functools.lru_cache(maxsize=16)
def _empty_items(keys: tuple[str, ...]) -> list[TailItem]:
    return [TailItem(Kind.OBJECT, key) for key in keys]


def tail_items(state: Collected) -> list[TailItem]:
    """Returns what a layout has to know of the entries of the tail."""
    items: list[TailItem] = []
    for empty in state.empty:
        items += map(
            _tail_item, state.tail_keys[len(items) : empty.first], state.tail[len(items) : empty.first]
        )
        items += _empty_items(empty.keys)
    items += map(_tail_item, state.tail_keys[len(items) :], state.tail[len(items) :])
    return items


@functools.lru_cache(maxsize=1 << 14)  # a model may have objects for each layer, the same at every save
def _named_item(kind: Kind, key: str) -> TailItem:
    return TailItem(kind, key)


def _tail_item(key: str, source: TailSource) -> TailItem:
    if source.kind is not Kind.FRAGMENT:
        return _named_item(source.kind, key)
    place: Place = source.place  # type: ignore[attr-defined]
    dtype: torch.dtype = source.dtype  # type: ignore[attr-defined]
    return TailItem(Kind.FRAGMENT, key, Fragment(key, dtype_name(dtype), *place))


class Plans:
    """The plans of the structures saved last. Used by the trainer's thread alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._plans: list[StatePlan] = []  # the most recent is last

    def __len__(self) -> int:
        return len(self._plans)

    def find(
        self, tensors: Tensors, tail: list[TailItem], least_stable: int | None = None
    ) -> tuple[StatePlan, Memory]:
        """Finds the plan for `tensors`, or makes it; returns it with the tensors' places in memory.

        Args:
            least_stable: as in plan_state.

        Raises:
            MismatchError: as plan_state and locate.
            OptionError, FormatError: as plan_state.
        """
        seen: Described | None = tensors.described
        if seen is None:
            seen = describe(tensors.tensors)
            if has_unresolved_views(tensors.tensors, seen.facts if seen is not None else None):
                tensors = resolve_views(tensors)
                seen = describe(tensors.tensors)
        description = seen.facts.description if seen is not None else None
        fitting = (p for p in reversed(self._plans) if _fits(p, tensors, tail, description))
        plan = next((p for p in fitting if p.least_stable == least_stable), None)
        if plan is None:
            plan = plan_state(tensors, tail, description, least_stable)
        self._plans = [*(p for p in self._plans if p is not plan), plan][-self._most :]
        memory = locate(tensors, seen)
        if not plan.is_checked(memory):
            check_bounds(plan.structure, tensors, memory)
            plan.checked = (memory.addresses, FENCE.frees) if FENCE.frees is not None else None
        return plan, memory


def _fits(plan: StatePlan, tensors: Tensors, tail: list[TailItem], description: bytes | None) -> bool:
    return plan.tail == tail and plan.structure.matches(tensors, description)
