"""Cuts the spans of a read into windows of files, for sources that are read in few large pieces."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from megatron_datastates.format.tables import Words
from megatron_datastates.format.values import BLOCK_BYTES
from megatron_datastates.plan.reads import ReadSpans

_LONG_ROW_BYTES = BLOCK_BYTES  # from here on a row is cut like a span
_CLOSE_ROWS_BYTES = BLOCK_BYTES  # rows that are further apart may leave whole blocks between them


@dataclasses.dataclass(frozen=True)
class Window:
    """Spans of one file that lie close together.

    Attributes:
        spans: what is delivered; `files` are as they were.
        pieces: the ranges (begin, end) of the file to fetch: whole blocks, in order, cut at the end of its
            data.
    """

    file: int
    spans: ReadSpans
    pieces: list[tuple[int, int]]


def cut_windows(
    spans: ReadSpans, data_bytes: Words, *, window_bytes: int, gap_bytes: int
) -> Iterator[Window]:
    """Yields windows that together deliver what `spans` do, in the order of files and offsets.

    Every block that a span touches is in a piece of its window. A window begins at a multiple of
    `window_bytes`; it ends at the next one, or at the end of the block where a short row ends that begins in
    it.

    Args:
        data_bytes: of each file.
        window_bytes: a multiple of BLOCK_BYTES.
        gap_bytes: blocks that nothing needs are fetched too if at most so many bytes lie between others.
    """
    spans = spans.take(np.flatnonzero((spans.rows > 0) & (spans.row_bytes > 0)))
    cut = _cut_rows(_single_rows(spans), window_bytes)
    numbers = cut.offsets // np.uint64(window_bytes)
    order = np.lexsort((cut.offsets, numbers, cut.files))
    cut, numbers = cut.take(order), numbers[order]
    changes = np.flatnonzero((np.diff(cut.files) != 0) | (np.diff(numbers) != 0)) + 1
    bounds = [0, *changes.tolist(), len(order)]
    for begin, end in itertools.pairwise(bounds):
        if begin == end:
            continue
        part = cut.take(np.arange(begin, end))
        file = int(part.files[0])
        yield Window(file, part, _pieces(part, int(data_bytes[file]), gap_bytes))


def _repeat(spans: ReadSpans, counts: Words) -> tuple[ReadSpans, Words]:
    """Returns each span as often as `counts` says, and the number of each copy."""
    times = counts.astype(np.int64)
    which = np.repeat(np.arange(len(times)), times)
    firsts = np.cumsum(times) - times
    return spans.take(which), (np.arange(len(which)) - firsts[which]).astype(np.uint64)


def _single_rows(spans: ReadSpans) -> ReadSpans:
    """Returns spans of one row for those whose rows are long, or far from each other."""
    apart = (spans.row_bytes >= _LONG_ROW_BYTES) | (spans.file_steps > _CLOSE_ROWS_BYTES)
    counts = np.where(apart, spans.rows, np.uint64(1))
    if not (counts > 1).any():
        return spans
    made, numbers = _repeat(spans, counts)
    return dataclasses.replace(
        made,
        offsets=made.offsets + numbers * made.file_steps,
        targets=made.targets + numbers * made.target_steps,
        rows=np.where(np.repeat(apart, counts.astype(np.int64)), np.uint64(1), made.rows),
    )


def _cut_rows(spans: ReadSpans, window_bytes: int) -> ReadSpans:
    """Returns spans that each lie in one window: rows by where they begin, single ones by their bytes.

    Rows are close to each other (`_single_rows`), so some begin in each window from the first to the last.
    """
    size = np.uint64(window_bytes)
    single = spans.rows == 1
    last = np.where(
        single,
        spans.offsets + spans.row_bytes - np.uint64(1),
        spans.offsets + (spans.rows - np.uint64(1)) * spans.file_steps,
    )
    first_window = spans.offsets // size
    made, numbers = _repeat(spans, last // size - first_window + np.uint64(1))
    begin = made.offsets // size * size + numbers * size
    single = made.rows == 1
    ends = np.minimum(begin + size, made.offsets + made.row_bytes)
    begins = np.maximum(begin, made.offsets)
    first = _ceil(begins - made.offsets, made.file_steps)
    end = np.minimum(_ceil(begin + size - made.offsets, made.file_steps), made.rows)
    return dataclasses.replace(
        made,
        offsets=np.where(single, begins, made.offsets + first * made.file_steps),
        targets=made.targets + np.where(single, begins - made.offsets, first * made.target_steps),
        row_bytes=np.where(single, ends - begins, made.row_bytes),
        rows=np.where(single, np.uint64(1), end - first),
    )


def _ceil(value: Words, divisor: Words) -> Words:
    return (value + divisor - np.uint64(1)) // divisor


def _pieces(spans: ReadSpans, data_bytes: int, gap_bytes: int) -> list[tuple[int, int]]:
    block = np.uint64(BLOCK_BYTES)
    begins = spans.offsets // block * block
    ends = np.minimum(_ceil(spans.ends(), np.full(1, block)) * block, np.uint64(data_bytes))
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    starts = np.flatnonzero(begins[1:] > ends[:-1] + np.uint64(gap_bytes)) + 1
    return list(
        zip(begins[[0, *starts]].tolist(), ends[[*(starts - 1), len(ends) - 1]].tolist(), strict=True)
    )
