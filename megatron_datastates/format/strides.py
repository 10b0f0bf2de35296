"""Strided boxes: elements per dimension, and elements per step, none of them negative."""

from __future__ import annotations

from collections.abc import Sequence


def footprint_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns how many elements there are from the first one of a box to its last one, gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether two elements of a box may have the same place; True if that is hard to decide."""
    last = 0  # the furthest place that the dimensions up to here reach
    for stride, length in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= last:
            return True
        last += stride * (length - 1)
    return False
