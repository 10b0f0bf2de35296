"""What each milestone promises, and how a save ends early: cancelled, failed, or its engine closed."""

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.harness import (
    ALIGNMENT,
    FOOTER,
    KIB,
    MIB,
    Copy,
    Engines,
    Save,
    expected_bytes,
    random_bytes,
    save_whole,
    see_in_time,
    threads_named,
)
from tests.support.waiting import PATIENCE_SECONDS

SLOT = 64 * KIB
NEVER = 3600.0  # seconds; longer than a test
ROOT = Path(__file__).parents[2]


def slow_engine(engines: Engines, **options: object) -> native.Engine:
    """Copies ten slots a second."""
    return engines(slot_bytes=SLOT, most_slots=16, copy_threads=1, copy_limit=10 * SLOT, **options)


def test_the_engines_threads_take_no_core_from_the_thread_that_wakes_them(
    engines: Engines, tmp_path: Path
) -> None:
    engine = engines(slot_bytes=SLOT)
    Save(engine, tmp_path / "data", [Copy(random_bytes(6 * SLOT), 0)]).finish()
    tasks = [int(task.name) for name in ("ds-stage", "ds-write") for task in threads_named(name)]
    assert {os.sched_getscheduler(task) for task in tasks} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.parametrize("seconds", [1e10, math.inf])
def test_more_seconds_than_the_clock_can_count_are_for_ever(
    engines: Engines, tmp_path: Path, seconds: float
) -> None:
    engine = engines(slot_bytes=SLOT)
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(6 * SLOT), 0)], lazy_seconds=seconds)
    assert not save.reaches(Milestone.ENQUEUED, 0.05)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(save.reaches, Milestone.DURABLE, seconds)
        engine.allow_lazy_copies(save.job, 0)
        save.finish()
        assert waits.result(PATIENCE_SECONDS)


def test_start_returns_before_lazy_bytes_are_copied(engines: Engines, tmp_path: Path) -> None:
    engine = slow_engine(engines)
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(6 * SLOT), 0)], lazy_seconds=NEVER)
    assert save.reaches(Milestone.EAGER, 0)  # there are none
    assert not save.reaches(Milestone.ENQUEUED, 0)
    assert save.status["bytes_staged"] == 0
    engine.allow_lazy_copies(save.job, 0)
    save.expect(Milestone.ENQUEUED)
    assert save.status["enqueued_at"] > 0.4
    save.finish()
    save.assert_stored()


def test_chunks_of_a_cancelled_save_take_nothing_from_the_limit(engines: Engines, tmp_path: Path) -> None:
    """The next save would wait for as long as they would have taken: here, 10 seconds."""
    engine = slow_engine(engines)
    cancelled = Save(engine, tmp_path / "cancelled", [Copy(random_bytes(100 * SLOT), 0)])
    cancelled.job.cancel("it is not wanted")
    assert cancelled.reaches(Milestone.RELEASED)
    begin = time.monotonic()
    Save(engine, tmp_path / "data", [Copy(random_bytes(SLOT), 0)]).finish()
    assert time.monotonic() - begin < 5.0


def test_eager_bytes_may_change_at_their_milestone(engines: Engines, tmp_path: Path) -> None:
    eager, lazy = random_bytes(SLOT - 100), random_bytes(4 * SLOT, 1)
    engine, copies = slow_engine(engines), [Copy(eager, 0, eager=True), Copy(lazy, SLOT)]
    save = Save(engine, tmp_path / "data", copies, lazy_seconds=NEVER)
    wanted = expected_bytes(save.copies)
    save.expect(Milestone.EAGER)
    assert not save.reaches(Milestone.ENQUEUED, 0)
    eager[:] = 0
    engine.allow_lazy_copies(save.job, 0)
    save.finish()
    assert save.path.read_bytes()[: save.end] == wanted


