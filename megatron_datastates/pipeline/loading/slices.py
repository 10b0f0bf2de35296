"""Which bytes of which data files make up a slice of a global tensor, checked against what the index says.

Belongs here: plans of reads that deliver a whole slice, or an error: holes, overlaps, and places outside the
data. Does not belong here: reading them (data_files.py); how boxes become spans of bytes (plan/reads.py).
"""

from __future__ import annotations

import functools
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


class SlicePlanner:
    """Plans reads of slices of one checkpoint's tensors.

    Raises (all methods that plan): MissingKeyError for no such tensor, MismatchError for a slice that leaves
    it, FormatError for one that is not stored as a whole.
    """

    def __init__(self, files: DataFiles) -> None:
        self._files = files

    def plan_new(
        self, key: str, offset: Sequence[int] | None, shape: Sequence[int] | None
    ) -> tuple[torch.Tensor, list[ScheduledRead]]:
        """Plans to read a slice (all of the tensor by default) into new host memory, in its stored dtype."""
        import torch

        entry = self._files.index.tensor(key)
        offset, shape = checked_slice(key, entry.global_shape, offset, shape)
        reads = self._reads(key, entry, offset, shape)
        target = torch.empty(shape, dtype=torch_dtype(entry.dtype, key), device="cpu")
        return target, [ScheduledRead(part, target.data_ptr()) for part in reads]

    def plan_into(
        self,
        key: str,
        offset: Sequence[int],
        shape: Sequence[int],
        target: torch.Tensor,
        through_cache: bool,
    ) -> list[ScheduledRead]:
        """Plans to read a slice into a contiguous target of its shape and of the stored dtype."""
        entry = self._files.index.tensor(key)
        offset, shape = checked_slice(key, entry.global_shape, offset, shape)
        reads = self._reads(key, entry, offset, shape)
        return [ScheduledRead(part, target.data_ptr(), target.is_cuda, through_cache) for part in reads]

    def _reads(
        self, key: str, entry: TensorEntry, offset: Sequence[int], shape: Sequence[int]
    ) -> list[BoxReads | FramedBox]:
        reads, covered, touched = plan_slice(entry, offset, shape)
        wanted = math.prod(shape)  # looked at before memory is asked for: a hostile index has any shape
        if covered < wanted:
            raise FormatError(f"tensor {key!r} has holes: {covered} of {wanted} elements are stored")
        self._check_extents(key, entry, reads, touched)
        overlap = first_overlap(entry.offsets[touched], entry.shapes[touched])
        if overlap is not None:  # then the count above proves nothing
            raise FormatError(f"tensor {key!r}: two fragments both hold the element at {overlap}")
        return reads

    @functools.cached_property
    def _data_ends(self) -> npt.NDArray[np.uint64]:
        return np.array([file.footer_offset for file in self._files.manifest.files], np.uint64)

    def _check_extents(
        self,
        key: str,
        entry: TensorEntry,
        reads: Sequence[BoxReads | FramedBox],
        touched: npt.NDArray[np.intp],
    ) -> None:
        """Raises FormatError for fragments outside the data, and for entries that are not theirs."""
        for part in reads:
            if isinstance(part, FramedBox):
                resolve(self._files, part)
        if entry.encoded:
            return
        begins, files = entry.file_offsets[touched], entry.files[touched]
        ends, data_ends = begins + entry.file_bytes[touched], self._data_ends[files]
        beyond = ends > data_ends  # both parts of `ends` are below 2**62: see format/stored_entries.py
        if beyond.any():
            at = int(beyond.argmax())
            place = f"bytes [{begins[at]}, {ends[at]}) of {self._files.file_path(int(files[at]))}"
            raise FormatError(
                f"{self._files.manifest.index.name} is damaged: it places {key!r} at {place}, which has "
                f"{data_ends[at]} bytes of data: load an older checkpoint"
            )
