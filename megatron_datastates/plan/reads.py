"""The plan of a read: which spans of which data files make up a requested slice, and where each goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megatron_datastates.format.tables import Words
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.format.values import BLOCK_BYTES, Extent, element_bytes
from megatron_datastates.plan.boxes import contiguous_strides, intersect, paired_spans
from megatron_datastates.plan.frames import FramedBox

T = TypeVar("T")
_BLOCK_BITS = 42  # of the number of a block: data files have less than 2^62 bytes


@dataclasses.dataclass(frozen=True)
class BoxReads:
    """Spans of one shape from one data file; rows at equal distances go to memory at equal distances."""

    file: int
    offsets: Words  # of each span's first row, in the file
    targets: Words  # of each span's first row, in bytes from the destination's first element
    rows: int
    row_bytes: int
    file_step: int  # bytes from row to row
    target_step: int  # the same in memory

    @property
    def bytes(self) -> int:
        """How many bytes it delivers."""
        return len(self.offsets) * self.rows * self.row_bytes


@dataclasses.dataclass(frozen=True)
class ScheduledRead:
    """What to read from one file, and the address that its targets count from."""

    reads: BoxReads | FramedBox
    address: int
    on_device: bool = False  # the current one; not of a FramedBox
    through_cache: bool = False  # the page cache: other processes of this machine read the same

    @property
    def bytes(self) -> int:
        """How many bytes it delivers."""
        return self.reads.bytes


@dataclasses.dataclass(frozen=True)
class ReadSpans:
    """The spans of any number of boxes. Element i of each array belongs to span i."""

    files: Words
    offsets: Words
    rows: Words
    row_bytes: Words
    file_steps: Words
    targets: Words  # addresses
    target_steps: Words
    on_device: npt.NDArray[np.bool_]

    def ends(self) -> Words:
        """Returns where each span ends in its file."""
        return self.offsets + (self.rows - np.uint64(1)) * self.file_steps + self.row_bytes

    def take(self, which: npt.NDArray[np.intp]) -> ReadSpans:
        """Returns some of the spans, by their numbers."""
        return ReadSpans(*(getattr(self, field.name)[which] for field in dataclasses.fields(self)))

    def in_one_file(self) -> ReadSpans:
        """Returns the same spans, all of file 0."""
        return dataclasses.replace(self, files=np.zeros_like(self.files))


def gather_spans(boxes: Sequence[BoxReads], addresses: Sequence[int], on_device: Sequence[bool]) -> ReadSpans:
    """Returns all spans of `boxes`, whose destinations are at `addresses`."""
    counts = [len(box.offsets) for box in boxes]
    forms = [(box.file, box.rows, box.row_bytes, box.file_step, box.target_step) for box in boxes]
    each = np.repeat(np.array(forms, np.uint64).reshape(len(boxes), 5), counts, axis=0).T
    files, rows, row_bytes, file_steps, target_steps = map(np.ascontiguousarray, each)
    none = np.zeros(0, np.uint64)
    return ReadSpans(
        files=files,
        offsets=np.concatenate([none, *(box.offsets for box in boxes)]),
        rows=rows,
        row_bytes=row_bytes,
        file_steps=file_steps,
        targets=np.concatenate([none, *(box.targets for box in boxes)])
        + np.repeat(np.array(addresses, np.uint64), counts),
        target_steps=target_steps,
        on_device=np.repeat(np.array(on_device, np.bool_), counts),
    )


def apart_from_direct(spans: ReadSpans, cached: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Returns which of the spans to read through the page cache stay so, as the others are read directly.

    Those do not that lie in blocks that other spans need directly: these blocks would be read twice.
    """
    if not cached.any() or cached.all():
        return cached
    block, file = np.uint64(BLOCK_BYTES), spans.files << np.uint64(_BLOCK_BITS)
    first, last = file + spans.offsets // block, file + (spans.ends() - np.uint64(1)) // block
    direct = np.concatenate([first[~cached], last[~cached]])
    return cached & ~((last - first <= 1) & np.isin(first, direct) & np.isin(last, direct))


