"""Whether boxes tile a tensor: the proof by corners against counting every element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.format.values import Fragment
from megatron_datastates.plan import boxes as boxes_module
from megatron_datastates.plan import coverage
from megatron_datastates.plan.boxes import boxes_that_meet
from megatron_datastates.plan.coverage import coverage_faults, tiles
from tests.unit.by_hand import index_of

Box = tuple[tuple[int, ...], tuple[int, ...]]


def counted(whole: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """Returns how often each element is held."""
    count = np.zeros(whole, np.int64)
    for offset, shape in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] += 1
    return count


def columns(whole: tuple[int, ...], boxes: list[Box]) -> tuple[np.ndarray, np.ndarray]:
    offsets, shapes = ([box[part] for box in boxes] for part in (0, 1))
    return (
        np.array(offsets, np.int64).reshape(len(boxes), len(whole)),
        np.array(shapes, np.int64).reshape(len(boxes), len(whole)),
    )


@st.composite
def any_boxes(draw) -> tuple[tuple[int, ...], list[Box]]:
    whole = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 5))):
        offset = tuple(draw(st.integers(0, size)) for size in whole)
        boxes.append((offset, tuple(draw(st.integers(0, s - o)) for o, s in zip(offset, whole, strict=True))))
    return whole, boxes


@st.composite
def cut_boxes(draw) -> tuple[tuple[int, ...], list[Box]]:
    """Draws a tensor cut again and again; then perhaps a piece is lost, doubled, shifted or grown."""
    whole = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    boxes: list[Box] = [((0,) * len(whole), whole)]
    for _ in range(draw(st.integers(0, 6)) if whole else 0):
        offset, shape = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(whole) - 1))
        first = draw(st.integers(0, shape[axis]))
        for start, size in ((0, first), (first, shape[axis] - first)):
            part = (*offset[:axis], offset[axis] + start, *offset[axis + 1 :])
            boxes.append((part, (*shape[:axis], size, *shape[axis + 1 :])))
    change = draw(st.sampled_from(["none", "lose", "double", "replace"]))
    number = draw(st.integers(0, len(boxes) - 1))
    if change == "lose":
        boxes.pop(number)
    if change == "double":
        boxes.append(boxes[number])
    if change == "replace":
        offset = tuple(draw(st.integers(0, size)) for size in whole)
        shape = tuple(draw(st.integers(0, s - o)) for o, s in zip(offset, whole, strict=True))
        boxes[number] = offset, shape
    return whole, draw(st.permutations(boxes))


@given(st.one_of(any_boxes(), cut_boxes()))
def test_the_verdict_is_that_of_counting_every_element(drawn):
    whole, boxes = drawn
    count = counted(whole, boxes)
    assert tiles(whole, *columns(whole, boxes)) == bool((count == 1).all())


@given(st.one_of(any_boxes(), cut_boxes()))
def test_the_reported_faults_are_real(drawn):
    whole, boxes = drawn
    count = counted(whole, boxes)
    places = [(Fragment("w", "uint8", whole, *box), 0, 4096) for box in boxes]
    faults = coverage_faults("w", index_of(places).tensor("w")) if boxes else []
    assert (faults == []) == bool((count == 1).all() or not boxes)
    held = sum(int(np.prod(shape)) for _, shape in boxes)
    assert any("has holes" in fault for fault in faults) == (bool(boxes) and held < count.size)
    reported = [fault.split("at ")[1] for fault in faults if "two fragments" in fault]
    assert len(reported) == bool((count > 1).any())
    for place in reported:
        assert count[tuple(int(n) for n in place.strip("(),").split(", ") if n)] > 1


def grid(*cuts: list[int]) -> tuple[tuple[int, ...], list[Box]]:
    sides = [list(itertools.pairwise(axis)) for axis in cuts]
    boxes = [
        (tuple(start for start, _ in cell), tuple(end - start for start, end in cell))
        for cell in itertools.product(*sides)
    ]
    return tuple(axis[-1] for axis in cuts), boxes


@pytest.mark.parametrize(
    "cuts",
    [
        ([0, 3, 4, 90, 4096],),
        ([0, 1, 2, 3], [0, 2048, 4096], [0, 8192]),
        ([0, 5, 6], [0, 1], [0, 7, 14], [0, 2**20, 2**21], [0, 1, 2]),
    ],
)
def test_a_grid_is_proven_and_never_looked_at_box_by_box(cuts, monkeypatch):
    monkeypatch.setattr(coverage, "first_overlap", None)
    whole, boxes = grid(*cuts)
    entry = index_of([(Fragment("w", "uint8", whole, *box), 0, 4096) for box in boxes]).tensor("w")
    assert coverage_faults("w", entry) == []


def test_corners_at_the_ends_of_different_axes_are_not_taken_for_each_other():
    """An element is in no box, and its neighbour in two."""
    assert not tiles((3, 2), *columns((3, 2), [((1, 0), (2, 2)), ((0, 0), (2, 1))]))


@pytest.mark.parametrize("limit", ["_MOST_CORNERS", "_MOST_PLACES"])
def test_what_is_too_large_for_the_proof_is_looked_at_box_by_box(limit, monkeypatch):
    monkeypatch.setattr(coverage, limit, 3)
    whole, boxes = grid([0, 2, 4], [0, 3, 6])
    entries = [
        index_of([(Fragment("w", "uint8", whole, *box), 0, 4096) for box in part]).tensor("w")
        for part in (boxes, boxes[1:], [*boxes[1:], boxes[1]])
    ]
    assert not tiles(whole, *columns(whole, boxes))
    assert [len(coverage_faults("w", entry)) for entry in entries] == [0, 1, 1]


def test_many_dimensions_of_hostile_sizes_are_no_proof_and_no_allocation():
    whole = (2,) * 60
    assert not tiles(whole, *columns(whole, [((0,) * 60, (1,) * 60)]))


@given(any_boxes(), st.data())
def test_boxes_that_meet_are_those_with_common_elements(drawn, data):
    whole, boxes = drawn
    wanted = data.draw(
        st.lists(st.sampled_from([*boxes, ((0,) * len(whole), whole)]), min_size=1, max_size=3)
    )
    found = boxes_that_meet(*columns(whole, boxes), *columns(whole, wanted)).tolist()
    both = counted(whole, wanted) > 0
    assert found == [n for n, box in enumerate(boxes) if (both & (counted(whole, [box]) > 0)).any()]


def test_boxes_between_the_wanted_ones_are_left_out_unless_there_are_very_many(monkeypatch):
    whole, boxes = grid([0, 1, 2, 3], [0, 4, 8, 12])
    wanted = [((0, 0), (1, 5)), ((2, 9), (1, 1))]
    found = boxes_that_meet(*columns(whole, boxes), *columns(whole, wanted))
    assert found.tolist() == [0, 1, 8]
    monkeypatch.setattr(boxes_module, "_MOST_PAIRS", 1)
    near = boxes_that_meet(*columns(whole, boxes), *columns(whole, wanted))
    assert near.tolist() == list(range(9))
