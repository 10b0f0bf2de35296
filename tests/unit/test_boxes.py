"""Boxes against numpy: runs in strided memories, intersections, overlaps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.plan.boxes import (
    box_runs,
    contiguous_strides,
    first_overlap,
    intersect,
    strided_runs,
)

LENGTHS = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def views(draw, lengths):
    """A view of these lengths into some larger memory: sliced, with its axes in any order in memory."""
    order = draw(st.permutations(range(len(lengths))))
    margins = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in lengths]
    whole = [before + n + after for n, (before, after) in zip(lengths, margins, strict=True)]
    view = np.zeros([whole[axis] for axis in order], np.uint32).transpose(np.argsort(order).tolist())
    return view[(*(slice(b, b + n) for n, (b, _) in zip(lengths, margins, strict=True)), ...)]


def element_strides(view: np.ndarray) -> list[int]:
    return [step // view.itemsize for step in view.strides]


def flat_bytes(view: np.ndarray) -> np.ndarray:
    """The view's memory as bytes, from its first element on."""
    last = sum((n - 1) * step for n, step in zip(view.shape, element_strides(view), strict=True))
    return np.lib.stride_tricks.as_strided(view, (last + 1,), (view.itemsize,)).view(np.uint8)


@st.composite
def pairs_of_views(draw):
    lengths = draw(LENGTHS)
    return draw(views(lengths)), draw(views(lengths))


@given(pairs_of_views())
def test_copying_run_by_run_is_copying_the_box(pair):
    source, target = pair
    source[...] = np.arange(1, source.size + 1, dtype=np.uint32).reshape(source.shape)
    runs = box_runs(source.shape, element_strides(source), element_strides(target), 4)
    if source.size:
        memory, goal = flat_bytes(source), flat_bytes(target)
        for here, there in zip(runs[0].tolist(), runs[1].tolist(), strict=True):
            goal[there : there + runs[2]] = memory[here : here + runs[2]]
    assert len(runs[0]) * runs[2] == source.size * 4
    assert (target == source).all()


@given(LENGTHS)
def test_a_contiguous_box_is_one_run(lengths):
    strides = contiguous_strides(lengths)
    starts, targets, size = box_runs(lengths, strides, strides, 2)
    count = 0 if 0 in lengths else 1
    assert (starts.tolist(), targets.tolist()) == ([0] * count, [0] * count)
    assert size == 2 * int(np.prod(lengths))


def test_a_slice_of_columns_is_one_run_a_row():
    starts, targets, size = box_runs([3, 2], [10, 1], [2, 1], 4)
    assert (starts.tolist(), targets.tolist(), size) == ([0, 40, 80], [0, 8, 16], 8)


def test_a_slice_of_rows_is_one_run():
    assert [len(part) for part in box_runs([3, 10], [10, 1], [10, 1], 4)[:2]] == [1, 1]


def test_dimensions_of_one_element_do_not_split_runs():
    assert len(box_runs([1, 3, 1, 10], [77, 10, 5, 1], [30, 10, 10, 1], 4)[0]) == 1


def test_an_expanded_dimension_reads_the_same_bytes_again():
    starts, targets, size = box_runs([3, 4], [0, 1], [4, 1], 8)
    assert (starts.tolist(), targets.tolist(), size) == ([0, 0, 0], [0, 32, 64], 32)


def test_a_box_without_dimensions_is_one_element():
    starts, targets, size = box_runs([], [], [], 8)
    assert (starts.tolist(), targets.tolist(), size) == ([0], [0], 8)


@st.composite
def strided(draw):
    """A view into some memory whose strides may be anything, also zero, or less than what they step over."""
    lengths = draw(LENGTHS)
    dense = contiguous_strides(lengths)
    strides = [draw(st.one_of(st.integers(0, 30), st.sampled_from([s, 2 * s]))) for s in dense]
    last = sum(max(n - 1, 0) * step for n, step in zip(lengths, strides, strict=True))
    memory = np.arange(last + 1, dtype=np.uint32)
    return np.lib.stride_tricks.as_strided(memory, lengths, [4 * step for step in strides])


@given(strided(), st.integers(0, 99))
def test_pieces_of_strided_runs_are_the_view_in_row_major_order(view, base):
    runs = strided_runs(view.shape, element_strides(view), 4, base)
    memory, stored = flat_bytes(view) if view.size else np.zeros(0, np.uint8), [np.zeros(0, np.uint8)]
    for start in runs.starts:
        for piece in range(runs.pieces):
            at = start - base + piece * runs.step_bytes
            stored.append(memory[at : at + runs.piece_bytes])
    assert np.concatenate(stored).tobytes() == view.tobytes()


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
