"""A process forked in mid-save is no part of it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import (
    ALIGNMENT,
    KIB,
    Copy,
    Engines,
    Request,
    Save,
    descriptors_of,
    finish_read,
    make_engine,
    make_reader,
    random_bytes,
    save_whole,
    see_in_time,
    start_read,
)
from tests.support.waiting import PATIENCE_SECONDS, eventually

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


def in_child(work: Callable[[], object]) -> str:
    """Returns what `work` returned in a forked child, as text; fails if the child hangs or dies."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writing, str(work()).encode())
            code = 0
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(code)
    os.close(writing)
    status = reap(child)
    with open(reading, "rb") as pipe:
        reported = pipe.read().decode()
    assert status == 0, reported
    return reported


def reap(child: int, seconds: float = PATIENCE_SECONDS) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the forked child hangs")


def slow_save(engines: Engines, tmp_path: Path) -> Save:
    """Returns a save in mid-write, as a rule for a second."""
    engine = engines(slot_bytes=ALIGNMENT, most_slots=2, faults="write:1:stall=1000,write:2:stall=1000")
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(60 * ALIGNMENT), 0)])
    save.reaches(Milestone.ENQUEUED, 0.05)
    return save


def test_a_child_has_no_data_file_open(engines: Engines, tmp_path: Path) -> None:
    save = slow_save(engines, tmp_path)
    eventually(lambda: len(descriptors_of(save.path)) == 1, "the file is open")
    assert in_child(lambda: descriptors_of(save.path)) == "[]"
    save.finish()
    save.assert_stored()


def test_a_child_of_a_reader_has_no_data_file_open(tmp_path: Path) -> None:
    """Its first read stands still while this process forks."""
    path, target = tmp_path / "data", np.zeros(10, np.uint8)
    path.write_bytes(bytes(ALIGNMENT))

    def is_open_here_alone(milliseconds: int) -> bool:
        reader = make_reader(faults=f"read:1:stall={milliseconds}")
        job = start_read(reader, [(str(path), ALIGNMENT, b"")], [Request(0, 10, target.ctypes.data)])
        eventually(lambda: descriptors_of(path) or job.wait(0.0), "the reader has opened it")
        assert in_child(lambda: len(descriptors_of(path))) == "0"
        in_time = len(descriptors_of(path)) == 1
        assert finish_read(job)[2] == ""
        return in_time

    see_in_time(is_open_here_alone)


def test_a_child_may_drop_its_parents_reader_and_cannot_use_it(tmp_path: Path) -> None:
    """No thread is there to be joined, and no lock that one of them held may be taken."""
    path, target = tmp_path / "data", np.zeros(ALIGNMENT, np.uint8)
    path.write_bytes(bytes(ALIGNMENT))
    kept = {"reader": make_reader(faults="read:1:stall=500")}
    request = Request(0, ALIGNMENT, target.ctypes.data)
    kept["job"] = start_read(kept["reader"], [(str(path), ALIGNMENT, b"")], [request])

    def use_and_drop() -> str:
        try:
            kept["job"].wait(0.0)
        except ValueError as error:
            kept.clear()
            return str(error)
        return "used"

    assert "belongs to the parent" in in_child(use_and_drop)
    assert finish_read(kept["job"]) == (ALIGNMENT, [], "")


def test_a_child_may_drop_its_copies(engines: Engines, tmp_path: Path) -> None:
    save = slow_save(engines, tmp_path)
    waiter = threading.Thread(target=save.reaches, args=(Milestone.DURABLE,))  # on its condition variable
    waiter.start()

    def drop() -> str:
        save.job = None
        save.engine = None
        return "dropped"

    assert in_child(drop) == "dropped"
    save.finish()
    waiter.join()
    save.assert_stored()


def test_a_child_cannot_use_its_parents_engine(engines: Engines, tmp_path: Path) -> None:
    save = slow_save(engines, tmp_path)

    def use() -> str:
        try:
            save.engine.pool()["slots"]
        except ValueError as error:
            return str(error)
        return "used"

    assert "belongs to the parent" in in_child(use)
    assert in_child(lambda: save.engine.close()) == "True"  # nothing of it is here
    save.finish()
    save.assert_stored()