def in_groups(items: Iterable[T], bytes_of: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Groups what is read together, in order. What has more bytes by itself is a group by itself."""
    group: list[T] = []
    room = most_bytes
    for item in items:
        size = bytes_of(item)
        if group and size > room:
            yield group
            group, room = [], most_bytes
        group.append(item)
        room -= size
    if group:
        yield group


def plan_extent(extent: Extent) -> BoxReads:
    """Plans to read a whole extent, as stored, into a destination of the same size."""
    one = np.array([extent.offset], np.uint64)
    return BoxReads(extent.file, one, np.zeros(1, np.uint64), 1, extent.bytes, extent.bytes, extent.bytes)


def plan_bytes(entry: TensorEntry, fragment: int, begin: int, size: int) -> BoxReads | FramedBox:
    """Plans to read bytes [begin, begin + size) of a stored fragment, in row-major order."""
    file, place = int(entry.files[fragment]), int(entry.file_offsets[fragment])
    if entry.encoded:
        return FramedBox(file, place, int(entry.file_bytes[fragment]), 1, begin, (size,), (1,), 0, (1,))
    return plan_extent(Extent(file, place + begin, size))


def plan_blocks(file: int, data_bytes: int) -> BoxReads:
    """Plans to verify every block of a file's data: reads all of them and delivers one byte of each."""
    one, blocks = np.zeros(1, np.uint64), -(-data_bytes // BLOCK_BYTES)
    return BoxReads(file, one, one, blocks, 1, BLOCK_BYTES, 1)


def plan_box(
    entry: TensorEntry,
    fragment: int,
    start: Sequence[int],
    lengths: Sequence[int],
    target_strides: Sequence[int],
    target: int = 0,
) -> BoxReads | FramedBox:
    """Plans to read the box [start, start + lengths), in coordinates of one stored fragment.

    Args:
        target_strides: of the destination, in elements.
        target: where the box's first byte goes, in bytes from the destination's first.
    """
    strides = contiguous_strides(entry.shapes[fragment].tolist())
    first = sum(s * n for s, n in zip(start, strides, strict=True))
    return plan_elements(entry, fragment, first, lengths, strides, target_strides, target)


def plan_elements(
    entry: TensorEntry,
    fragment: int,
    first: int,
    lengths: Sequence[int],
    strides: Sequence[int],
    target_strides: Sequence[int],
    target: int,
) -> BoxReads | FramedBox:
    """Plans to read a strided box of the elements of one stored fragment.

    Args:
        first: the box's first element in the fragment.
        strides: in the fragment, in elements; if it is encoded, none is larger than the one before it.
        target_strides, target: as in `plan_box`.
    """
    item = element_bytes(entry.dtype)
    file, place = int(entry.files[fragment]), int(entry.file_offsets[fragment])
    if entry.encoded:
        size, sizes = int(entry.file_bytes[fragment]), tuple(lengths)
        return FramedBox(file, place, size, item, first, sizes, tuple(strides), target, tuple(target_strides))
    spans = paired_spans(lengths, strides, target_strides, item)
    offsets, targets = spans.a_starts + np.uint64(place + item * first), spans.b_starts + np.uint64(target)
    return BoxReads(file, offsets, targets, spans.rows, spans.row_bytes, spans.a_step, spans.b_step)


def plan_slice(
    entry: TensorEntry, offset: Sequence[int], shape: Sequence[int]
) -> tuple[list[BoxReads | FramedBox], int, npt.NDArray[np.intp]]:
    """Plans to read [offset, offset + shape) of the global tensor into a contiguous destination.

    Returns:
        The reads; the number of elements that they cover: fewer than the slice has if there are holes; and
        the numbers of the fragments that they are of.
    """
    item = element_bytes(entry.dtype)
    strides = contiguous_strides(shape)
    reads: list[BoxReads | FramedBox] = []
    covered = 0
    begins, ends = np.array(offset, np.int64), np.array(offset, np.int64) + np.array(shape, np.int64)
    touched = np.flatnonzero(((entry.offsets < ends) & (entry.offsets + entry.shapes > begins)).all(axis=1))
    for i in touched.tolist():
        stored = entry.offsets[i].tolist()
        common = intersect(stored, entry.shapes[i].tolist(), offset, shape)
        if common is None:
            continue
        begin, lengths = common
        within = [b - s for b, s in zip(begin, stored, strict=True)]
        target = item * sum((b - o) * n for b, o, n in zip(begin, offset, strides, strict=True))
        reads.append(plan_box(entry, i, within, lengths, strides, target))
        covered += int(np.prod(lengths, dtype=np.int64))
    return reads, covered, touched
