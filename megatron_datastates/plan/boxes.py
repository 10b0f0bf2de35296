"""Boxes (rectangular slices of a tensor): their bytes as spans, their parts, intersections and overlaps.

Pure functions of offsets, shapes and strides; nothing here knows about files or memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import MismatchError

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape, elements

Offsets = npt.NDArray[np.uint64]
_PAIRS_AT_A_TIME = 1 << 20  # pairs of boxes compared at a time
_MOST_PAIRS = 1 << 24


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a row-major tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class PairedSpans(NamedTuple):
    """The spans of a box that lies in two strided memories, a and b, to be copied from one to the other.

    Each span is `rows` of `row_bytes`; consecutive rows start `a_step` bytes apart in a, and `b_step` in b.
    """

    a_starts: Offsets  # where each span begins in a, in bytes from the first element
    b_starts: Offsets
    rows: int
    row_bytes: int
    a_step: int  # bytes
    b_step: int


def paired_spans(
    lengths: Sequence[int], a_strides: Sequence[int], b_strides: Sequence[int], item_bytes: int
) -> PairedSpans:
    """Decomposes a box into the fewest such spans, in row-major order. An empty box has none.

    Args:
        lengths: elements per dimension.
        a_strides, b_strides: elements per step, for either memory; none is negative.
        item_bytes: bytes per element.
    """
    if 0 in lengths:
        return PairedSpans(np.zeros(0, np.uint64), np.zeros(0, np.uint64), 1, 0, 0, 0)
    dims: list[tuple[int, int, int]] = []  # length and strides, with neighbours merged where possible
    for length, a, b in zip(lengths, a_strides, b_strides, strict=True):
        if dims and dims[-1][1:] == (length * a, length * b):
            dims[-1] = dims[-1][0] * length, a, b
        elif length != 1:
            dims.append((length, a, b))
    row = dims.pop()[0] if dims and dims[-1][1:] == (1, 1) else 1
    rows, a_step, b_step = dims.pop() if dims else (1, row, row)
    a_starts = b_starts = np.zeros(1, np.uint64)
    for length, a, b in dims:
        steps = np.arange(length, dtype=np.uint64) * np.uint64(item_bytes)
        a_starts = (a_starts[:, None] + steps * np.uint64(a)).reshape(-1)
        b_starts = (b_starts[:, None] + steps * np.uint64(b)).reshape(-1)
    return PairedSpans(
        a_starts,
        b_starts,
        rows,
        row * item_bytes,
        a_step * item_bytes,
        b_step * item_bytes,
    )


def cut_box(offset: Sequence[int], shape: Sequence[int], most_elements: int) -> Iterator[Box]:
    """Yields boxes of at most `most_elements` (at least one) that tile a box, in row-major order.

    Each is contiguous within the box. A box without elements yields none.
    """
    most = max(most_elements, 1)
    if math.prod(shape) <= most:
        if 0 not in shape:
            yield tuple(offset), tuple(shape)
        return
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= most)
    step = most // math.prod(shape[axis + 1 :])
    for place in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            within = (*place, start, *(0,) * (len(shape) - axis - 1))
            lengths = (*(1,) * axis, min(step, shape[axis] - start), *shape[axis + 1 :])
            yield tuple(o + w for o, w in zip(offset, within, strict=True)), lengths


def integers(key: str, what: str, values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Returns elements per dimension as Python's integers.

    Raises:
        MismatchError: some are no integers: 2.5 elements would be a place within an element.
    """
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise MismatchError(
            f"tensor {key!r}: the {what} is {values!r}: expected an integer for each dimension"
        ) from None


def checked_slice(
    key: str, global_shape: tuple[int, ...], offset: Sequence[int] | None, shape: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (offset, shape) of a slice of a tensor, by default all of it.

    Raises:
        MismatchError: the slice leaves the tensor, or is not in whole elements.
    """
    offset = integers(key, "offset", offset) if offset is not None else (0,) * len(global_shape)
    shape = integers(key, "shape", shape) if shape is not None else global_shape
    if not len(offset) == len(shape) == len(global_shape) or any(
        o < 0 or n < 0 or o + n > s for o, n, s in zip(offset, shape, global_shape, strict=True)
    ):
        raise MismatchError(
            f"tensor {key!r} has shape {global_shape}: there is no slice of {shape} at {offset}"
        )
    return offset, shape


def intersect(
    a_offset: Sequence[int], a_shape: Sequence[int], b_offset: Sequence[int], b_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns (offset, shape) of the intersection of two boxes of a tensor, or None if it is empty."""
    start = tuple(max(a, b) for a, b in zip(a_offset, b_offset, strict=True))
    ends = zip(a_offset, a_shape, b_offset, b_shape, strict=True)
    stop = tuple(min(ao + an, bo + bn) for ao, an, bo, bn in ends)
    shape = tuple(e - s for s, e in zip(start, stop, strict=True))
    return (start, shape) if all(n > 0 for n in shape) else None


def slices_of(box: tuple[Sequence[int], Sequence[int]], origin: Sequence[int]) -> tuple[slice, ...]:
    """Returns what indexes a box of a tensor in an array whose first element is the one at `origin`."""
    return tuple(slice(b - o, b - o + n) for b, n, o in zip(*box, origin, strict=True))


def bounding_box(one: Box, other: Box) -> Box:
    """Returns the smallest box that holds two boxes of a tensor."""
    low = tuple(map(min, one[0], other[0]))
    ends = ([o + n for o, n in zip(*box, strict=True)] for box in (one, other))
    return low, tuple(end - start for start, end in zip(low, map(max, *ends), strict=True))


def first_overlap(offsets: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64]) -> tuple[int, ...] | None:
    """Returns an element that two of n boxes have in common, or None.

    Args:
        offsets, shapes: of the boxes, (n, dimensions). Boxes without elements overlap nothing.
    """
    some = (shapes > 0).all(axis=1)
    starts, ends = offsets[some], (offsets + shapes)[some]
    if len(starts) < 2 or starts.shape[1] == 0:
        return () if len(starts) > 1 else None
    # Sorted along the axis with the most cuts, a box can only overlap those that begin before it ends.
    axis = int(np.argmax([len(np.unique(column)) for column in starts.T]))
    order = np.argsort(starts[:, axis], kind="stable")
    starts, ends = starts[order], ends[order]
    stops = np.searchsorted(starts[:, axis], ends[:, axis])
    counts = np.maximum(stops - np.arange(1, len(starts) + 1), 0)
    pairs = np.cumsum(counts)
    begin = 0
    while begin < len(starts):
        end = int(np.searchsorted(pairs, pairs[begin] + _PAIRS_AT_A_TIME))
        found = _first_common(starts, ends, begin, counts[begin:end])
        if found is not None:
            return found
        begin = end
    return None


