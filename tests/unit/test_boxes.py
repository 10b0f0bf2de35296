"""Boxes against numpy: spans in strided memories, intersections, overlaps."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.format.strides import overlaps_itself
from megatron_datastates.plan.boxes import (
    contiguous_strides,
    cut_box,
    first_overlap,
    hold_all,
    intersect,
    paired_spans,
)

LENGTHS = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def views(draw, lengths):
    """Draws a view of these lengths into some larger memory: sliced, with its axes in any order in memory."""
    order = draw(st.permutations(range(len(lengths))))
    margins = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in lengths]
    whole = [before + n + after for n, (before, after) in zip(lengths, margins, strict=True)]
    view = np.zeros([whole[axis] for axis in order], np.uint32).transpose(np.argsort(order).tolist())
    return view[(*(slice(b, b + n) for n, (b, _) in zip(lengths, margins, strict=True)), ...)]


def element_strides(view: np.ndarray) -> list[int]:
    return [step // view.itemsize for step in view.strides]


def flat_bytes(view: np.ndarray) -> np.ndarray:
    """Returns the view's memory as bytes, from its first element on."""
    last = sum((n - 1) * step for n, step in zip(view.shape, element_strides(view), strict=True))
    return np.lib.stride_tricks.as_strided(view, (last + 1,), (view.itemsize,)).view(np.uint8)


@st.composite
def pairs_of_views(draw):
    lengths = draw(LENGTHS)
    return draw(views(lengths)), draw(views(lengths))


def copy_spans(spans, memory, goal) -> None:
    """Copies from a to b, row by row."""
    for here, there in zip(spans.a_starts.tolist(), spans.b_starts.tolist(), strict=True):
        for row in range(spans.rows):
            a, b = here + row * spans.a_step, there + row * spans.b_step
            goal[b : b + spans.row_bytes] = memory[a : a + spans.row_bytes]


@given(pairs_of_views())
def test_copying_run_by_run_is_copying_the_box(pair):
    source, target = pair
    source[...] = np.arange(1, source.size + 1, dtype=np.uint32).reshape(source.shape)
    spans = paired_spans(source.shape, element_strides(source), element_strides(target), 4)
    if source.size:
        copy_spans(spans, flat_bytes(source), flat_bytes(target))
    assert len(spans.a_starts) * spans.rows * spans.row_bytes == source.size * 4
    assert (target == source).all()


@given(LENGTHS)
def test_a_contiguous_box_is_one_piece(lengths):
    strides = contiguous_strides(lengths)
    spans = paired_spans(lengths, strides, strides, 2)
    count = 0 if 0 in lengths else 1
    assert (spans.a_starts.tolist(), spans.b_starts.tolist(), spans.rows) == ([0] * count, [0] * count, 1)
    assert spans.row_bytes == 2 * int(np.prod(lengths))


def form(*arguments) -> tuple:
    spans = paired_spans(*arguments)
    return len(spans.a_starts), *spans[2:]


def test_a_slice_of_columns_is_one_run_of_rows():
    assert form([3, 2], [10, 1], [2, 1], 4) == (1, 3, 8, 40, 8)


def test_a_slice_of_rows_is_one_piece():
    assert form([3, 10], [10, 1], [10, 1], 4) == (1, 1, 120, 120, 120)


def test_neighbouring_dimensions_that_are_one_in_both_memories_are_one():
    # Columns of all experts' matrices; slices of the middle dimension; a transposed target.
    assert form([5, 3, 2], [30, 10, 1], [6, 2, 1], 4) == (1, 15, 8, 40, 8)
    assert form([5, 2, 10], [30, 10, 1], [20, 10, 1], 4) == (1, 5, 80, 120, 80)
    assert form([5, 3, 2], [30, 10, 1], [60, 2, 1], 4) == (5, 3, 8, 40, 8)
    assert form([3, 10], [10, 1], [1, 3], 4) == (3, 10, 4, 4, 12)


def test_dimensions_of_one_element_do_not_split_pieces():
    assert form([1, 3, 1, 10], [77, 10, 5, 1], [30, 10, 10, 1], 4) == (1, 1, 120, 120, 120)


def test_an_expanded_dimension_reads_the_same_bytes_again():
    assert form([3, 4], [0, 1], [4, 1], 8) == (1, 3, 32, 0, 32)


def test_a_box_without_dimensions_is_one_element():
    assert form([], [], [], 8) == (1, 1, 8, 8, 8)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=4))
def test_a_memory_that_is_said_not_to_overlap_itself_does_not(dimensions):
    lengths, strides = [n for n, _ in dimensions], [step for _, step in dimensions]
    places = np.zeros(1, np.int64)
    for length, stride in zip(lengths, strides, strict=True):
        places = (places[:, None] + np.arange(length) * stride).reshape(-1)
    if not overlaps_itself(lengths, strides):
        assert len(set(places.tolist())) == len(places)


def test_what_torch_makes_of_dense_memory_does_not_overlap():
    for shape, strides in (((), ()), ((4, 5), (5, 1)), ((5, 4), (1, 5)), ((4, 5), (20, 2)), ((1, 5), (0, 1))):
        assert not overlaps_itself(shape, strides)
    assert overlaps_itself((3, 4), (0, 1))
    assert overlaps_itself((3, 4), (3, 1))


