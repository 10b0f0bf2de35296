"""Strided boxes as runs of contiguous bytes, and intersections of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.uint64]
_PAIRS_AT_A_TIME = 1 << 20  # of boxes that are looked at for a common element
_MOST_PAIRS = 1 << 24


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def box_runs(
    lengths: Sequence[int], a_strides: Sequence[int], b_strides: Sequence[int], item_bytes: int
) -> tuple[Offsets, Offsets, int]:
    """A box that lies in two strided memories, as the fewest runs contiguous in both.

    Args:
        lengths: elements per dimension.
        a_strides, b_strides: elements per step, for either memory.
        item_bytes: bytes per element.

    Returns:
        Byte offsets of the runs in a, the same in b (row-major order of the box), and the bytes of each.
        An empty box has no runs.
    """
    if 0 in lengths:
        empty = np.zeros(0, np.uint64)
        return empty, empty, 0
    dims = [d for d in range(len(lengths)) if lengths[d] != 1]
    run = 1
    while dims and a_strides[dims[-1]] == run and b_strides[dims[-1]] == run:
        run *= lengths[dims.pop()]
    a = b = np.zeros(1, np.int64)
    for d in dims:
        steps = np.arange(lengths[d], dtype=np.int64)
        a = (a[:, None] + steps * a_strides[d]).reshape(-1)
        b = (b[:, None] + steps * b_strides[d]).reshape(-1)
    return (a * item_bytes).astype(np.uint64), (b * item_bytes).astype(np.uint64), run * item_bytes


class Runs(NamedTuple):
    """What is copied of one fragment: runs of equal size, stored one behind the other.

    A run is `pieces` pieces of `piece_bytes`, each `step_bytes` behind the one before in memory.
    """

    starts: Offsets  # where each run begins, bytes behind the first element
    pieces: int
    piece_bytes: int
    step_bytes: int


def strided_runs(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> Runs:
    """A strided memory that is to be stored in row-major order, as few runs.

    Args:
        shape: elements per dimension.
        strides: elements per step; none is negative.
        item_bytes: bytes per element.
    """
    if 0 in shape:
        return Runs(np.zeros(0, np.uint64), 1, 0, 0)
    dims: list[tuple[int, int]] = []  # length and stride, where neighbours that make one dimension are one
    for length, stride in zip(shape, strides, strict=True):
        if dims and dims[-1][1] == length * stride:
            dims[-1] = dims[-1][0] * length, stride
        elif length != 1:
            dims.append((length, stride))
    piece = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    pieces, step = dims.pop() if dims else (1, piece)
    starts = np.zeros(1, np.int64)
    for length, stride in dims:
        starts = (starts[:, None] + np.arange(length, dtype=np.int64) * stride).reshape(-1)
    return Runs((starts * item_bytes).astype(np.uint64), pieces, piece * item_bytes, step * item_bytes)


def intersect(
    a_offset: Sequence[int], a_shape: Sequence[int], b_offset: Sequence[int], b_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(offset, shape) of the common box of two boxes of one tensor, or None if there is none."""
    start = tuple(max(a, b) for a, b in zip(a_offset, b_offset, strict=True))
    ends = zip(a_offset, a_shape, b_offset, b_shape, strict=True)
    stop = tuple(min(ao + an, bo + bn) for ao, an, bo, bn in ends)
    shape = tuple(e - s for s, e in zip(start, stop, strict=True))
    return (start, shape) if all(n > 0 for n in shape) else None


def first_overlap(offsets: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64]) -> tuple[int, ...] | None:
    """An element that two of n boxes both hold, or None.

    Args:
        offsets, shapes: of the boxes, (n, dimensions). Boxes without elements overlap nothing.
    """
    starts, ends = offsets, offsets + shapes
    if len(starts) < 2 or starts.shape[1] == 0:
        return () if len(starts) > 1 else None
    # Sorted along the axis that they are cut in most, a box can only meet those that begin before it ends.
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
    """An element of box begin + i and one of the counts[i] boxes behind it, for the first such i."""
    one = np.repeat(np.arange(begin, begin + len(counts)), counts)
    other = one + 1 + np.arange(len(one)) - np.repeat(np.cumsum(counts) - counts, counts)
    low = np.maximum(starts[one], starts[other])
    common = (low < np.minimum(ends[one], ends[other])).all(axis=1)
    return tuple(low[int(common.argmax())].tolist()) if common.any() else None


def boxes_that_meet(
    offsets: npt.NDArray[np.int64],
    shapes: npt.NDArray[np.int64],
    wanted_offsets: npt.NDArray[np.int64],
    wanted_shapes: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Which of n boxes have elements in one of m wanted boxes, in order. Of very many, some may have none.

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
