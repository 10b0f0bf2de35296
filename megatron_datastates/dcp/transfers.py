"""Boxes that DCP's load plans ask for, and how each gets from the data files to its target.

Belongs here: what is read of a stored fragment, or of buckets, into which memory, and what of it at once.
Does not belong here: executing reads, and objects (reading.py); what any load requires of a target
(pipeline/loading/in_place.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from megatron_datastates.dcp.fragments import FragmentFinder
from megatron_datastates.errors import FormatError, MismatchError
from megatron_datastates.format.strides import footprint_elements
from megatron_datastates.pipeline.loading.dtypes import note_conversion, torch_dtype
from megatron_datastates.pipeline.loading.in_place import (
    Temporaries,
    copy_converted,
    fits_in_place,
    is_on_device,
    is_plain,
    note_change,
    overlapping,
    part_of,
    require_memory,
)
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer import StateTensor
from megatron_datastates.plan.boxes import Box, cut_box
from megatron_datastates.plan.frames import FramedBox
from megatron_datastates.plan.reads import BoxReads, ScheduledRead, plan_box

# Host memory where a tensor cannot be read in place. Converted integers may need half as much again.
_TEMPORARY_BYTES = 32 << 20


# Start of a part of a box (in the coordinates of `item.storage_offsets`), its shape, and the strides of the
# memory that it is read into -> what is read.
Plan = Callable[[Sequence[int], Sequence[int], Sequence[int]], Iterable[BoxReads | FramedBox]]


@dataclasses.dataclass(frozen=True)
class RequestedBox:
    """The box of a stored tensor that a read item requests."""

    item: ReadItem
    dtype: str
    files: frozenset[int]
    place: tuple[int, int]  # sorts reads in the order of the files: (file number, offset in bytes)
    encoded: bool
    through_cache: bool  # see ScheduledRead
    plan: Plan

    @property
    def torch_dtype(self) -> torch.dtype:
        """The stored dtype. Raises FormatError if this torch lacks it."""
        return torch_dtype(self.dtype, self.item.storage_index.fqn)

    def is_detour(self, planner: LoadPlanner) -> bool:
        """Returns whether the planner may resolve to a new tensor that it copies to the target afterwards.

        Megatron's planner does so for quantized tensors; only one of these should exist at a time.
        """
        return isinstance(planner, DefaultLoadPlanner) and not is_plain(
            planner.lookup_tensor(self.item.dest_index)
        )

    def _is_lost(self, planner: LoadPlanner, target: torch.Tensor) -> bool:
        """Returns whether the target is a copy that nobody has, as of a part of a quantized tensor."""
        if not (isinstance(planner, DefaultLoadPlanner) and self.is_detour(planner) and is_plain(target)):
            return False
        copied = getattr(planner, "_intermediate_read_items", None)  # back by Megatron's planner
        overrides = type(planner).commit_tensor is not DefaultLoadPlanner.commit_tensor
        if overrides if copied is None else id(self.item) in copied:
            return False
        whole = planner.lookup_tensor(self.item.dest_index)
        return bool(target.untyped_storage()._cdata != whole.untyped_storage()._cdata)

    def resolved(self, planner: LoadPlanner, checkpoint: Checkpoint) -> Transfer:
        """Resolves the target with the planner. Raises MismatchError."""
        target = planner.resolve_tensor(self.item).detach()
        if target.size() != self.item.lengths:
            raise MismatchError(
                f"tensor {self.item.storage_index.fqn!r}: the planner requested a slice of shape "
                f"{tuple(self.item.lengths)} into a tensor of shape {tuple(target.size())}"
            )
        require_memory(self.item.storage_index.fqn, target)
        if self._is_lost(planner, target):
            raise MismatchError(
                f"tensor {self.item.storage_index.fqn!r}: the target is of a class of tensors whose parts "
                "are copies, such as a quantized one, and what is read into a copy is lost: load it as it "
                "was sharded in the save, or into a plain tensor"
            )
        key, dtype = self.item.storage_index.fqn, self.torch_dtype
        is_converted = note_conversion(checkpoint.rounded, key, dtype, target.dtype)
        memory = target if not is_converted and fits_in_place(target, self.encoded) else None
        return Transfer(self, tuple(self.item.storage_offsets), target, target, memory)


def fragment_box(
    item: ReadItem, checkpoint: Checkpoint, find: FragmentFinder, through_cache: bool
) -> RequestedBox:
    """Returns the box of a stored fragment. Raises MissingKeyError, FormatError."""
    entry = checkpoint.index.tensor(item.storage_index.fqn)
    number = find(entry, item.storage_index)
    shape = tuple(entry.shapes[number].tolist())
    box = tuple(item.storage_offsets), tuple(item.lengths)
    if 0 not in box[1] and not _is_within(box, shape):  # torch asks for empty ones anywhere
        raise FormatError(  # what lies there are the bytes of other tensors
            f"tensor {item.storage_index.fqn!r}: the load plan asks for {box[1]} at {box[0]} of a "
            f"fragment of shape {shape}: it was made of other metadata than those of "
            f"{checkpoint.directory}"
        )
    file = int(entry.files[number])
    return RequestedBox(
        item,
        entry.dtype,
        frozenset([file]),
        (file, int(entry.file_offsets[number])),
        entry.encoded,
        through_cache,
        plan=lambda *part: [plan_box(entry, number, *part)],
    )


def bucket_box(item: ReadItem, state: StateTensor, through_cache: bool) -> RequestedBox:
    """Returns the box of a parameter's state that is stored in buckets, of any ranks."""
    origin = tuple(item.storage_index.offset or ())  # in the state, of the coordinates of `storage_offsets`

    def at(start: Sequence[int]) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(origin, start, strict=True))

    files, place = state.place(at(item.storage_offsets), tuple(item.lengths))
    return RequestedBox(
        item,
        state.dtype,
        files,
        place,
        state.encoded,
        through_cache,
        plan=lambda start, shape, strides: state.plan(at(start), shape, strides),
    )


