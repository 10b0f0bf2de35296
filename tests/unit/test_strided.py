"""Strided boxes of a line: which of a tensor a range holds, and the reads of one across fragments."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest

from megatron_datastates.errors import FormatError
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.plan.boxes import contiguous_strides
from megatron_datastates.plan.frames import FramedBox
from megatron_datastates.plan.strided import boxes_in_range, line_of, plan_strided

Tensor = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def place(index: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=True))


def random_tensor(rng: random.Random) -> Tensor:
    """Returns a tensor whose rows do not interleave, its dimensions in any order, with gaps."""
    shape = [rng.choice([1, 1, 2, 3, 5]) for _ in range(rng.randint(0, 4))]
    strides, reach = [], 1
    for size in shape:
        strides.append(reach + rng.choice([0, 0, 0, 2]))
        reach = (size - 1) * strides[-1] + reach
    order = rng.sample(range(len(shape)), len(shape))
    return tuple(shape[d] for d in order), tuple(strides[d] for d in order)


# -- boxes in a range ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(300))
def test_boxes_hold_each_element_of_the_range_once_and_no_other(seed: int) -> None:
    rng = random.Random(seed)
    shape, strides = random_tensor(rng)
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    begin = rng.randint(-2, reach)
    end = rng.randint(begin, reach + 2)
    found = [
        tuple(o + i for o, i in zip(offset, within, strict=True))
        for offset, lengths in boxes_in_range(shape, strides, begin, end)
        for within in itertools.product(*map(range, lengths))
    ]
    expected = [
        index for index in itertools.product(*map(range, shape)) if begin <= place(index, strides) < end
    ]
    assert sorted(found) == expected


def test_a_matrix_is_cut_into_three_boxes_at_most() -> None:
    assert list(boxes_in_range((4, 5), (5, 1), 3, 17)) == [
        ((0, 3), (1, 2)),
        ((1, 0), (2, 5)),
        ((3, 0), (1, 2)),
    ]
    assert list(boxes_in_range((4, 5), (5, 1), 0, 20)) == [((0, 0), (4, 5))]
    assert list(boxes_in_range((4, 5), (5, 1), 6, 9)) == [((1, 1), (1, 3))]
    assert list(boxes_in_range((4, 5), (5, 1), 20, 30)) == []
    assert list(boxes_in_range((0, 5), (5, 1), 0, 30)) == []


# -- reads --------------------------------------------------------------------------------------------------


def line_and_file(
    sizes: list[int], rng: random.Random, *, hole: int | None = None
) -> tuple[TensorEntry, bytearray]:
    """Returns fragments of these sizes in a file, in any order, and the file; element i of the line is i."""
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    order = [i for i in rng.sample(range(len(sizes)), len(sizes)) if i != hole]
    file, places = bytearray(), []
    for i in order:
        file += b"\xff" * rng.choice([0, 64])
        places.append(len(file))
        file += np.arange(offsets[i], offsets[i] + sizes[i], dtype=np.float32).tobytes()
    entry = TensorEntry(
        "float32",
        (sum(sizes),),
        np.array([[offsets[i]] for i in order], np.int64).reshape(-1, 1),
        np.array([[sizes[i]] for i in order], np.int64).reshape(-1, 1),
        np.zeros(len(order), np.uint32),
        np.array(places, np.uint64),
        np.array([4 * sizes[i] for i in order], np.uint64),
    )
    return line_of(entry, "bucket"), file


def execute(reads: list, file: bytearray, elements: int) -> np.ndarray:
    """Does what the native reader does, and checks that no element is read twice."""
    target = bytearray(np.full(elements, np.nan, np.float32).tobytes())
    touched = np.zeros(len(target), np.uint8)
    for read in reads:
        for at, to in zip(read.offsets.tolist(), read.targets.tolist(), strict=True):
            for row in range(read.rows):
                source, dest = at + row * read.file_step, to + row * read.target_step
                assert source + read.row_bytes <= len(file)
                target[dest : dest + read.row_bytes] = file[source : source + read.row_bytes]
                touched[dest : dest + read.row_bytes] += 1
    assert touched.max(initial=0) <= 1
    return np.frombuffer(bytes(target), np.float32)


@pytest.mark.parametrize("seed", range(300))
def test_reads_bring_each_element_from_whichever_fragment_holds_it(seed: int) -> None:
    rng = random.Random(seed)
    shape, strides = random_tensor(rng)
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    begin, after = rng.randint(0, 4), rng.randint(0, 4)
    total, sizes = begin + reach + after, []
    while sum(sizes) < total:
        sizes.append(min(rng.choice([0, 1, 2, 3, 7, 20]), total - sum(sizes)))
    line, file = line_and_file(sizes, rng)
    target_strides = contiguous_strides(shape)
    reads = plan_strided(line, "bucket", begin, shape, strides, target_strides)
    found = execute(reads, file, math.prod(shape)).reshape(shape)
    for index in itertools.product(*map(range, shape)):
        assert found[index] == begin + place(index, strides)


@pytest.mark.parametrize("seed", range(100))
def test_encoded_fragments_deliver_the_same(seed: int) -> None:
    rng = random.Random(seed)
    shape, strides = random_tensor(rng)
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    sizes = [rng.randint(1, 5) for _ in range(reach + 1)]
    line, _ = line_and_file(sizes, rng)
    line = dataclasses.replace(line, encoded=True, file_offsets=np.arange(len(line.files), dtype=np.uint64))
    target_strides = contiguous_strides(shape)
    found = np.full(math.prod(shape), np.nan, np.float32)
    for box in plan_strided(line, "bucket", 1, shape, strides, target_strides):
        assert isinstance(box, FramedBox) and box.item_bytes == 4
        begin, size = int(line.offsets[box.entry, 0]), int(line.shapes[box.entry, 0])
        assert box.logical_bytes == 4 * size
        assert list(box.strides) == sorted(box.strides, reverse=True), "frames are cut by rows"
        for index in itertools.product(*map(range, box.lengths)):
            at = box.first + place(index, box.strides)
            assert 0 <= at < size
            found[box.target // 4 + place(index, box.target_strides)] = begin + at
    values = found.reshape(shape)
    for index in itertools.product(*map(range, shape)):
        assert values[index] == 1 + place(index, strides)


def test_a_whole_fragment_is_one_read_of_one_row() -> None:
    line, _ = line_and_file([12, 12], random.Random(1))
    (read,) = plan_strided(line, "bucket", 12, (3, 4), (4, 1), (4, 1))
    assert (read.rows, read.row_bytes, len(read.offsets)) == (1, 48, 1)


def test_columns_are_one_read_of_many_rows() -> None:
    line, _ = line_and_file([400], random.Random(1))
    (read,) = plan_strided(line, "bucket", 3, (20, 4), (20, 1), (4, 1))
    assert (read.rows, read.row_bytes, read.file_step, read.target_step) == (20, 16, 80, 16)


@pytest.mark.parametrize("hole", [0, 1, 2])
def test_holes_are_refused(hole: int) -> None:
    line, _ = line_and_file([4, 4, 4], random.Random(2), hole=hole)
    with pytest.raises(FormatError, match=rf"'bucket' has holes: element {4 * hole} is not stored"):
        plan_strided(line, "bucket", 0, (12,), (1,), (1,))
    with pytest.raises(FormatError, match=rf"'bucket' has holes: element {4 * hole} is not stored"):
        plan_strided(line, "bucket", 0, (3, 2), (4, 1), (2, 1))


def test_fragments_that_overlap_are_refused() -> None:
    rows = np.array([[0], [3]], np.int64), np.array([[4], [4]], np.int64)
    words = np.zeros(2, np.uint32), np.zeros(2, np.uint64), np.full(2, 16, np.uint64)
    with pytest.raises(FormatError, match="two fragments both hold the element at 3"):
        line_of(TensorEntry("float32", (7,), *rows, *words), "bucket")


def test_a_tensor_of_two_dimensions_is_no_line() -> None:
    rows = np.zeros((1, 2), np.int64), np.ones((1, 2), np.int64)
    words = np.zeros(1, np.uint32), np.zeros(1, np.uint64), np.full(1, 4, np.uint64)
    with pytest.raises(FormatError, match="'bucket' has 2 dimensions, and a bucket has one"):
        line_of(TensorEntry("float32", (1, 1), *rows, *words), "bucket")