def test_lazy_bytes_may_change_at_the_fence(engines: Engines, tmp_path: Path) -> None:
    def is_not_stored_yet(milliseconds: int) -> bool:
        lazy, engine = random_bytes(4 * SLOT), slow_engine(engines, faults=f"write:1:stall={milliseconds}")
        save = Save(engine, tmp_path / str(milliseconds), [Copy(lazy, 0)])
        wanted = expected_bytes(save.copies)
        save.expect(Milestone.ENQUEUED)
        in_time = save.status["bytes_written"] < save.end
        lazy[:] = 0
        save.finish()
        assert save.path.read_bytes()[: save.end] == wanted
        return bool(in_time)

    see_in_time(is_not_stored_yet)


def test_a_change_before_the_fence_tears_the_save(engines: Engines, tmp_path: Path) -> None:
    """Shows that the two tests above can fail. The tripwire is off, since it would find the change."""
    lazy, engine = random_bytes(4 * SLOT), slow_engine(engines, tripwire=False)
    save = Save(engine, tmp_path / "data", [Copy(lazy, 0)], lazy_seconds=NEVER)
    wanted = expected_bytes(save.copies)
    lazy[:] = 0
    engine.allow_lazy_copies(save.job, 0)
    save.finish()
    assert save.path.read_bytes()[: save.end] != wanted


def test_objects_are_not_waited_for_by_the_fence(engines: Engines, tmp_path: Path) -> None:
    """Here their copies take 100 s."""
    engine = slow_engine(engines)
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(SLOT), 0)])
    save.append([Copy(np.zeros(1000 * SLOT, np.uint8), SLOT)])
    save.expect(Milestone.STAGED)
    assert save.status["bytes_staged"] < 1000 * SLOT
    save.job.cancel("seen")


def test_written_needs_the_input_to_be_closed(engines: Engines, tmp_path: Path) -> None:
    save = Save(engines(), tmp_path / "data", [Copy(random_bytes(10), 0)])
    save.expect(Milestone.STAGED)
    assert not save.reaches(Milestone.WRITTEN, 0.05)
    save.finish()


def test_a_wait_ends_at_its_time(engines: Engines, tmp_path: Path) -> None:
    save = Save(engines(), tmp_path / "data", [Copy(random_bytes(SLOT), 0)], lazy_seconds=NEVER)
    begin = time.monotonic()
    assert not save.reaches(Milestone.ENQUEUED, 0.1)
    assert time.monotonic() - begin > 0.09


def test_a_cancelled_save_leaves_no_file_and_no_slot(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=ALIGNMENT, most_slots=2, faults="write:0:stall=20")
    for number in range(4):
        copies = [Copy(random_bytes(5000 * ALIGNMENT), 0)]  # whose writes would take 50 s
        save = Save(engine, tmp_path / f"cancelled-{number}", copies)
        assert not save.reaches(Milestone.ENQUEUED, 0.03)
        save.job.cancel("enough")
        assert save.failure() == "cancelled: enough"
        assert save.status["cancelled"]
        save.job.remove()
    assert os.listdir(tmp_path) == []
    save_whole(engine, tmp_path / "next", [Copy(random_bytes(5 * ALIGNMENT), 0)])


def test_a_save_cancelled_before_it_began_makes_no_file(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=ALIGNMENT, most_slots=2, write_threads=1, faults="open:1:stall=150")
    first = Save(engine, tmp_path / "first", [Copy(random_bytes(ALIGNMENT), 0)])
    second = Save(engine, tmp_path / "second", [Copy(random_bytes(ALIGNMENT), 0)])
    second.job.cancel("never mind")
    second.failure()
    second.job.remove()
    first.finish()
    assert os.listdir(tmp_path) == ["first"]