@dataclasses.dataclass
class Transfer:
    """One box, or a part of one, on its way to its target."""

    box: RequestedBox
    start: tuple[int, ...]  # in the fragment
    target: torch.Tensor
    whole: torch.Tensor | None  # what the planner resolved, on its last part only
    memory: torch.Tensor | None  # destination of the read: the target, or a temporary

    def parts(self) -> Iterator[Transfer]:
        """Yields itself if read in place or not a plain tensor, else parts with small temporaries."""
        if self.memory is not None or not is_plain(self.target):
            yield self
            return
        shape, origin = tuple(self.target.shape), (0,) * self.target.dim()
        most = _TEMPORARY_BYTES // 2 // self.box.torch_dtype.itemsize
        boxes = list(cut_box(origin, shape, most)) or [(origin, shape)]
        for offset, lengths in boxes:
            start = tuple(a + b for a, b in zip(self.start, offset, strict=True))
            whole = self.whole if offset == boxes[-1][0] else None
            yield Transfer(self.box, start, part_of(self.target, offset, lengths), whole, None)

    @property
    def bytes(self) -> int:
        return self.target.numel() * self.box.torch_dtype.itemsize

    @property
    def memory_range(self) -> tuple[int, int]:
        """Where the target begins and ends, as addresses."""
        begin, elements = self.target.data_ptr(), footprint_elements(self.target.shape, self.target.stride())
        return begin, begin + elements * self.target.itemsize

    def prepare(self, temporaries: Temporaries) -> None:
        if self.memory is None:
            self.memory = temporaries.take(self.target.shape, self.box.torch_dtype)

    def scheduled(self) -> Iterator[ScheduledRead]:
        assert self.memory is not None
        if self.memory is self.target:
            note_change(self.target)
        for reads in self.box.plan(self.start, tuple(self.memory.shape), self.memory.stride()):
            yield ScheduledRead(
                reads, self.memory.data_ptr(), is_on_device(self.memory), self.box.through_cache
            )

    def complete(self, planner: LoadPlanner) -> None:
        if self.memory is not None and self.memory is not self.target:
            copy_converted(self.box.item.storage_index.fqn, self.memory, self.target)
        self.memory = None
        if self.whole is not None:
            planner.commit_tensor(self.box.item, self.whole)


def resolve_in_place(
    boxes: Iterable[RequestedBox], planner: LoadPlanner, checkpoint: Checkpoint
) -> tuple[list[Transfer], list[RequestedBox]]:
    """Splits boxes into transfers to targets that native code can write to, and others, unresolved."""
    in_place, others = [], []
    for box in boxes:
        transfer = None if box.is_detour(planner) else box.resolved(planner, checkpoint)
        if transfer is not None and transfer.memory is not None:
            in_place.append(transfer)
        else:
            others.append(box)
    return in_place, others


def sharing(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Returns, in order, transfers to memory that those to other shards fill, too, as far as ranges show.

    Threads would fill that with parts of each. Parts of one shard are apart, but their ranges are not where
    they are strided: then they count together.
    """
    filled = [transfer for transfer in transfers if transfer.target.numel()]
    strided = {one.box.item.dest_index for one in filled if not one.target.is_contiguous()}
    together: dict[MetadataIndex | int, list[Transfer]] = {}
    for number, transfer in enumerate(filled):
        shard = transfer.box.item.dest_index
        together.setdefault(shard if shard in strided else number, []).append(transfer)
    groups = list(together.values())
    ranges = [[one.memory_range for one in group] for group in groups]
    shared = overlapping(
        [(min(begins), max(ends)) for begins, ends in (zip(*r, strict=True) for r in ranges)]
    )
    found = {id(transfer) for number in shared for transfer in groups[number]}
    return [transfer for transfer in filled if id(transfer) in found]


def through_temporaries(
    boxes: Iterable[RequestedBox], planner: LoadPlanner, checkpoint: Checkpoint
) -> Iterator[list[Transfer]]:
    """Yields transfers with temporaries, in groups; the memory of one is used again for the next.

    In the order of the files. A box is resolved only when the groups before it are done.
    """
    temporaries = Temporaries(_TEMPORARY_BYTES)
    ordered = sorted(boxes, key=lambda box: box.place)
    parts = (transfer for box in ordered for transfer in box.resolved(planner, checkpoint).parts())
    for group in _groups(parts):
        temporaries.clear()
        for transfer in group:
            transfer.prepare(temporaries)
        yield group


def _groups(transfers: Iterable[Transfer]) -> Iterator[list[Transfer]]:
    """Groups transfers: the last one of a group takes its temporaries past half of _TEMPORARY_BYTES.

    It does not look at the next one first: to resolve that makes another tensor where it is a detour.
    """
    group: list[Transfer] = []
    size = 0
    for transfer in transfers:
        group.append(transfer)
        size += transfer.bytes
        if size > _TEMPORARY_BYTES // 2:
            yield group
            group, size = [], 0
    if group:
        yield group


def _is_within(box: Box, shape: Sequence[int]) -> bool:
    return len(box[0]) == len(shape) and all(o + n <= s for o, n, s in zip(*box, shape, strict=True))
