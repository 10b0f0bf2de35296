"""Cuts tensors into batches of slices that are read in one go, in the order in which they are stored.

A large tensor makes several batches. Small ones share a batch, so that a block of a file in which several lie
is read once. A batch is read from every checkpoint that is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_datastates.convert.parts import Part
from megatron_datastates.convert.views import Tensors
from megatron_datastates.format.values import element_bytes
from megatron_datastates.plan.boxes import cut_box

# Memory for one element of two checkpoints: as stored, as float64, their differences and masks.
_BYTES_PER_ELEMENT = 64
_BATCH_BYTES = 16 << 20  # as stored
AHEAD = 3  # batches that were read, or are being read, and not compared yet


class Cut(NamedTuple):
    """A slice of a tensor, within one of its parts."""

    key: str
    part: Part
    offset: tuple[int, ...]  # in the global tensor
    shape: tuple[int, ...]
    bytes: int

    @property
    def slice(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """What sources are asked for."""
        return self.key, self.offset, self.shape


def batches(
    sources: Mapping[str, Tensors], parts: Mapping[str, Sequence[Part]], memory_bytes: int
) -> Iterator[list[Cut]]:
    """Yields all elements of parts, by key, in batches.

    Args:
        sources: by key, a checkpoint that has the tensor; the order of its files is followed.
        memory_bytes: upper limit of the memory for AHEAD + 1 batches of two checkpoints.
    """
    most = max(memory_bytes // _BYTES_PER_ELEMENT // (AHEAD + 1), 1)
    ordered = sorted(
        ((key, part) for key in parts for part in parts[key]),
        key=lambda one: sources[one[0]].place(one[0], one[1].offset),
    )
    batch: list[Cut] = []
    elements = size = 0
    for key, part in ordered:
        item = element_bytes(sources[key].tensors[key].dtype)
        for offset, shape in cut_box(part.offset, part.shape, min(most, _BATCH_BYTES // item)):
            count = math.prod(shape)
            if batch and (elements + count > most or size + count * item > _BATCH_BYTES):
                yield batch
                batch, elements, size = [], 0, 0
            batch.append(Cut(key, part, offset, shape, count * item))
            elements, size = elements + count, size + count * item
    if batch:
        yield batch
