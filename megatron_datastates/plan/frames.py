"""The plan of a read of encoded data: which frames of which entry, and where their elements go."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from megatron_datastates.format.codecs import FRAME_BYTES
from megatron_datastates.format.strides import footprint_elements
from megatron_datastates.format.tail import TailEntry


@dataclasses.dataclass(frozen=True)
class FramedBox:
    """A strided box of the elements that one entry of a data file's tail decodes to."""

    file: int
    entry: TailEntry | int  # or the number of an encoded fragment
    logical_bytes: int  # that the entry has to have
    item_bytes: int  # of an element
    first: int  # element of the entry
    lengths: tuple[int, ...]
    strides: tuple[int, ...]  # elements; those of a row-major fragment
    target: int  # of the first element, in bytes from the destination's first element
    target_strides: tuple[int, ...]  # elements

    @property
    def bytes(self) -> int:
        """How many bytes it delivers."""
        return math.prod(self.lengths) * self.item_bytes

    @property
    def span(self) -> tuple[int, int]:
        """Where it begins and ends in the entry, in logical bytes."""
        begin = self.first * self.item_bytes
        return begin, begin + footprint_elements(self.lengths, self.strides) * self.item_bytes


def plan_range(file: int, entry: TailEntry, begin: int, size: int) -> FramedBox:
    """Plans to read `size` logical bytes of an entry from `begin` on."""
    return FramedBox(file, entry, entry.bytes, 1, begin, (size,), (1,), 0, (1,))


def cut_into_windows(box: FramedBox, most_bytes: int) -> Iterator[FramedBox]:
    """Yields boxes that tile a box, each with at most `most_bytes` from its first to its last element.

    Every frame that such a box spans has some of its elements: where rows lie a frame or more apart, they are
    cut. A box without elements yields none.
    """
    if 0 in box.lengths:
        return
    begin, end = box.span
    axis = next((n for n, length in enumerate(box.lengths) if length > 1), None)
    if axis is None or (end - begin <= most_bytes and not _has_wide_gap(box)):
        yield box
        return
    start = 0
    while start < box.lengths[axis]:
        rest = dataclasses.replace(
            box,
            first=box.first + start * box.strides[axis],
            target=box.target + start * box.target_strides[axis] * box.item_bytes,
        )
        rows = min(_rows_at_a_time(rest, axis, most_bytes), box.lengths[axis] - start)
        lengths = (*box.lengths[:axis], rows, *box.lengths[axis + 1 :])
        yield from cut_into_windows(dataclasses.replace(rest, lengths=lengths), most_bytes)
        start += rows


def _has_wide_gap(box: FramedBox) -> bool:
    """Returns whether a whole frame may lie between two neighbouring rows, along any axis."""
    return any(_gap(box, axis) >= FRAME_BYTES for axis, n in enumerate(box.lengths) if n > 1)


def _gap(box: FramedBox, axis: int) -> int:
    inner = footprint_elements(box.lengths[axis + 1 :], box.strides[axis + 1 :])
    return (box.strides[axis] - inner) * box.item_bytes


def _rows_at_a_time(box: FramedBox, axis: int, most_bytes: int) -> int:
    """Returns how many rows of an axis fit, ending at a frame's end if that is possible."""
    row = box.strides[axis] * box.item_bytes
    if _has_wide_gap(box):
        return 1
    begin, _ = box.span
    aligned = (begin + most_bytes) // FRAME_BYTES * FRAME_BYTES - begin
    return max((aligned if aligned > 0 else most_bytes) // row, 1)