def _first_common(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], begin: int, counts: npt.NDArray[np.int64]
) -> tuple[int, ...] | None:
    """Returns an element of both box begin + i and one of the counts[i] after it, for the first such i."""
    one = np.repeat(np.arange(begin, begin + len(counts)), counts)
    other = one + 1 + np.arange(len(one)) - np.repeat(np.cumsum(counts) - counts, counts)
    low = np.maximum(starts[one], starts[other])
    common = (low < np.minimum(ends[one], ends[other])).all(axis=1)
    return tuple(low[int(common.argmax())].tolist()) if common.any() else None


def _rows(offsets: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """Returns each box as one value, to be compared."""
    joined = np.ascontiguousarray(np.concatenate([offsets, ends], axis=1))
    return joined.view(np.dtype((np.void, joined.itemsize * joined.shape[1]))).reshape(-1)


def hold_all(
    offsets: npt.NDArray[np.int64],
    shapes: npt.NDArray[np.int64],
    wanted_offsets: npt.NDArray[np.int64],
    wanted_shapes: npt.NDArray[np.int64],
    whole: Sequence[int],
) -> bool:
    """Returns whether n disjoint boxes cover m wanted boxes, as far as those are in the tensor.

    Args:
        offsets, shapes: of the boxes, (n, dimensions).
        wanted_offsets, wanted_shapes: (m, dimensions); they may extend past the tensor.
        whole: the shape of the tensor.
    """
    ends = offsets + shapes
    wanted_ends = np.minimum(wanted_offsets + wanted_shapes, np.array(whole, np.int64))
    # Most are one of the boxes, where the layout is that of the save.
    if offsets.shape[1]:
        other = ~np.isin(_rows(wanted_offsets, wanted_ends), _rows(offsets, ends))
        wanted_offsets, wanted_shapes = wanted_offsets[other], wanted_shapes[other]
    step = max(_PAIRS_AT_A_TIME // max(offsets.size, 1), 1)
    for first in range(0, len(wanted_offsets), step):
        begin = wanted_offsets[first : first + step, None]
        end = np.minimum(begin + wanted_shapes[first : first + step, None], np.array(whole, np.int64))
        common = np.maximum(np.minimum(end, ends) - np.maximum(begin, offsets), 0)
        if (common.prod(axis=2).sum(axis=1) != np.maximum(end - begin, 0).prod(axis=2)[:, 0]).any():
            return False
    return True


def boxes_that_meet(
    offsets: npt.NDArray[np.int64],
    shapes: npt.NDArray[np.int64],
    wanted_offsets: npt.NDArray[np.int64],
    wanted_shapes: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Returns, in order, the indices of those of n boxes that intersect one of m wanted boxes.

    If there are very many pairs, some of the boxes returned may intersect none.

    Args:
        offsets, shapes: of the boxes, (n, dimensions).
        wanted_offsets, wanted_shapes: (m, dimensions), m > 0.
    """
    ends, wanted_ends = offsets + shapes, wanted_offsets + wanted_shapes
    inside = (offsets < wanted_ends.max(axis=0)) & (ends > wanted_offsets.min(axis=0)) & (shapes > 0)
    near = np.flatnonzero(inside.all(axis=1))
    if len(wanted_offsets) == 1 or len(near) * len(wanted_offsets) > _MOST_PAIRS:
        return near
    meets = np.ones((len(wanted_offsets), len(near)), bool)
    for axis in range(offsets.shape[1]):
        meets &= offsets[near, axis] < wanted_ends[:, axis, None]
        meets &= ends[near, axis] > wanted_offsets[:, axis, None]
    return near[meets.any(axis=0)]
