"""Which bytes of which file make up a requested slice, and where each run of them goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_datastates.format.index import TensorEntry
from megatron_datastates.format.values import element_bytes
from megatron_datastates.plan.boxes import Offsets, box_runs, contiguous_strides, intersect


@dataclasses.dataclass(frozen=True)
class FileReads:
    """Runs of one data file: bytes at `offsets` go to byte `targets` of the destination."""

    file: int
    offsets: Offsets
    targets: Offsets
    run_bytes: int


def plan_box(
    entry: TensorEntry,
    fragment: int,
    start: Sequence[int],
    lengths: Sequence[int],
    target_strides: Sequence[int],
) -> FileReads:
    """Reads the box [start, start + lengths) of one stored fragment (coordinates within the fragment).

    Args:
        target_strides: of the destination, elements; its first byte is where the box's first goes.
    """
    item = element_bytes(entry.dtype)
    strides = contiguous_strides(entry.shapes[fragment].tolist())
    first = int(entry.file_offsets[fragment]) + item * sum(s * n for s, n in zip(start, strides, strict=True))
    stored, targets, size = box_runs(lengths, strides, target_strides, item)
    return FileReads(int(entry.files[fragment]), stored + np.uint64(first), targets, size)


def plan_slice(
    entry: TensorEntry, offset: Sequence[int], shape: Sequence[int]
) -> tuple[list[FileReads], int]:
    """Reads [offset, offset + shape) of the global tensor into a contiguous destination.

    Returns:
        The reads, and the number of elements they cover (less than the slice if the tensor has holes).
    """
    item = element_bytes(entry.dtype)
    strides = contiguous_strides(shape)
    reads, covered = [], 0
    begins, ends = np.array(offset, np.int64), np.array(offset, np.int64) + np.array(shape, np.int64)
    touched = ((entry.offsets < ends) & (entry.offsets + entry.shapes > begins)).all(axis=1)
    for i in np.flatnonzero(touched).tolist():
        stored = entry.offsets[i].tolist()
        common = intersect(stored, entry.shapes[i].tolist(), offset, shape)
        if common is None:
            continue
        begin, lengths = common
        within = [b - s for b, s in zip(begin, stored, strict=True)]
        part = plan_box(entry, i, within, lengths, strides)
        shift = item * sum((b - o) * n for b, o, n in zip(begin, offset, strides, strict=True))
        reads.append(dataclasses.replace(part, targets=part.targets + np.uint64(shift)))
        covered += int(np.prod(lengths, dtype=np.int64))
    return reads, covered