@given(LENGTHS, st.integers(0, 30))
def test_a_cut_box_is_all_of_it_in_small_parts_in_its_order(lengths, most):
    whole, found = np.arange(math.prod(lengths)).reshape(lengths), []
    for offset, shape in cut_box([10] * len(lengths), lengths, most):
        part = whole[(*(slice(o - 10, o - 10 + n) for o, n in zip(offset, shape, strict=True)), ...)]
        assert part.shape == tuple(shape) and 0 < part.size <= max(most, 1)
        found += part.reshape(-1).tolist()
    assert found == list(range(whole.size))


def test_a_box_is_cut_along_leading_dimensions_as_little_as_can_be():
    assert list(cut_box((0, 0), (5, 10), 20)) == [((0, 0), (2, 10)), ((2, 0), (2, 10)), ((4, 0), (1, 10))]
    assert list(cut_box((0, 0), (2, 10), 6)) == [
        ((0, 0), (1, 6)), ((0, 6), (1, 4)), ((1, 0), (1, 6)), ((1, 6), (1, 4)),
    ]  # fmt: skip
    assert list(cut_box((4, 1), (5, 10), 50)) == [((4, 1), (5, 10))]
    assert list(cut_box((), (), 1)) == [((), ())]


@st.composite
def strided(draw):
    """Draws a view into some memory with any strides, also zero, or less than what they step over."""
    lengths = draw(LENGTHS)
    dense = contiguous_strides(lengths)
    strides = [draw(st.one_of(st.integers(0, 30), st.sampled_from([s, 2 * s]))) for s in dense]
    last = sum(max(n - 1, 0) * step for n, step in zip(lengths, strides, strict=True))
    memory = np.arange(last + 1, dtype=np.uint32)
    return np.lib.stride_tricks.as_strided(memory, lengths, [4 * step for step in strides])


@given(strided())
def test_rows_of_strided_spans_are_the_view_in_row_major_order(view):
    spans = paired_spans(view.shape, element_strides(view), contiguous_strides(view.shape), 4)
    memory, stored = flat_bytes(view) if view.size else np.zeros(0, np.uint8), [np.zeros(0, np.uint8)]
    for start in spans.a_starts:
        for row in range(spans.rows):
            at = int(start) + row * spans.a_step
            stored.append(memory[at : at + spans.row_bytes])
    assert np.concatenate(stored).tobytes() == view.tobytes()
    each = spans.rows * spans.row_bytes
    assert spans.b_starts.tolist() == [n * each for n in range(len(spans.a_starts))], "one after another"


@given(st.lists(st.integers(1, 6), max_size=5))
def test_contiguous_strides_are_numpys(shape):
    assert list(contiguous_strides(shape)) == element_strides(np.empty(shape, np.uint32))


BOXES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=2)


def elements(box: list[tuple[int, int]]) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, start + size) for start, size in box)))


def parts(box: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [start for start, _ in box], [size for _, size in box]


@given(BOXES, BOXES)
def test_an_intersection_holds_the_common_elements(one, other):
    common = intersect(*parts(one), *parts(other))
    wanted = elements(one) & elements(other)
    assert (elements(list(zip(*common, strict=True))) if common else set()) == wanted


def test_boxes_without_dimensions_are_one_common_element():
    assert intersect((), (), (), ()) == ((), ())


@given(st.lists(BOXES, max_size=6))
def test_an_overlap_is_found_wherever_there_is_one(boxes):
    offsets = np.array([parts(box)[0] for box in boxes], np.int64).reshape(-1, 2)
    shapes = np.array([parts(box)[1] for box in boxes], np.int64).reshape(-1, 2)
    found = first_overlap(offsets, shapes)
    shared = [elements(a) & elements(b) for a, b in itertools.combinations(boxes, 2)]
    if any(shared):
        assert any(found in both for both in shared)
    else:
        assert found is None


@pytest.mark.parametrize(("count", "overlap"), [(0, None), (1, None), (2, ())])
def test_two_scalars_overlap(count, overlap):
    empty = np.zeros((count, 0), np.int64)
    assert first_overlap(empty, empty) == overlap


def test_a_fine_grid_is_checked_in_time():
    side = 100
    offsets = np.array(list(itertools.product(range(side), repeat=2)), np.int64) * 3
    shapes = np.full_like(offsets, 3)
    assert first_overlap(offsets, shapes) is None
    shapes[5050] = 4
    assert first_overlap(offsets, shapes) is not None


def test_boxes_without_elements_cost_nothing():
    """An index of a few kilobytes may have a million of them."""
    offsets, shapes = np.zeros((1_000_000, 2), np.int64), np.zeros((1_000_000, 2), np.int64)
    shapes[:2] = [[8, 1], [8, 1]]
    offsets[1] = [0, 1]
    assert first_overlap(offsets, shapes) is None
    offsets[1] = [7, 0]
    assert first_overlap(offsets, shapes) == (7, 0)


@given(st.data())
def test_boxes_hold_all_of_others_as_counted_one_by_one(data):
    whole = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    cells = np.zeros(whole, np.int64)
    kept = [
        box
        for box in cut_box((0,) * len(whole), whole, data.draw(st.integers(1, 6)))
        if data.draw(st.integers(0, 4))
    ]
    for offset, shape in kept:
        cells[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] += 1
    wanted = [
        [(data.draw(st.integers(0, n)), data.draw(st.integers(0, 6))) for n in whole]
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    expected = all(cells[tuple(slice(o, o + n) for o, n in box)].all() for box in wanted)
    boxes = [np.array([part[i] for part in kept], np.int64).reshape(-1, len(whole)) for i in (0, 1)]
    asked = [np.array([[pair[i] for pair in box] for box in wanted], np.int64) for i in (0, 1)]
    assert hold_all(*boxes, *asked, whole) == expected