def test_a_child_that_ends_normally_harms_nothing(tmp_path: Path) -> None:
    """The child shuts its interpreter down, which a forked child of pytest never does."""
    script = f"""
import os, sys
from pathlib import Path
from tests.native.harness import ALIGNMENT, Copy, Milestone, Save, make_engine, random_bytes
engine = make_engine(slot_bytes=ALIGNMENT, most_slots=2, faults="write:1:stall=1000,write:2:stall=1000")
save = Save(engine, Path({str(tmp_path / "data")!r}), [Copy(random_bytes(60 * ALIGNMENT), 0)])
save.reaches(Milestone.ENQUEUED, 0.05)
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
save.finish()
save.assert_stored()
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_child_can_save_with_an_engine_of_its_own(engines: Engines, tmp_path: Path) -> None:
    save = slow_save(engines, tmp_path)

    def save_in_child() -> str:
        engine = make_engine()
        save_whole(engine, tmp_path / "child", [Copy(random_bytes(100 * KIB), 0)])
        engine.close()
        return str(descriptors_of(tmp_path / "child"))

    assert in_child(save_in_child) == "[]"
    save.finish()
    save.assert_stored()


def test_staging_memory_is_not_inherited(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=1 << 20, most_slots=64)
    engine.grow(64)
    save_whole(engine, tmp_path / "data", [Copy(random_bytes(10), 0)])
    flags = [line for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith("VmFlags")]
    assert any(" dc" in line for line in flags)  # do not copy on fork
    here = int(Path("/proc/self/statm").read_text().split()[0])
    there = int(in_child(lambda: Path("/proc/self/statm").read_text().split()[0]))
    assert (here - there) * os.sysconf("SC_PAGE_SIZE") >= 60 << 20


def test_a_child_leaves_the_parents_device_objects_alone(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    stream = cuda.new_stream()
    engine = device_engines(slot_bytes=ALIGNMENT, most_slots=2)
    copies = [Copy(random_bytes(60 * ALIGNMENT), 0, device=True)]
    finished = save_whole(engine, tmp_path / "finished", copies[:1], stream=stream)
    cuda.hold_stream(stream)
    save = Save(engine, tmp_path / "data", copies, stream=stream)
    assert not save.reaches(Milestone.ENQUEUED, 0.05)

    def drop() -> int:
        before = len(cuda.calls("cuEventDestroy"))  # here: the parent's writing threads go on until the fork
        save.job = finished.job = None
        save.engine = finished.engine = None
        return len(cuda.calls("cuEventDestroy")) - before

    assert in_child(drop) == "0"
    cuda.release_stream(stream)
    save.finish()
    save.assert_stored()


def test_a_save_is_over_in_a_child(engines: Engines, tmp_path: Path) -> None:
    """Whatever a child calls returns; the parent's save and its file are as they were."""
    save = slow_save(engines, tmp_path)

    def use() -> str:
        assert all(save.job.wait(milestone, 60.0) for milestone in Milestone)
        save.job.cancel("not mine")
        save.job.close_input()
        save.job.hold_back(0)
        save.job.remove()
        with pytest.raises(OSError, match="belongs to the parent"):
            save.job.block_checksums()
        assert save.status["error"] is not None
        return save.error

    assert "this save belongs to the parent of this process" in in_child(use)
    assert save.path.exists() and not save.error
    save.finish()
    save.assert_stored()


def test_a_lock_that_is_held_at_the_fork_hangs_no_child(engines: Engines, tmp_path: Path) -> None:
    """The parent's threads take the save's lock as fast as they can: some fork comes while it is held."""
    save = slow_save(engines, tmp_path)
    over = threading.Event()

    def hammer() -> None:
        while not over.is_set():
            for _ in range(100):
                save.job.wait(Milestone.DURABLE, 0.0)

    threads = [threading.Thread(target=hammer) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            assert in_child(lambda: (save.job.wait(Milestone.ENQUEUED, 1.0), save.error)[0]) == "True"
    finally:
        over.set()
        for thread in threads:
            thread.join()
    save.finish()
    save.assert_stored()
