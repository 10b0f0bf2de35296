"""Whether the fragments of a tensor are all of it, and none of it twice."""

from __future__ import annotations

import numpy as np

from megatron_datastates.format.index import TensorEntry
from megatron_datastates.plan.boxes import first_overlap


def coverage_faults(key: str, entry: TensorEntry) -> list[str]:
    """What is wrong with the fragments of one tensor; nothing if they tile it."""
    faults = []
    stored = int(np.prod(entry.shapes, axis=1).sum())
    if stored < int(np.prod(entry.global_shape, dtype=np.int64)):
        faults.append(f"tensor {key!r} has holes: {stored} elements of shape {entry.global_shape} are stored")
    overlap = first_overlap(entry.offsets, entry.shapes)
    if overlap is not None:
        faults.append(f"tensor {key!r}: two fragments both hold the element at {overlap}")
    return faults