def test_a_save_cancelled_while_it_syncs_is_not_durable(engines: Engines, tmp_path: Path) -> None:
    def is_not_durable(milliseconds: int) -> bool:
        engine = engines(faults=f"sync:1:stall={milliseconds}")
        save = save_written(engine, tmp_path / "data")
        engine.finish(job=save.job, footer=FOOTER, offset=save.end)
        was_durable = save.reaches(Milestone.DURABLE, 0.1)
        save.job.cancel("too late for others")
        assert save.reaches(Milestone.DURABLE) and save.reaches(Milestone.RELEASED)
        in_time = not was_durable and bool(save.error) and save.status["durable_at"] < 0
        save.job.remove()
        assert os.listdir(tmp_path) == []
        return in_time

    see_in_time(is_not_durable)


def test_a_durable_save_can_be_taken_back(engines: Engines, tmp_path: Path) -> None:
    """Another rank may have failed."""
    save = save_whole(engines(), tmp_path / "data", [Copy(random_bytes(10), 0)])
    save.job.cancel("another rank failed")
    assert save.status["error"] is None
    save.job.remove()
    assert os.listdir(tmp_path) == []


def test_failed_saves_leave_room_for_the_next(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=ALIGNMENT, most_slots=2, faults="write:3:EIO,write:6:EIO")
    copies = [Copy(random_bytes(5 * ALIGNMENT), 0)]
    for number in range(2):
        save = Save(engine, tmp_path / f"failed-{number}", copies)
        save.failure()
        save.job.remove()
    save_whole(engine, tmp_path / "next", copies)
    assert os.listdir(tmp_path) == ["next"]


def test_the_first_error_is_kept(engines: Engines, tmp_path: Path) -> None:
    save = Save(engines(faults="write:0:EIO"), tmp_path / "data", [Copy(random_bytes(MIB), 0)])
    first = save.failure()
    save.job.cancel("another thing")
    assert save.error == first


def test_a_failed_start_keeps_no_thread_busy(engines: Engines, tmp_path: Path) -> None:
    """A save that cannot be opened does not hold up one that can."""
    engine = engines(copy_threads=1, write_threads=1, faults="open:1:EIO")
    bad = Save(engine, tmp_path / "bad", [Copy(random_bytes(MIB), 0)])
    save_whole(engine, tmp_path / "good", [Copy(random_bytes(MIB), 0)])
    assert "open" in bad.failure()


def test_a_save_is_sealed_while_the_next_one_is_written(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=ALIGNMENT, most_slots=4, write_threads=1, faults="write:0:stall=20")
    first = save_written(engine, tmp_path / "first")
    copies = [Copy(random_bytes(5000 * ALIGNMENT), 0)]  # whose writes would take 100 s
    second = Save(engine, tmp_path / "second", copies)
    assert not second.reaches(Milestone.ENQUEUED, 0.05)
    first.finish()
    assert second.status["bytes_written"] < second.end
    first.assert_stored()
    second.job.cancel("seen")


def save_written(engine: native.Engine, path: Path) -> Save:
    save = Save(engine, path, [Copy(random_bytes(ALIGNMENT), 0)])
    save.job.close_input()
    save.expect(Milestone.WRITTEN)
    return save


def test_a_file_that_opens_slowly_holds_up_no_other(engines: Engines, tmp_path: Path) -> None:
    """As long as there is a slot: the pool is as large as the largest shard."""

    def is_not_open_yet(milliseconds: int) -> bool:
        engine = engines(write_threads=2, faults=f"open:1:stall={milliseconds}")
        slow = Save(
            engine, tmp_path / f"slow-{milliseconds}", [Copy(random_bytes(ALIGNMENT), 0)], reserve=MIB
        )
        time.sleep(0.02)  # or the other thread may be the first to open a file
        save_whole(engine, tmp_path / f"quick-{milliseconds}", [Copy(random_bytes(ALIGNMENT), 0)])
        in_time = slow.status["reserved_at"] < 0
        slow.finish()
        return bool(in_time)

    see_in_time(is_not_open_yet)


