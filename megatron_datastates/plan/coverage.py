"""Checks that the fragments of a tensor cover it, and no element twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_datastates.plan.boxes import contiguous_strides, first_overlap

_MOST_CORNERS = 1 << 27
_MOST_PLACES = 1 << 63


class StoredBoxes(Protocol):
    """The fragments of a tensor, without regard to where they are stored."""

    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def offsets(self) -> npt.NDArray[np.int64]: ...  # (n, d), elements
    @property
    def shapes(self) -> npt.NDArray[np.int64]: ...  # (n, d), elements


def coverage_faults(key: str, entry: StoredBoxes) -> list[str]:
    """Describes what is wrong with the fragments of a tensor; empty if they tile it."""
    if tiles(entry.global_shape, entry.offsets, entry.shapes):
        return []
    faults = []
    stored = sum(map(math.prod, entry.shapes.tolist()))  # Python's integers do not overflow
    if stored < math.prod(entry.global_shape):
        faults.append(f"tensor {key!r} has holes: {stored} elements of shape {entry.global_shape} are stored")
    overlap = first_overlap(entry.offsets, entry.shapes)
    if overlap is not None:
        faults.append(f"tensor {key!r}: two fragments both hold the element at {overlap}")
    return faults


def tiles(whole: Sequence[int], offsets: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64]) -> bool:
    """Returns whether n boxes within a tensor tile it. False may also mean that there is too much to check.

    Take a box as a function of the element, 1 inside and 0 outside. Its difference along all axes is +1 or -1
    at the corners, by the parity of the number of axes on which the corner is an end, and 0 elsewhere; it
    determines the box. Differences are additive. So boxes tile a tensor if and only if their corners and its
    own cancel.

    Args:
        whole: the tensor's shape.
        offsets, shapes: of the boxes, (n, dimensions). Corners of a box without elements cancel.
    """
    if 0 in whole:
        return True
    if len(shapes) == 1:  # as most are, and there are many
        return bool(shapes[0].tolist() == list(whole))
    # Only axes on which a box is shorter than the tensor matter.
    cut = np.flatnonzero((shapes != np.array(whole, np.int64)).any(axis=0)).tolist()
    size = [whole[axis] for axis in cut]
    if math.prod(n + 1 for n in size) >= _MOST_PLACES or len(shapes) << len(cut) > _MOST_CORNERS:
        return False
    plus, minus = _corners(size, offsets[:, cut], shapes[:, cut])
    own_plus, own_minus = _corners(size, np.zeros((1, len(cut)), np.int64), np.array([size], np.int64))
    plus, minus = np.concatenate([plus, own_minus]), np.concatenate([minus, own_plus])
    plus.sort()
    minus.sort()
    return np.array_equal(plus, minus)


def _corners(
    whole: Sequence[int], offsets: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the positions of the boxes' corners: those with an even number of ends, and the others."""
    even, odd = np.zeros((1, len(shapes)), np.int64), np.zeros((0, len(shapes)), np.int64)
    for axis, stride in enumerate(contiguous_strides([size + 1 for size in whole])):
        start = offsets[:, axis] * stride
        end = start + shapes[:, axis] * stride
        even, odd = np.concatenate([even + start, odd + end]), np.concatenate([even + end, odd + start])
    return even.reshape(-1), odd.reshape(-1)
