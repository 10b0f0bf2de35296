"""The plan of the copies of every save of one structure: everything but the tensors' addresses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.tables import Words
from megatron_datastates.plan.boxes import PairedSpans
from megatron_datastates.plan.layout import Layout


@dataclasses.dataclass(frozen=True)
class CopyPlan:
    """Spans in the order of the file. Element i of each array is span i's; span 0 is the header."""

    origin: npt.NDArray[np.intp]  # 0: the header; i + 1: fragment i
    starts: Words  # bytes from the address of the origin
    offsets: Words  # in the file
    bytes: Words
    row_bytes: Words  # `bytes` are a multiple of it
    row_steps: Words  # bytes from row to row, in memory
    eager: npt.NDArray[np.bool_]
    on_device: npt.NDArray[np.bool_]
    devices: tuple[int, ...]  # the CUDA devices of the sources

    def sources(self, header: int, fragments: Words) -> Words:
        """Returns the addresses of the spans, given those of the header and of each fragment at this save."""
        origins = np.concatenate([np.array([header], np.uint64), fragments])
        return origins[self.origin] + self.starts

    def storages(self, fragments: Sequence[int]) -> Words:
        """Returns a number for the storage of each span, given those of the fragments.

        Spans of different storages are not merged. Without `fragments` all spans get the same number: in host
        memory a copy may cross allocations.
        """
        if not fragments:
            return np.zeros(len(self.origin), np.uint64)
        return np.array([0, *fragments], np.uint64)[self.origin]

    @functools.cached_property
    def lazy_fragments(self) -> list[int]:
        """The numbers of the fragments that are not copied before the trainer continues."""
        return [int(number) - 1 for number in np.unique(self.origin[~self.eager]) if number > 0]


def plan_copies(
    layout: Layout, spans: Sequence[PairedSpans], eager: Sequence[bool], devices: Sequence[int | None]
) -> CopyPlan:
    """Plans the copies of the fragments that `layout` places.

    Args:
        spans: of each fragment: `a` is its memory, `b` its place in the file.
        eager: whether each fragment is copied before the trainer continues.
        devices: the CUDA device of each fragment; None for host memory.
    """
    order = [spans[i] for i in layout.order]
    counts = np.array([1, *(len(of_one.a_starts) for of_one in order)])
    header_start = np.zeros(1, np.uint64)

    def each(header: int, values: Sequence[int] | Words) -> Words:
        return np.repeat(np.concatenate([[header], np.asarray(values, np.uint64)]).astype(np.uint64), counts)

    origin = np.repeat(np.array([0, *(i + 1 for i in layout.order)], np.intp), counts)
    return CopyPlan(
        origin=origin,
        starts=np.concatenate([header_start, *(of_one.a_starts for of_one in order)]),
        offsets=each(0, layout.offsets)
        + np.concatenate([header_start, *(of_one.b_starts for of_one in order)]),
        bytes=each(HEADER_BYTES, [of_one.rows * of_one.row_bytes for of_one in order]),
        row_bytes=each(HEADER_BYTES, [of_one.row_bytes for of_one in order]),
        row_steps=each(HEADER_BYTES, [of_one.a_step for of_one in order]),
        eager=np.array([False, *eager], np.bool_)[origin],
        on_device=np.array([False, *(device is not None for device in devices)], np.bool_)[origin],
        devices=tuple(sorted({device for device in devices if device is not None})),
    )
