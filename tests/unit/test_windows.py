"""Windows: together they deliver what the spans do, and fetch every block that a span touches."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.format.values import BLOCK_BYTES
from megatron_datastates.plan.reads import ReadSpans
from megatron_datastates.plan.windows import Window, cut_windows

WINDOW = 4 * BLOCK_BYTES
DATA = 13 * BLOCK_BYTES + 4096


def spans_of(rows: list[tuple[int, int, int, int, int]]) -> ReadSpans:
    files, offsets, counts, sizes, steps = np.array(rows, np.uint64).reshape(-1, 5).T
    targets = np.arange(len(rows), dtype=np.uint64) << np.uint64(32)
    return ReadSpans(
        files, offsets, counts, sizes, steps, targets, sizes + np.uint64(7), np.zeros(len(rows), np.bool_)
    )


def moved_bytes(spans: ReadSpans) -> set[tuple[int, int, int]]:
    """Returns where the first and last byte of each stretch of at most 997 bytes comes from, and goes."""
    found = set()
    for n in range(len(spans.files)):
        for row in range(int(spans.rows[n])):
            source = int(spans.offsets[n]) + row * int(spans.file_steps[n])
            target = int(spans.targets[n]) + row * int(spans.target_steps[n])
            for byte in range(-source % 997, int(spans.row_bytes[n]), 997):
                found.add((int(spans.files[n]), source + byte, target + byte))
    return found


def windows_of(spans: ReadSpans, gap_bytes: int) -> list[Window]:
    sizes = np.full(3, DATA, np.uint64)
    return list(cut_windows(spans, sizes, window_bytes=WINDOW, gap_bytes=gap_bytes))


@st.composite
def any_span(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    file, offset = draw(st.integers(0, 2)), draw(st.integers(0, DATA - 1))
    size = draw(st.one_of(st.integers(1, 5000), st.integers(1, DATA)))
    size = min(size, DATA - offset)
    step = size + draw(st.one_of(st.just(0), st.integers(0, 9000), st.integers(0, 3 * BLOCK_BYTES)))
    most = (DATA - offset - size) // step + 1
    return file, offset, min(draw(st.integers(1, 40)), most), size, step


@given(st.lists(any_span(), min_size=1, max_size=6), st.sampled_from([0, BLOCK_BYTES]))
def test_windows_deliver_what_the_spans_do(rows: list[tuple[int, int, int, int, int]], gap: int) -> None:
    spans = spans_of(rows)
    windows = windows_of(spans, gap)
    assert set().union(*(moved_bytes(window.spans) for window in windows)) == moved_bytes(spans)
    places = [(window.file, int(window.spans.offsets[0]) // WINDOW) for window in windows]
    assert places == sorted(set(places)), "one window for each place, in the order of the files"
    touched = {
        (int(spans.files[n]), block)
        for n in range(len(spans.files))
        for row in range(int(spans.rows[n]))
        for begin in [int(spans.offsets[n]) + row * int(spans.file_steps[n])]
        for block in range(begin // BLOCK_BYTES, (begin + int(spans.row_bytes[n]) - 1) // BLOCK_BYTES + 1)
    }
    fetched = set()
    for window in windows:
        assert all(begin % BLOCK_BYTES == 0 and end <= DATA for begin, end in window.pieces)
        assert window.pieces == sorted(window.pieces)
        own = {
            (window.file, block)
            for begin, end in window.pieces
            for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        }
        assert sum(end - begin for begin, end in window.pieces) <= WINDOW + BLOCK_BYTES
        for n in range(len(window.spans.files)):
            begin, end = int(window.spans.offsets[n]), int(window.spans.ends()[n])
            assert {(window.file, begin // BLOCK_BYTES), (window.file, (end - 1) // BLOCK_BYTES)} <= own
        fetched |= own
    assert touched <= fetched
    if gap == 0:
        assert touched == fetched, "nothing else is fetched"


def test_nothing_is_fetched_for_empty_spans() -> None:
    assert windows_of(spans_of([(0, 0, 1, 0, 0), (1, 4096, 3, 0, 64)]), 0) == []


def test_blocks_between_others_are_read_through_up_to_the_gap() -> None:
    spans = spans_of([(0, 0, 1, 10, 10), (0, 2 * BLOCK_BYTES, 1, 10, 10)])
    (window,) = windows_of(spans, BLOCK_BYTES)
    assert window.pieces == [(0, 3 * BLOCK_BYTES)]
    (window,) = windows_of(spans, BLOCK_BYTES - 1)
    assert window.pieces == [(0, BLOCK_BYTES), (2 * BLOCK_BYTES, 3 * BLOCK_BYTES)]
