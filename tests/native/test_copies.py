"""Spans of memory arrive in the file where they belong, and nothing else does."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_datastates.engine._native import Milestone
from tests.native.harness import ALIGNMENT, KIB, Copy, Engines, Save, expected_bytes, random_bytes, save_whole


def strided(memory: np.ndarray, size: int, step: int, count: int, offset: int = 0) -> list[Copy]:
    """Makes `count` spans of `size` bytes, `step` apart in memory, back to back in the file."""
    return [Copy(memory[i * step : i * step + size], offset + i * size) for i in range(count)]


@pytest.mark.parametrize("slot_bytes", [ALIGNMENT, 64 * KIB])
def test_strided_spans_are_packed(engines: Engines, tmp_path: Path, slot_bytes: int) -> None:
    copies = strided(random_bytes(1 << 20), size=700, step=1000, count=1000)
    save_whole(engines(slot_bytes=slot_bytes), tmp_path / "data", copies)


def test_a_span_fills_many_slots(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=ALIGNMENT, most_slots=3)
    save_whole(engine, tmp_path / "data", [Copy(random_bytes(50 * ALIGNMENT + 77), offset=100)])


def test_gaps_are_zeroed_in_slots_used_before(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=ALIGNMENT, most_slots=2)
    save_whole(engine, tmp_path / "full", [Copy(np.full(8 * ALIGNMENT, 0xAA, np.uint8), 0)])
    sparse = [Copy(random_bytes(10, i), i * ALIGNMENT + 2000 * (i % 2)) for i in range(8)]
    save_whole(engine, tmp_path / "sparse", sparse, end=12 * ALIGNMENT)


def test_a_file_may_hold_nothing_but_zeros(engines: Engines, tmp_path: Path) -> None:
    save = Save(engines(), tmp_path / "data", [], end=3 * ALIGNMENT)
    save.finish()
    save.assert_stored()


def test_empty_spans_are_left_out(engines: Engines, tmp_path: Path) -> None:
    memory = random_bytes(64)
    copies = [Copy(memory[:0], 0), Copy(memory[:10], 0), Copy(memory[:0], 10), Copy(memory[10:], 10)]
    save_whole(engines(), tmp_path / "data", copies)


def test_a_hundred_thousand_tiny_spans_arrive(engines: Engines, tmp_path: Path) -> None:
    rng = random.Random(3)
    memory = random_bytes(1 << 20)
    starts = [rng.randrange(len(memory) - 24) for _ in range(100_000)]
    sizes = [rng.randrange(1, 24) for _ in starts]
    offsets = np.cumsum([0, *(size + rng.randrange(3) for size in sizes[:-1])]).tolist()
    copies = [
        Copy(memory[start : start + size], offset)
        for start, size, offset in zip(starts, sizes, offsets, strict=True)
    ]
    save_whole(engines(), tmp_path / "data", copies)


def test_objects_are_appended_after_the_tensors(engines: Engines, tmp_path: Path) -> None:
    save = Save(engines(slot_bytes=2 * ALIGNMENT), tmp_path / "data", [Copy(random_bytes(ALIGNMENT), 0)])
    save.append([Copy(random_bytes(30_000, 1), ALIGNMENT + 64), Copy(random_bytes(5, 2), 40_960)])
    save.finish()
    save.assert_stored()


def test_many_small_appends_are_one_file(engines: Engines, tmp_path: Path) -> None:
    save = Save(engines(), tmp_path / "data", [Copy(random_bytes(10), 0)])
    for i in range(100):
        save.append([Copy(random_bytes(100, i), save.end + i)])
    save.finish()
    save.assert_stored()


@pytest.mark.parametrize(
    ("places", "end"),
    [
        ([(0, 10), (9, 10)], ALIGNMENT),  # overlap
        ([(10, 10), (0, 5)], ALIGNMENT),  # out of order
        ([(ALIGNMENT - 1, 2)], ALIGNMENT),  # beyond the end
        ([(1 << 63, 1 << 63)], ALIGNMENT),  # whose sum wraps around
        ([(0, 1)], 100),  # an end off the alignment
    ],
)
def test_plans_that_contradict_themselves_are_refused(
    engines: Engines, tmp_path: Path, places: list[tuple[int, int]], end: int
) -> None:
    with pytest.raises(OSError, match="plan copies"):
        engines().start(
            path=str(tmp_path / "data"),
            reserve_bytes=0,
            end=end,
            sources=np.zeros(len(places), np.uint64),
            bytes=np.array([size for _, size in places], np.uint64),
            offsets=np.array([offset for offset, _ in places], np.uint64),
            row_bytes=np.array([size for _, size in places], np.uint64),
            row_steps=np.zeros(len(places), np.uint64),
            storages=np.zeros(len(places), np.uint64),
            flags=np.zeros(len(places), np.uint8),
            stream=0,
            lazy_seconds=0.0,
        )
    assert not (tmp_path / "data").exists()


def test_arrays_of_different_length_are_refused(engines: Engines, tmp_path: Path) -> None:
    words = np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="must have the same length"):
        engines().start(
            path=str(tmp_path / "data"), reserve_bytes=0, end=ALIGNMENT, sources=words, bytes=words,
            offsets=words, row_bytes=words, row_steps=words, storages=words,
            flags=np.zeros(1, np.uint8), stream=0, lazy_seconds=0.0,
        )  # fmt: skip


spans = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 3000), st.booleans(), st.booleans()), max_size=60
)


@given(spans=spans, slot_pages=st.integers(1, 4), padding=st.integers(0, 3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_plan_is_stored_as_planned(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory, spans: list, slot_pages: int, padding: int
) -> None:
    """Gap before a span, its length, whether it is eager, whether it follows its predecessor in memory."""
    memory = random_bytes(1 << 18)
    copies, offset, source = [], 0, 0
    for gap, size, eager, adjacent in spans:
        gap, source = (0, source) if adjacent else (gap, (source * 7 + 13) % (1 << 16))
        offset += gap
        copies.append(Copy(memory[source : source + size], offset, eager))
        offset, source = offset + size, source + size
    engine = engines(slot_bytes=slot_pages * ALIGNMENT)
    folder = tmp_path_factory.mktemp("plan")
    end = max(len(expected_bytes(copies)), ALIGNMENT) + padding * ALIGNMENT
    save = Save(engine, folder / "data", copies, end=end)
    save.expect(Milestone.EAGER)
    save.finish()
    save.assert_stored()
    engine.close()
