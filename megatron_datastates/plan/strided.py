"""Strided boxes of a line: of a stored tensor of one dimension, such as a bucket of optimizer state.

Pure functions: the boxes of a tensor that a range of such a line holds, and the reads of such a box.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import FormatError
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.format.values import element_bytes
from megatron_datastates.plan.boxes import Box, PairedSpans, paired_spans
from megatron_datastates.plan.frames import FramedBox
from megatron_datastates.plan.reads import BoxReads

Places = npt.NDArray[np.int64]


def boxes_in_range(shape: Sequence[int], strides: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Yields the fewest boxes of a strided tensor whose elements lie at [begin, end) of its line.

    Rows must not interleave: along each dimension, one step reaches past all dimensions of smaller strides.
    Elements of a tensor that breaks this rule may be missing, so callers count them.

    Args:
        shape: elements per dimension; element i lies at the sum of i_d * strides_d.
        strides: elements per step, none negative, in any order.
        begin, end: elements of the line, counted from the tensor's first one.
    """
    order = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: strides[d], reverse=True)
    if 0 not in shape:
        yield from _boxes(order, (0,) * len(shape), tuple(shape), strides, begin, end)


def _boxes(
    order: list[int],
    offset: tuple[int, ...],
    lengths: tuple[int, ...],
    strides: Sequence[int],
    begin: int,
    end: int,
) -> Iterator[Box]:
    """Yields those in the box [offset, offset + lengths), which varies along the dimensions `order` only."""
    first = sum(o * s for o, s in zip(offset, strides, strict=True))
    last = first + sum((lengths[d] - 1) * strides[d] for d in order)
    if last < begin or first >= end:
        return
    if begin <= first and last < end:
        yield offset, lengths
        return
    dim, rest = order[0], order[1:]
    step, count = max(strides[dim], 1), lengths[dim]
    inner = sum((lengths[d] - 1) * strides[d] for d in rest)  # from a row's first element to its last
    low = min(max(-(-(begin - first) // step), 0), count)  # rows [low, high) are in the range as wholes
    high = min(max((end - 1 - inner - first) // step + 1, 0), count)

    def rows(at: int, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (*offset[:dim], at, *offset[dim + 1 :]), (*lengths[:dim], n, *lengths[dim + 1 :])

    if low - 1 in range(count):
        yield from _boxes(rest, *rows(low - 1, 1), strides, begin, end)
    if low < high:
        yield rows(low, high - low)
    if high != low - 1 and high in range(count):
        yield from _boxes(rest, *rows(high, 1), strides, begin, end)


@dataclasses.dataclass(frozen=True)
class Line:
    """The stored fragments of a tensor of one dimension, in order. Places are bytes of the tensor."""

    starts: Places
    ends: Places
    files: Places
    file_offsets: Places
    sizes: Places
    item: int  # bytes per element
    encoded: bool  # then file_offsets are numbers of entries of footers

    @classmethod
    def of(cls, entry: TensorEntry, key: str) -> Line:
        """Raises FormatError: the tensor has other than one dimension, or its fragments overlap."""
        if len(entry.global_shape) != 1:
            raise FormatError(
                f"tensor {key!r} has {len(entry.global_shape)} dimensions, and a bucket has one"
            )
        item = element_bytes(entry.dtype)
        held = np.flatnonzero(entry.shapes[:, 0] > 0)
        order = held[np.argsort(entry.offsets[held, 0], kind="stable")]
        starts, sizes = entry.offsets[order, 0] * item, entry.shapes[order, 0] * item
        line = cls(
            starts,
            starts + sizes,
            entry.files[order].astype(np.int64),
            entry.file_offsets[order].astype(np.int64),
            sizes,
            item,
            entry.encoded,
        )
        overlaps = line.starts[1:] < line.ends[:-1]
        if overlaps.any():
            element = int(line.starts[1:][overlaps.argmax()]) // item
            raise FormatError(f"tensor {key!r}: two fragments both hold the element at {element}")
        return line

    def fragment(self, place: int, key: str) -> int:
        """Returns the number of the fragment with the byte at `place`. Raises FormatError for a hole."""
        found = int(np.searchsorted(self.starts, place, side="right")) - 1
        if found < 0 or place >= self.ends[found]:
            raise FormatError(f"tensor {key!r} has holes: element {place // self.item} is not stored")
        return found


def plan_strided(
    line: Line,
    key: str,
    begin: int,
    shape: Sequence[int],
    strides: Sequence[int],
    target_strides: Sequence[int],
) -> list[BoxReads | FramedBox]:
    """Plans to read a strided box of a line.

    Args:
        key: the tensor's, for messages.
        begin: the box's first element in the line.
        shape, strides: of the box, in elements of the line.
        target_strides: of the destination, in elements; the box's first byte goes to its first byte.

    Raises:
        FormatError: a part of the box is not stored.
    """
    if 0 in shape:
        return []
    spans = paired_spans(shape, strides, target_strides, line.item)
    starts = spans.a_starts.astype(np.int64) + begin * line.item
    targets = spans.b_starts.astype(np.int64)
    lasts = starts + (spans.rows - 1) * spans.a_step + spans.row_bytes
    found = np.searchsorted(line.starts, starts, side="right") - 1
    within = found >= 0
    if len(line.ends):
        within &= lasts <= line.ends[np.maximum(found, 0)]
    reads: list[BoxReads | FramedBox] = []
    for fragment in np.unique(found[within]).tolist():
        mine = np.flatnonzero(within & (found == fragment))
        reads += _reads(line, fragment, starts[mine], targets[mine], spans)
    for cut in np.flatnonzero(~within).tolist():
        reads += _cut_reads(line, key, int(starts[cut]), int(targets[cut]), spans)
    return reads


def _reads(
    line: Line, fragment: int, places: Places, targets: Places, spans: PairedSpans
) -> Iterator[BoxReads | FramedBox]:
    """Yields the reads of spans that begin at these bytes of the line, all in one fragment."""
    file, within = int(line.files[fragment]), places - line.starts[fragment]
    place, size = int(line.file_offsets[fragment]), int(line.sizes[fragment])
    if not line.encoded:
        offsets, to = (within + place).astype(np.uint64), targets.astype(np.uint64)
        yield BoxReads(file, offsets, to, spans.rows, spans.row_bytes, spans.a_step, spans.b_step)
        return
    lengths, steps = (spans.rows, spans.row_bytes), ((spans.a_step, 1), (spans.b_step, 1))
    for at, target in zip(within.tolist(), targets.tolist(), strict=True):
        yield FramedBox(file, place, size, 1, at, lengths, steps[0], target, steps[1])


def _cut_reads(
    line: Line, key: str, start: int, target: int, spans: PairedSpans
) -> Iterator[BoxReads | FramedBox]:
    """Yields the reads of one span that several fragments hold: whole rows, and parts of rows."""
    row = 0
    while row < spans.rows:
        place, to = start + row * spans.a_step, target + row * spans.b_step
        fragment = line.fragment(place, key)
        room = int(line.ends[fragment]) - place - spans.row_bytes
        if room < 0:
            yield from _parts_of_row(line, key, place, to, spans.row_bytes)
            row += 1
            continue
        rows = min(room // max(spans.a_step, 1) + 1, spans.rows - row)
        yield from _reads(line, fragment, np.array([place]), np.array([to]), spans._replace(rows=rows))
        row += rows


def _parts_of_row(line: Line, key: str, place: int, target: int, size: int) -> Iterator[BoxReads | FramedBox]:
    done = 0
    while done < size:
        fragment = line.fragment(place + done, key)
        part = min(int(line.ends[fragment]) - place - done, size - done)
        none = np.zeros(0, np.uint64)
        spans = PairedSpans(none, none, 1, part, part, part)
        yield from _reads(line, fragment, np.array([place + done]), np.array([target + done]), spans)
        done += part