@pytest.mark.parametrize("call", ["open", "reserve"])
def test_staging_does_not_wait_for_the_file(engines: Engines, tmp_path: Path, call: str) -> None:
    """A trainer waits for what is eager, and its fence for the rest: not for a busy file system."""

    def has_no_file_yet(milliseconds: int) -> bool:
        engine = engines(most_slots=64, faults=f"{call}:1:stall={milliseconds}")
        whole = [Copy(random_bytes(2 * MIB), 0)]
        save = Save(engine, tmp_path / str(milliseconds), whole, reserve=2 * MIB + 128 * KIB)
        save.append([Copy(random_bytes(64 * KIB), 2 * MIB)])
        save.append([Copy(random_bytes(10), 2 * MIB + 64 * KIB)])
        for milestone in (Milestone.EAGER, Milestone.STAGED, Milestone.APPENDED):
            save.expect(milestone)
        status = save.status
        save.finish()
        save.assert_stored()
        return bool(status["reserved_at"] < 0 and status["bytes_written"] == 0)

    see_in_time(has_no_file_yet)


def test_a_save_that_ends_before_it_has_a_file_gives_its_slots_back(engines: Engines, tmp_path: Path) -> None:

    def is_not_open_yet(milliseconds: int) -> bool:
        faults, folder = f"open:1:stall={milliseconds}", tmp_path / str(milliseconds)
        engine = engines(slot_bytes=ALIGNMENT, most_slots=2, write_threads=2, faults=faults)
        slow = Save(engine, folder / "slow", [Copy(random_bytes(10 * ALIGNMENT), 0)])
        was_staged = slow.reaches(Milestone.STAGED, 0.1)  # as a rule, it has both slots
        slow.job.cancel("enough")
        save_whole(engine, folder / "next", [Copy(random_bytes(10 * ALIGNMENT), 0)])
        in_time = not was_staged and slow.status["reserved_at"] < 0
        assert slow.failure() == "cancelled: enough"
        slow.job.remove()
        assert os.listdir(folder) == ["next"]
        return in_time

    see_in_time(is_not_open_yet)


def test_a_save_without_a_byte_has_a_file_all_the_same(engines: Engines, tmp_path: Path) -> None:
    """Its footer may come before its file is open."""
    save = Save(engines(faults="open:1:stall=300"), tmp_path / "data", [])
    save.finish()
    assert save.path.read_bytes() == FOOTER


@pytest.mark.parametrize("faults", ["", "write:0:stall=50", "open:1:stall=300", "sync:1:stall=300"])
def test_closing_in_mid_save_joins_soon(engines: Engines, tmp_path: Path, faults: str) -> None:
    """All copies would take more than ten minutes."""
    engine = engines(slot_bytes=ALIGNMENT, most_slots=2, copy_limit=20 * ALIGNMENT, faults=faults)
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(15_000 * ALIGNMENT), 0)])
    time.sleep(0.05)
    assert engine.close(PATIENCE_SECONDS)
    assert "the engine was closed" in save.failure()
    save.job.remove()
    assert os.listdir(tmp_path) == []


def test_a_closed_engine_says_so(engines: Engines, tmp_path: Path) -> None:
    engine = engines()
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(10), 0)])
    engine.close()
    engine.close()
    for call in (engine.pool, lambda: save.append([]), lambda: Save(engine, tmp_path / "other", [])):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_closing_beside_a_thread_that_appends_is_safe(engines: Engines, tmp_path: Path) -> None:
    """The failure is reported, or the release came in time."""
    for number in range(30):
        engine = engines(slot_bytes=ALIGNMENT, most_slots=2)
        save = Save(engine, tmp_path / f"data-{number}", [Copy(random_bytes(ALIGNMENT), 0)])
        reported: list[BaseException] = []
        thread = threading.Thread(target=append_until_closed, args=(save, reported))
        thread.start()
        time.sleep(0.001 * (number % 5))
        engine.close()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive() and [type(error) for error in reported] == [ValueError]
        assert save.reaches(Milestone.RELEASED)


def append_until_closed(save: Save, reported: list[BaseException]) -> None:
    source = random_bytes(100)
    try:
        for _ in range(1_000_000):
            save.append([Copy(source, save.end)])
            save.copies.clear()
    except ValueError as error:
        reported.append(error)


