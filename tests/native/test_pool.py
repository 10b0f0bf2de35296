"""Staging memory: bounded by slots, whatever the shard's size; every slot comes back."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.harness import (
    ALIGNMENT,
    KIB,
    MIB,
    Copy,
    Save,
    eventually,
    random_bytes,
    save_whole,
)

Engines = Callable[..., native.Engine]


def test_a_shard_fifty_times_the_pool_streams_through(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=MIB, most_slots=2)
    source = random_bytes(MIB)  # taken a hundred times, so that only the pool can make memory grow
    save_whole(engine, tmp_path / "warm", [Copy(source, 0)])
    process = psutil.Process()
    before = process.memory_info().rss
    save = Save(engine, tmp_path / "data", [Copy(source, i * MIB) for i in range(100)])
    highest = 0
    while not save.reaches(Milestone.STAGED, 0.001):
        highest = max(highest, process.memory_info().rss)
    save.finish()
    assert engine.slots() == 2
    assert highest - before < 8 * MIB
    save.assert_stored()


def test_one_slot_is_enough(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=ALIGNMENT, most_slots=1, copy_threads=4, write_threads=4)
    first = Save(engine, tmp_path / "a", [Copy(random_bytes(20 * ALIGNMENT), 0)])
    second = Save(engine, tmp_path / "b", [Copy(random_bytes(20 * ALIGNMENT, 1), 0)])
    for save in (second, first):
        save.finish()
        save.assert_stored()


def test_the_pool_grows_to_what_is_asked_and_no_further(engines: Engines) -> None:
    engine = engines(slot_bytes=64 * KIB, most_slots=10)
    assert engine.slots() == 0  # no memory before there is a need
    engine.grow(3)
    eventually(lambda: engine.slots() == 3, "three slots")
    engine.grow(1)
    engine.grow(1000)
    eventually(lambda: engine.slots() == 10, "ten slots")
    time.sleep(0.05)
    assert engine.slots() == 10


def test_a_small_save_takes_few_slots(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=64 * KIB, most_slots=1000)
    save_whole(engine, tmp_path / "data", [Copy(random_bytes(100 * KIB), 0)])
    assert engine.slots() <= 3


def test_waiting_for_a_slot_is_counted(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=ALIGNMENT, most_slots=2, faults="write:0:stall=50")
    first = save_whole(engine, tmp_path / "first", [Copy(random_bytes(ALIGNMENT), 0)])
    crowded = save_whole(engine, tmp_path / "crowded", [Copy(random_bytes(16 * ALIGNMENT), 0)])
    free = save_whole(engine, tmp_path / "free", [Copy(random_bytes(ALIGNMENT), 0)])
    assert free.status["waited_for_slots"] < 0.1 < crowded.status["waited_for_slots"]
    assert first.status["waited_for_slots"] > 0  # until there was a slot at all


def test_memory_that_cannot_be_had_fails_the_save(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=1 << 46, most_slots=2)
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(10), 0)])
    assert "staging memory" in save.failure(Milestone.STAGED)
    save.job.remove()
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "options",
    [{"slot_bytes": 0}, {"slot_bytes": 1000}, {"most_slots": 0}, {"copy_threads": 0}, {"write_threads": 0}],
)
def test_options_that_make_no_sense_are_refused(engines: Engines, options: dict[str, int]) -> None:
    with pytest.raises(OSError, match="start engine"):
        engines(**options)


def test_slots_of_two_saves_come_back_while_the_disk_stalls(engines: Engines, tmp_path: Path) -> None:
    """Two saves share two slots and a disk that takes 50 ms a write; neither waits for the other's end."""
    engine = engines(slot_bytes=ALIGNMENT, most_slots=2, faults="write:0:stall=50")
    saves = [
        Save(engine, tmp_path / name, [Copy(random_bytes(8 * ALIGNMENT, i), 0)])
        for i, name in enumerate("ab")
    ]
    for save in saves:
        save.append([Copy(np.frombuffer(b"object" * 100, np.uint8), save.end)])
    for save in saves:
        save.finish()
        save.assert_stored()
