"""Slices of tensors stored in any pieces, against numpy's slicing."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_datastates.format.index import build_index
from megatron_datastates.format.values import Extent, Fragment
from megatron_datastates.plan.boxes import contiguous_strides
from megatron_datastates.plan.reads import gather_spans, plan_box, plan_extent, plan_slice
from tests.unit.grids import partitions, slices

FILES = 3


@st.composite
def stored_tensors(draw):
    """Draws a tensor of 2-byte elements, its boxes, and the bytes of the files that they lie in."""
    shape = tuple(draw(st.lists(st.one_of(st.integers(2, 6), st.integers(0, 6)), max_size=4)))
    boxes = draw(partitions(shape))
    return stored(shape, [(draw(st.integers(0, FILES - 1)), draw(st.integers(0, 3)), *box) for box in boxes])


def stored(shape: tuple[int, ...], boxes):
    """Boxes are (file, elements to leave out before it, offset, shape)."""
    whole = np.arange(1, math.prod(shape) + 1, dtype=np.uint16).reshape(shape)
    files = [bytearray() for _ in range(FILES)]
    places = []
    for number, gap, offset, size in boxes:
        files[number] += bytes(2 * gap)
        data = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].tobytes()
        item = Fragment("w", "int16", shape, offset, size)
        places.append((item, Extent(number, len(files[number]), len(data))))
        files[number] += data
    return whole, places, [bytes(file) for file in files]


def execute(reads, files, size: int) -> np.ndarray:
    target = np.zeros(size, np.uint8)
    for read in reads:
        for here, there in zip(read.offsets.tolist(), read.targets.tolist(), strict=True):
            for number in range(read.rows):
                a, b = here + number * read.file_step, there + number * read.target_step
                piece = files[read.file][a : a + read.row_bytes]
                target[b : b + read.row_bytes] = np.frombuffer(piece, np.uint8)
    return target.view(np.uint16)


@given(st.data())
def test_a_slice_is_numpys_slice(data):
    whole, places, files = data.draw(stored_tensors())
    offset, shape = data.draw(slices(whole.shape))
    entry = build_index(places, {}).tensor("w")
    reads, covered, _ = plan_slice(entry, offset, shape)
    wanted = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    assert covered == wanted.size
    assert (execute(reads, files, wanted.nbytes) == wanted.reshape(-1)).all()


def test_every_slice_of_an_irregular_tensor_is_numpys_slice():
    boxes = [
        (0, 0, (0, 0), (1, 5)), (1, 1, (1, 0), (3, 2)), (0, 2, (1, 2), (1, 3)), (2, 0, (2, 2), (2, 1)),
        (1, 0, (2, 3), (2, 2)),
    ]  # fmt: skip
    whole, places, files = stored((4, 5), boxes)
    entry = build_index(places, {}).tensor("w")
    for a, b in itertools.combinations_with_replacement(range(5), 2):
        for c, d in itertools.combinations_with_replacement(range(6), 2):
            reads, covered, _ = plan_slice(entry, (a, c), (b - a, d - c))
            wanted = whole[a:b, c:d]
            assert covered == wanted.size
            assert (execute(reads, files, wanted.nbytes) == wanted.reshape(-1)).all()


@given(st.data())
def test_what_is_not_stored_is_not_covered(data):
    whole, places, _ = data.draw(stored_tensors())
    assume(len(places) > 1)
    missing = places.pop(data.draw(st.integers(0, len(places) - 1)))[0]
    _, covered, _ = plan_slice(build_index(places, {}).tensor("w"), (0,) * whole.ndim, whole.shape)
    assert covered == whole.size - math.prod(missing.shape)


@given(st.data())
def test_a_box_of_one_fragment_goes_into_a_strided_target(data):
    whole, places, files = data.draw(stored_tensors())
    number = data.draw(st.integers(0, len(places) - 1))
    item = places[number][0]
    start, lengths = data.draw(slices(item.shape))
    target = np.zeros([n + 1 for n in lengths], np.uint16)
    read = plan_box(
        build_index(places, {}).tensor("w"), number, start, lengths, contiguous_strides(target.shape)
    )
    got = execute([read], files, target.nbytes).reshape(target.shape)
    wanted = np.zeros_like(target)
    source = tuple(slice(f + s, f + s + n) for f, s, n in zip(item.offset, start, lengths, strict=True))
    wanted[tuple(slice(0, n) for n in lengths)] = whole[source]
    assert (got == wanted).all()


def test_offsets_near_the_limit_do_not_overflow():
    item = Fragment("w", "uint8", (2**40,), (2**39,), (2**39,))
    entry = build_index([(item, Extent(0, 2**61, 2**39))], {}).tensor("w")
    reads, covered, _ = plan_slice(entry, (2**40 - 4,), (4,))
    assert (int(reads[0].offsets[0]), reads[0].row_bytes, covered) == (2**61 + 2**39 - 4, 4, 4)


def test_fragments_outside_the_slice_are_not_read():
    places = [(Fragment("w", "uint8", (8,), (at,), (2,)), Extent(at // 2, 4096, 2)) for at in (0, 2, 4, 6)]
    reads, _, _ = plan_slice(build_index(places, {}).tensor("w"), (3,), (3,))
    assert [read.file for read in reads] == [1, 2]


def test_spans_of_all_boxes_are_gathered_in_their_order():
    item = Fragment("w", "int16", (4, 5, 6), (0, 0, 0), (4, 5, 6))
    entry = build_index([(item, Extent(7, 4096, 240))], {}).tensor("w")
    box = plan_box(entry, 0, (1, 2, 3), (2, 3, 2), (100, 10, 1))  # a span for each of 2, of 3 rows
    spans = gather_spans([plan_extent(Extent(3, 8192, 50)), box], [1000, 2000], [False, True])
    first = 4096 + 2 * (30 + 12 + 3)
    assert spans.files.tolist() == [3, 7, 7]
    assert spans.offsets.tolist() == [8192, first, first + 60]
    assert spans.targets.tolist() == [1000, 2000, 2200]
    forms = zip(spans.rows, spans.row_bytes, spans.file_steps, spans.target_steps, strict=True)
    assert [tuple(map(int, form)) for form in forms] == [(1, 50, 50, 50), *[(3, 4, 12, 20)] * 2]
    assert spans.on_device.tolist() == [False, True, True]
    assert spans.ends().tolist() == [8242, first + 28, first + 88]


def test_no_boxes_have_no_runs():
    assert len(gather_spans([], [], []).files) == 0
