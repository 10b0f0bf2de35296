"""Strided boxes of a line: of a stored tensor of one dimension, such as a bucket of optimizer state.

Pure functions: the boxes of a tensor that a range of such a line holds, and the reads of such a box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_datastates.errors import FormatError
from megatron_datastates.format.strides import footprint_elements
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.format.values import element_bytes
from megatron_datastates.plan.boxes import Box
from megatron_datastates.plan.frames import FramedBox
from megatron_datastates.plan.reads import BoxReads, plan_elements


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
    first = _place(offset, strides)
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


def line_of(entry: TensorEntry, key: str) -> TensorEntry:
    """Returns a tensor of one dimension with its fragments in order, without those that have no elements.

    Raises:
        FormatError: it has other than one dimension, or its fragments overlap.
    """
    if len(entry.global_shape) != 1:
        raise FormatError(f"tensor {key!r} has {len(entry.global_shape)} dimensions, and a bucket has one")
    held = np.flatnonzero(entry.shapes[:, 0] > 0)
    line = entry.take(held[np.argsort(entry.offsets[held, 0], kind="stable")])
    starts = line.offsets[:, 0]
    overlaps = starts[1:] < starts[:-1] + line.shapes[:-1, 0]
    if overlaps.any():
        element = int(starts[1:][overlaps.argmax()])
        raise FormatError(f"tensor {key!r}: two fragments both hold the element at {element}")
    return line


def fragment_at(line: TensorEntry, element: int, key: str) -> int:
    """Returns the number of the fragment of a line with this element. Raises FormatError for a hole."""
    found = _last_before(line, element)
    if found < 0 or element >= line.offsets[found, 0] + line.shapes[found, 0]:
        raise _hole(key, element)
    return found


def _last_before(line: TensorEntry, element: int) -> int:
    """Returns the number of the last fragment that begins at an element or before it; -1 if there is none."""
    return int(np.searchsorted(line.offsets[:, 0], element, side="right")) - 1


def _hole(key: str, element: int) -> FormatError:
    return FormatError(f"tensor {key!r} has holes: element {element} is not stored")


def plan_strided(
    line: TensorEntry,
    key: str,
    begin: int,
    shape: Sequence[int],
    strides: Sequence[int],
    target_strides: Sequence[int],
    target: int = 0,
) -> list[BoxReads | FramedBox]:
    """Plans to read a strided box of a line, the rows of which do not interleave (see boxes_in_range).

    Args:
        line: of `line_of`.
        key: the tensor's, for messages.
        begin: the box's first element in the line.
        shape, strides: of the box, in elements of the line.
        target_strides, target: as in `plan_box`.

    Raises:
        FormatError: a part of the box is not stored.
    """
    order = sorted(range(len(shape)), key=lambda d: strides[d], reverse=True)  # windows of frames are cut so
    shape, strides, target_strides = ([sizes[d] for d in order] for sizes in (shape, strides, target_strides))
    item, end = element_bytes(line.dtype), begin + footprint_elements(shape, strides)
    here = range(max(_last_before(line, begin), 0), _last_before(line, end - 1) + 1)
    reads: list[BoxReads | FramedBox] = []
    missing = math.prod(shape)
    for fragment in here:
        low = int(line.offsets[fragment, 0]) - begin
        high = low + int(line.shapes[fragment, 0])
        for offset, lengths in boxes_in_range(shape, strides, low, high):
            first, to = _place(offset, strides) - low, target + item * _place(offset, target_strides)
            reads.append(plan_elements(line, fragment, first, lengths, strides, target_strides, to))
            missing -= math.prod(lengths)
    if missing:
        starts, ends = line.offsets[:, 0], line.offsets[:, 0] + line.shapes[:, 0]
        gaps = zip([begin, *ends.tolist()], [*starts.tolist(), end], strict=True)
        holes = (boxes_in_range(shape, strides, low - begin, high - begin) for low, high in gaps)
        offset, _ = next(itertools.chain.from_iterable(holes))
        raise _hole(key, begin + _place(offset, strides))
    return reads


def _place(offset: Sequence[int], strides: Sequence[int]) -> int:
    return sum(o * s for o, s in zip(offset, strides, strict=True))
