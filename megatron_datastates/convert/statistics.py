"""Statistics of tensors, computed part by part, so that no whole tensor is held in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch  # here: threads read tensors, and two that import a package at once may find half of it

from megatron_datastates.convert.drift import KINDS, raw_bytes
from megatron_datastates.convert.workers import ahead
from megatron_datastates.engine.native import summarize_numbers
from megatron_datastates.format.values import element_bytes
from megatron_datastates.plan.boxes import cut_box

if TYPE_CHECKING:
    from megatron_datastates.convert.contents import Content

PART_BYTES = 16 << 20  # of a tensor, read in one go
_READERS = 2  # parts that are read at a time: the disk is not idle between them
_AHEAD = 3  # parts that are read, or being read, while another is computed


@dataclasses.dataclass
class Statistics:
    """Statistics of a tensor's elements.

    `finite` elements are neither NaN nor infinite; minimum, maximum, mean and norm are of these alone. They
    are computed in float64, so integers beyond 2^53 are rounded; complex numbers count by absolute value.
    """

    finite: int = 0
    nans: int = 0
    infinities: int = 0
    minimum: float | None = None
    maximum: float | None = None
    total: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float | None:
        """Returns the mean of the finite elements, or None if there are none."""
        return self.total / self.finite if self.finite else None

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    def add(self, values: torch.Tensor) -> None:
        if values.dtype not in KINDS:
            values = values.to(torch.complex128).abs() if values.is_complex() else values.to(torch.float64)
        finite, nans, low, high, total, squares = summarize_numbers(KINDS[values.dtype], raw_bytes(values))
        self.nans += nans
        self.infinities += values.numel() - finite - nans
        if finite == 0:
            return
        self.minimum = low if self.minimum is None else min(self.minimum, low)
        self.maximum = high if self.maximum is None else max(self.maximum, high)
        self.finite += finite
        self.total += total
        self.squares += squares


def statistics(
    contents: Sequence[Content], progress: Callable[[int], None] = lambda bytes_done: None
) -> list[Statistics | None]:
    """Computes the statistics of tensors; reads the next parts meanwhile, box by box as they are stored.

    Calls `progress` with the number of bytes that are done since the last call.

    Returns:
        Those of each tensor; None for a dtype that torch cannot convert to float64.
    """
    sums: list[Statistics | None] = [Statistics() for _ in contents]
    with ThreadPoolExecutor(_READERS) as reader:
        for number, part in ahead(_reads(contents, reader), _AHEAD):
            values, sum_of = part.result(), sums[number]
            try:
                if sum_of is not None:
                    sum_of.add(values)
            except NotImplementedError:  # torch's, of dtypes that it can only store
                sums[number] = None
            progress(values.numel() * values.element_size())
    return sums


def _reads(
    contents: Sequence[Content], reader: ThreadPoolExecutor
) -> Iterator[tuple[int, Future[torch.Tensor]]]:
    for number, content in enumerate(contents):
        most = PART_BYTES // element_bytes(content.dtype)
        for offset, shape in zip(content.offsets.tolist(), content.shapes.tolist(), strict=True):
            for at, lengths in cut_box(offset, shape, most):
                yield number, reader.submit(content.read, at, lengths)