def test_signals_reach_the_thread_that_waits(engines: Engines, tmp_path: Path) -> None:
    """A wait returns to Python every slice, so that a handler runs within it."""
    save = Save(engines(), tmp_path / "data", [Copy(random_bytes(SLOT), 0)], lazy_seconds=NEVER)
    rung: list[bool] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        for _ in range(600):
            assert not save.reaches(Milestone.ENQUEUED, 0.1)
            if rung:
                break
        assert rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Rung(Exception):
    pass


def test_signals_reach_a_thread_that_closes(engines: Engines, tmp_path: Path) -> None:
    """A disk that stalls keeps the engine's threads, and not the program from its signals."""

    def ring(*_: object) -> None:
        raise Rung

    def rings_while_it_writes(milliseconds: int) -> bool:
        engine = engines(write_threads=1, faults=f"write:1:stall={milliseconds}")
        save = Save(engine, tmp_path / str(milliseconds), [Copy(random_bytes(SLOT), 0)])
        save.expect(Milestone.ENQUEUED)
        time.sleep(0.1)  # as a rule, the write has begun then
        before = signal.signal(signal.SIGALRM, ring)
        try:
            with pytest.raises(Rung):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                engine.close()
                signal.pause()  # it is closed already: too late
            in_time = not save.reaches(Milestone.RELEASED, 0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        engine.close()
        assert save.reaches(Milestone.RELEASED, 0)
        return in_time

    see_in_time(rings_while_it_writes)


def test_no_worker_waits_for_pythons_lock(engines: Engines, tmp_path: Path) -> None:
    """Not even when it drops a save that is under way."""
    engine = engines(slot_bytes=ALIGNMENT, most_slots=2, write_threads=1, faults="write:0:stall=5")
    dropped = Save(engine, tmp_path / "dropped", [Copy(random_bytes(ALIGNMENT), 0)])
    dropped.append([Copy(random_bytes(ALIGNMENT), ALIGNMENT)])
    dropped.job.close_input()
    dropped.expect(Milestone.WRITTEN)
    engine.finish(job=dropped.job, footer=FOOTER, offset=dropped.end)
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(10 * ALIGNMENT), 0)])
    save.job.close_input()
    del dropped
    interval, deadline = sys.getswitchinterval(), time.monotonic() + PATIENCE_SECONDS
    sys.setswitchinterval(2 * PATIENCE_SECONDS)
    try:
        while not save.status["written_at"] > 0:  # which keeps Python's lock, as all of this does
            assert time.monotonic() < deadline, "a worker waits for Python's lock"
            ctypes.PyDLL(None).usleep(1_000)
    finally:
        sys.setswitchinterval(interval)


def test_threads_that_cannot_start_are_reported_or_done_without(tmp_path: Path) -> None:
    """A limit on address space, in a process of its own, leaves no room for stacks.

    One arena of malloc only: each further one reserves 64 MiB of the address space that is limited here, and
    how many the threads make depends on how they happen to run.
    """
    script = f"""
import resource, threading
from pathlib import Path
import numpy as np
from tests.native.harness import Request, finish_read, make_engine, make_reader, native, start_read
threading.stack_size(64 << 10)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
target, path = np.zeros(64, np.uint8), Path({str(tmp_path / "data")!r})
path.write_bytes(bytes([1]) * (64 * 8192))
resource.setrlimit(resource.RLIMIT_AS, (used + (12 << 20), -1))
try:
    make_engine(write_threads=64)
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), -1))  # 64 of them are slots
requests = [Request(0, 1, target.ctypes.data + number, file=number) for number in range(64)]
print(finish_read(start_read(make_reader(threads=64), [(str(path), 8192, b"")] * 64, requests)), target.sum())
"""
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0].startswith("start engine thread: Resource temporarily unavailable")
    assert ended.stdout.splitlines()[1] == "(262144, [], '') 64"
