"""Staging memory: bounded by slots, whatever the shard's size; every slot comes back."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import (
    ALIGNMENT,
    KIB,
    MIB,
    Copy,
    Engines,
    Save,
    random_bytes,
    save_whole,
    see_in_time,
    threads_named,
)
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_a_shard_fifty_times_the_pool_streams_through(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=MIB, most_slots=2)
    source = random_bytes(MIB)  # taken a hundred times, so that only the pool can make memory grow
    save_whole(engine, tmp_path / "warm", [Copy(source, 0)])
    process = psutil.Process()
    before = process.memory_info().rss
    save = Save(engine, tmp_path / "data", [Copy(source, i * MIB) for i in range(100)])
    highest = 0
    while not save.reaches(Milestone.ENQUEUED, 0.001):
        highest = max(highest, process.memory_info().rss)
    save.finish()
    assert engine.pool()["slots"] == 2
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
    assert engine.pool()["slots"] == 0  # no memory before there is a need
    engine.grow(3)
    eventually(lambda: engine.pool()["slots"] == 3, "three slots")
    engine.grow(1)
    engine.grow(1000)
    eventually(lambda: engine.pool()["slots"] == 10, "ten slots")
    time.sleep(0.05)
    assert engine.pool()["slots"] == 10


def test_a_small_save_takes_few_slots(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=64 * KIB, most_slots=1000)
    save_whole(engine, tmp_path / "data", [Copy(random_bytes(100 * KIB), 0)])
    assert engine.pool()["slots"] <= 3


def test_waiting_for_a_slot_is_counted(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=ALIGNMENT, most_slots=2, faults="write:0:stall=50")
    first = save_whole(engine, tmp_path / "first", [Copy(random_bytes(ALIGNMENT), 0)])
    crowded = save_whole(engine, tmp_path / "crowded", [Copy(random_bytes(16 * ALIGNMENT), 0)])
    free = [save_whole(engine, tmp_path / str(n), [Copy(random_bytes(ALIGNMENT), 0)]) for n in range(3)]
    assert min(one.status["waited_for_slots"] for one in free) < crowded.status["waited_for_slots"] > 0.1
    assert first.status["waited_for_slots"] > 0  # until there was a slot at all


def test_waiting_for_memory_that_is_not_made_yet_is_counted_apart(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    source = random_bytes(8 * MIB)

    def is_counted(milliseconds: int) -> bool:
        engine = device_engines(slot_bytes=MIB, most_slots=2, faults="write:0:stall=50", tripwire=False)
        cuda.hold_call("cuMemHostRegister")
        stream, folder = cuda.new_stream(), tmp_path / str(milliseconds)
        early = Save(engine, folder / "early", [Copy(source, 0, device=True)], stream=stream)
        time.sleep(milliseconds / 1000)
        cuda.release_call("cuMemHostRegister")
        early.finish()
        late = save_whole(engine, folder / "late", [Copy(source, 0, device=True)], stream=stream)
        assert early.status["waited_for_memory"] <= early.status["waited_for_slots"]
        assert late.status["waited_for_memory"] == 0 < late.status["waited_for_slots"]
        return bool(early.status["waited_for_memory"] > 0.1)

    see_in_time(is_counted)


def test_memory_that_cannot_be_allocated_fails_the_save(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=1 << 46, most_slots=2)
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(10), 0)])
    assert "staging memory" in save.failure(Milestone.ENQUEUED)
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


def test_slots_lie_in_huge_pages(tmp_path: Path) -> None:
    """Runs in a process of its own, whose only large mappings that no fork inherits are the pool's."""
    script = """
import re
from pathlib import Path
from tests.native.harness import KIB, MIB, make_engine
from tests.support.waiting import eventually
engine = make_engine(slot_bytes=520 * KIB, most_slots=300)
engine.grow(300)
eventually(lambda: engine.pool()["slots"] == 300, "all slots")
sizes = {}
for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
    facts = dict(re.findall(r"(?m)^(\\w+): +(.*)$", mapping))
    if "dc" in facts.get("VmFlags", "").split() and int(facts["Size"].split()[0]) >= 2048:
        begin = int(mapping.split("-")[0], 16)
        print(begin % (2 * MIB), facts["Size"].split()[0], facts["AnonHugePages"].split()[0])
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    found = [[int(word) for word in line.split()] for line in ended.stdout.splitlines()]
    assert sum(size for _, size, _ in found) == 300 * 520
    assert not any(offset for offset, _, _ in found)
    if not HUGE_PAGES.is_file() or "[never]" in HUGE_PAGES.read_text():
        pytest.skip("this kernel has no transparent huge pages")
    if sum(huge for _, _, huge in found) == 0:
        pytest.skip("this machine has no huge page to spare")
    # All but the end of each segment; a fragmented machine may miss some, and a misaligned pool misses more.
    assert sum(huge for _, _, huge in found) > 0.5 * 300 * 520


# -- page-locking -----------------------------------------------------------------------------------------


def test_the_pool_is_page_locked_before_the_first_save(cuda: FakeCuda, device_engines: Engines) -> None:
    engine = device_engines(slot_bytes=MIB, most_slots=80)
    engine.grow(3)
    eventually(lambda: engine.pool()["slots"] == 3, "three slots")
    assert engine.pool()["page_locked_bytes"] == 0
    assert engine.page_lock_pool()
    eventually(lambda: engine.pool()["page_locked_bytes"] == 3 * MIB, "they are page-locked")
    engine.grow(80)
    eventually(lambda: engine.pool()["page_locked_bytes"] == 80 * MIB, "so is what comes later")
    assert cuda.registered_bytes == 80 * MIB
    assert engine.pool()["trouble"] == ""


def test_page_locking_makes_nobody_wait(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    """The driver hangs; what does not need it goes on."""
    engine = device_engines(slot_bytes=MIB, most_slots=80)
    engine.grow(2)
    eventually(lambda: engine.pool()["slots"] == 2, "two slots")
    cuda.hold_call("cuMemHostRegister")
    assert engine.page_lock_pool()
    eventually(lambda: cuda.calls("cuMemHostRegister"), "the background thread is at it")
    save_whole(engine, tmp_path / "data", [Copy(random_bytes(10 * MIB), 0)])
    assert engine.pool()["page_locked_bytes"] == 0
    cuda.release_call("cuMemHostRegister")
    eventually(lambda: engine.pool()["page_locked_bytes"] > 0, "page-locked")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core prepares one segment at a time")
def test_segments_are_page_locked_side_by_side(cuda: FakeCuda, device_engines: Engines) -> None:
    before = set(threads_named("ds-pool"))  # of engines and readers that earlier tests have left
    engine = device_engines(slot_bytes=8 * MIB, most_slots=48)
    cuda.hold_call("cuMemHostRegister")
    assert engine.page_lock_pool()
    engine.grow(48)
    threads = min(4, len(os.sched_getaffinity(0)))
    eventually(lambda: len(cuda.calls("cuMemHostRegister")) == threads, "each thread holds a segment")
    assert len(set(threads_named("ds-pool")) - before) == threads
    assert engine.pool()["slots"] == 0, "nothing is lent before it is page-locked"
    cuda.release_call("cuMemHostRegister")
    eventually(lambda: engine.pool()["page_locked_bytes"] == 48 * 8 * MIB, "page-locked")
    assert engine.pool()["slots"] == 48
    assert len(cuda.calls("cuMemHostRegister")) == 6, "each segment once"


@pytest.mark.parametrize("known_before", [True, False])
def test_a_segment_that_cannot_be_page_locked_does_not_stop_the_others(
    cuda: FakeCuda, device_engines: Engines, known_before: bool
) -> None:
    engine = device_engines(slot_bytes=8 * MIB, most_slots=32)
    cuda.fail("cuMemHostRegister", nth=2)
    if known_before:
        assert engine.page_lock_pool()
    engine.grow(32)
    eventually(lambda: engine.pool()["slots"] == 32, "all slots")
    assert known_before or engine.page_lock_pool()
    eventually(lambda: engine.pool()["page_locked_bytes"] == 24 * 8 * MIB, "all but one")
    assert "not page-locked" in str(engine.pool()["trouble"])
    assert engine.page_lock_pool()
    eventually(lambda: engine.pool()["page_locked_bytes"] == 32 * 8 * MIB, "tried again")
    assert engine.pool()["trouble"] == ""


def test_another_driver_context_may_come_while_threads_page_lock(
    cuda: FakeCuda, device_engines: Engines
) -> None:
    engine = device_engines(slot_bytes=8 * MIB, most_slots=32)
    cuda.hold_call("cuMemHostRegister")
    assert engine.page_lock_pool()
    engine.grow(16)
    eventually(lambda: cuda.calls("cuMemHostRegister"), "at it")
    cuda.use_context(cuda.new_context())
    assert engine.page_lock_pool()
    engine.grow(32)
    cuda.release_call("cuMemHostRegister")
    eventually(lambda: engine.pool()["page_locked_bytes"] == 32 * 8 * MIB, "page-locked")
    assert len(cuda.calls("cuMemHostRegister")) == 4


def test_an_engine_closes_while_its_pool_is_made(cuda: FakeCuda, device_engines: Engines) -> None:
    engine = device_engines(slot_bytes=8 * MIB, most_slots=128)
    assert engine.page_lock_pool()
    engine.grow(128)
    engine.close()
    assert cuda.registered_bytes == 0


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemHostUnregister"])
def test_an_engine_closes_in_time_while_the_driver_hangs(
    cuda: FakeCuda, device_engines: Engines, call: str
) -> None:
    """Where memory is page-locked in the background, or where it is unlocked at the end."""
    engine = device_engines(slot_bytes=MIB, most_slots=2)
    cuda.hold_call(call)
    assert engine.page_lock_pool()
    engine.grow(2)
    eventually(lambda: cuda.calls("cuMemHostRegister"), "the background thread is at it")
    if call == "cuMemHostUnregister":
        eventually(lambda: engine.pool()["page_locked_bytes"], "page-locked")
    assert not engine.close(0.1)
    cuda.release_call(call)
    eventually(lambda: cuda.registered_bytes == 0 and not threads_named("ds-free"), "it ends then")


def test_without_a_context_page_locking_is_left_to_the_first_save(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine = device_engines(slot_bytes=MIB, most_slots=2)
    engine.grow(2)
    cuda.use_context(None)
    assert not engine.page_lock_pool()
    cuda.use_context(cuda.context)
    assert cuda.calls("cuMemHostRegister") == []
    save_whole(engine, tmp_path / "data", [Copy(random_bytes(10), 0, device=True)], stream=cuda.new_stream())
    eventually(lambda: engine.pool()["page_locked_bytes"] == 2 * MIB, "page-locked")


def test_another_context_may_have_page_locked_the_pool(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """Options may be known before the program chooses its device; only saves are bound to one."""
    engine = device_engines(slot_bytes=MIB, most_slots=2)
    engine.grow(2)
    assert engine.page_lock_pool()
    eventually(lambda: engine.pool()["page_locked_bytes"] == 2 * MIB, "page-locked")
    cuda.use_context(cuda.new_context())
    copies = [Copy(random_bytes(5 * MIB), 0, device=True)]
    save_whole(engine, tmp_path / "data", copies, stream=cuda.new_stream())
    assert engine.pool()["page_locked_bytes"] == 2 * MIB


def test_without_a_driver_page_locking_is_not_tried(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=MIB, most_slots=2)
    engine.grow(2)
    assert not engine.page_lock_pool()
    save_whole(engine, tmp_path / "data", [Copy(random_bytes(10), 0)])
    assert engine.pool()["trouble"] == ""


def test_page_locking_that_failed_is_reported_and_may_be_tried_again(
    cuda: FakeCuda, device_engines: Engines
) -> None:
    engine = device_engines(slot_bytes=MIB, most_slots=2)
    engine.grow(2)
    cuda.fail("cuMemHostRegister")
    assert engine.page_lock_pool()
    eventually(lambda: engine.pool()["trouble"], "it failed")
    reported = str(engine.pool()["trouble"])
    assert "not page-locked" in reported and "cuMemHostRegister" in reported
    assert engine.page_lock_pool()
    eventually(lambda: engine.pool()["page_locked_bytes"] == 2 * MIB, "page-locked")
    assert engine.pool()["trouble"] == ""


def test_slots_that_could_not_be_made_are_reported(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=1 << 46, most_slots=2)
    engine.grow(2)
    eventually(lambda: engine.pool()["trouble"], "it failed")
    assert "bytes of staging memory: Cannot allocate memory" in str(engine.pool()["trouble"])
    assert engine.pool()["slots"] == 0


def test_staging_memory_without_a_thread_to_make_it_is_reported() -> None:
    """A limit on address space, in a process of its own, leaves no room for a stack."""
    script = """
import resource
from pathlib import Path
from tests.native.harness import make_engine
engine = make_engine()
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), -1))
try:
    engine.grow(1)
except OSError as error:
    print(error.errno, error.strerror)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
engine.grow(1)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"{errno.EAGAIN} start staging memory thread: ")
