"""What comparisons see of a checkpoint: its tensors, with optimizer state by parameter instead of by bucket.

Buckets depend on the parallel layout, and one bucket has elements of many layers. Optimizer maps say which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_datastates.convert.sources.by_parameter import tensors_by_parameter
from megatron_datastates.convert.sources.datastates import DataStatesSource
from megatron_datastates.convert.sources.source import Slice, Source, SourceTensor, fragment_with
from megatron_datastates.errors import FormatError
from megatron_datastates.format.values import element_bytes
from megatron_datastates.pipeline.loading.dtypes import torch_dtype
from megatron_datastates.pipeline.loading.optimizer import BucketStates, has_optimizer_maps
from megatron_datastates.plan.boxes import contiguous_strides
from megatron_datastates.plan.reads import ScheduledRead
from megatron_datastates.plan.strided import fragment_at

if TYPE_CHECKING:
    import torch

# A map that says that a state has more elements than this for each one that is stored is damaged or hostile:
# to read as many zeros would take forever.
_MOST_PER_STORED = 4096


class Tensors(Protocol):
    """Tensors that can be compared. See Source for its methods."""

    @property
    def directory(self) -> Path: ...
    @property
    def tensors(self) -> Mapping[str, SourceTensor]: ...
    def read_tensors(self, slices: Sequence[Slice]) -> list[torch.Tensor]: ...
    def place(self, key: str, offset: Sequence[int]) -> tuple[str, int]: ...


class ByParameter:
    """See Tensors. Elements without state, because their parameter is frozen, are zeros.

    What a map does not describe (padding, replicas) is not there.
    """

    def __init__(self, stored: DataStatesSource) -> None:
        """Reads the optimizer maps. Raises FormatError: they are damaged, or do not fit the checkpoint."""
        self._stored, self.directory = stored, stored.directory
        self._states = BucketStates(stored.checkpoint)
        self.tensors = tensors_by_parameter(stored, self._states)
        for key, state in self._states.items():
            elements = math.prod(state.global_shape)
            if elements > _MOST_PER_STORED * state.stored_elements:
                raise FormatError(
                    f"{key!r} has holes: {state.stored_elements} of {elements} elements are stored"
                )

    @property
    def buckets(self) -> set[str]:
        """The keys of stored tensors that are not among `tensors`."""
        return self._states.buckets

    def read_tensors(self, slices: Sequence[Slice]) -> list[torch.Tensor]:
        import torch

        stored = iter(self._stored.read_tensors([one for one in slices if one[0] not in self._states]))
        tensors, scheduled = [], []
        for key, offset, shape in slices:
            if key not in self._states:
                tensors.append(next(stored))
                continue
            state = self._states[key]
            target = torch.zeros(tuple(shape), dtype=torch_dtype(state.dtype, key), device="cpu")
            reads = state.plan(offset, shape, contiguous_strides(shape), has_holes=True)
            tensors.append(target)
            scheduled += [ScheduledRead(part, target.data_ptr()) for part in reads]
        self._stored.checkpoint.read(scheduled, self._stored.reader())
        return tensors

    def place(self, key: str, offset: Sequence[int]) -> tuple[str, int]:
        if key not in self._states:
            return self._stored.place(key, offset)
        state = self._states[key]
        number = fragment_with(state, offset)
        if number is None:
            return "", 0
        piece = state.pieces[number]
        within = zip(offset, piece.shard.offset, piece.shard.strides, strict=True)
        begin = piece.begin + piece.shard.start + sum((o - s) * stride for o, s, stride in within)
        line = state.line(piece.key)
        fragment = fragment_at(line, begin, piece.key)
        after = begin - int(line.offsets[fragment, 0])  # elements
        at = int(line.file_offsets[fragment]) + after * element_bytes(line.dtype)
        return f"{line.files[fragment]:09d}", at


def view(source: Source) -> Tensors:
    """Returns what comparisons see of a checkpoint. Raises FormatError: its optimizer maps are damaged."""
    if isinstance(source, DataStatesSource) and has_optimizer_maps(source.checkpoint):
        return ByParameter(source)
    return source


def same_keys(views: Sequence[Tensors]) -> bool:
    """Returns whether the keys of views mean the same.

    They do not if one has state by parameter, and another has the same buckets and no map (a conversion to
    torch_dist, perhaps): then all have to be compared as they are stored.
    """
    buckets = {key for one in views if isinstance(one, ByParameter) for key in one.buckets}
    return not any(not isinstance(one, ByParameter) and buckets & one.tensors.keys() for one in views)


def by_parameter(sources: Sequence[Source]) -> list[Tensors]:
    """Returns what comparisons see of checkpoints that are compared with each other. Raises as `view`."""
    views = [view(source) for source in sources]
    return views if same_keys(views) else list(sources)
