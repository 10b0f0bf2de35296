"""Which bytes of which data files make up a slice of a global tensor, checked against what the index says.

Belongs here: plans of reads that deliver a whole slice, or an error: holes, overlaps, and places outside the
data. Does not belong here: reading them (data_files.py); how boxes become spans of bytes (plan/reads.py).

Plans raise MissingKeyError for no such tensor, MismatchError for a slice that leaves it, and FormatError for
one that is not stored as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import FormatError
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.pipeline.loading.data_files import DataFiles
from megatron_datastates.pipeline.loading.decoding import resolve
from megatron_datastates.pipeline.loading.dtypes import torch_dtype
from megatron_datastates.plan.boxes import checked_slice, first_overlap
from megatron_datastates.plan.frames import FramedBox
from megatron_datastates.plan.reads import BoxReads, ScheduledRead, plan_slice

if TYPE_CHECKING:
    import torch


def plan_new(
    checkpoint: DataFiles, key: str, offset: Sequence[int] | None, shape: Sequence[int] | None
) -> tuple[torch.Tensor, list[ScheduledRead]]:
    """Plans to read a slice (all of the tensor by default) into new host memory, in its stored dtype."""
    import torch

    entry = checkpoint.index.tensor(key)
    offset, shape = checked_slice(key, entry.global_shape, offset, shape)
    reads = _reads(checkpoint, key, entry, offset, shape)
    target = torch.empty(shape, dtype=torch_dtype(entry.dtype, key), device="cpu")
    return target, [ScheduledRead(part, target.data_ptr()) for part in reads]


def plan_into(
    checkpoint: DataFiles,
    key: str,
    offset: Sequence[int],
    shape: Sequence[int],
    target: torch.Tensor,
    through_cache: bool,
) -> list[ScheduledRead]:
    """Plans to read a slice into a contiguous target of its shape and of the stored dtype."""
    entry = checkpoint.index.tensor(key)
    offset, shape = checked_slice(key, entry.global_shape, offset, shape)
    reads = _reads(checkpoint, key, entry, offset, shape)
    return [ScheduledRead(part, target.data_ptr(), target.is_cuda, through_cache) for part in reads]


def _reads(
    checkpoint: DataFiles, key: str, entry: TensorEntry, offset: Sequence[int], shape: Sequence[int]
) -> list[BoxReads | FramedBox]:
    reads, covered, touched = plan_slice(entry, offset, shape)
    wanted = math.prod(shape)  # looked at before memory is asked for: a hostile index has any shape
    if covered < wanted:
        raise FormatError(f"tensor {key!r} has holes: {covered} of {wanted} elements are stored")
    _check_extents(checkpoint, key, entry, reads, touched)
    overlap = first_overlap(entry.offsets[touched], entry.shapes[touched])
    if overlap is not None:  # then the count above proves nothing
        raise FormatError(f"tensor {key!r}: two fragments both hold the element at {overlap}")
    return reads


def _check_extents(
    checkpoint: DataFiles,
    key: str,
    entry: TensorEntry,
    reads: Sequence[BoxReads | FramedBox],
    touched: npt.NDArray[np.intp],
) -> None:
    """Raises FormatError for fragments outside the data, and for entries that are not theirs."""
    for part in reads:
        if isinstance(part, FramedBox):
            resolve(checkpoint, part)
    if entry.encoded:
        return
    begins, holders = entry.file_offsets[touched], entry.files[touched]
    ends, data_ends = begins + entry.file_bytes[touched], checkpoint.data_ends[holders]
    beyond = ends > data_ends  # both parts of `ends` are below 2**62: see format/stored_entries.py
    if beyond.any():
        at = int(beyond.argmax())
        place = f"bytes [{begins[at]}, {ends[at]}) of {checkpoint.file_path(int(holders[at]))}"
        raise FormatError(
            f"{checkpoint.manifest.index.name} is damaged: it places {key!r} at {place}, which has "
            f"{data_ends[at]} bytes of data: load an older checkpoint"
        )
