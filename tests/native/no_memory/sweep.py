"""Fails every allocation of one thread in turn, in a process of its own: `fail_new.cc` is preloaded.

Prints how many allocations have failed. Whatever fails, the process lives, every save ends, a save that
reports no error is whole, and the engine serves the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import (
    FOOTER,
    KEPT,
    KIB,
    MIB,
    Copy,
    Request,
    Save,
    finish_read,
    make_engine,
    make_reader,
    random_bytes,
    save_whole,
    start_read,
)
from tests.support.descriptors import open_files

SLOT = 64 * KIB
QUEUE_BYTES = (400, 512)  # of a block of libstdc++'s deque, when its elements are of this size


class Memory:
    """What can be ordered of fail_new.cc, for the threads of one name."""

    def __init__(self, library: str, thread: str, *, and_following: bool, sizes: tuple[int, int]) -> None:
        self._library = ctypes.CDLL(library)
        self._library.failed_news.restype = ctypes.c_long
        self._thread = thread if thread != "main" else Path("/proc/self/comm").read_text().strip()
        self._and_following, self._sizes = and_following, sizes

    def fail(self, nth: int) -> None:
        least, most = map(ctypes.c_size_t, self._sizes)
        order = self._thread.encode(), ctypes.c_long(nth), int(self._and_following), least, most
        self._library.fail_new(*order)

    def suffice(self) -> int:
        """Ends that; returns the number of allocations that failed."""
        failed = int(self._library.failed_news())
        self.fail(0)
        return failed


class Attempt:
    """Some saves at a time by a new engine, whose queues have been used for `before` chunks."""

    def __init__(self, options: argparse.Namespace, before: int) -> None:
        self.cuda = cuda = FakeCuda(options.cuda)
        cuda.delay_copies(0.01 if options.slow else 0.001)
        self.folder, self.stream = options.folder, cuda.new_stream()
        self.engine = make_engine(
            slot_bytes=SLOT,
            most_slots=6,
            driver=cuda.path,
            paranoid=options.paranoid,
            tripwire=not options.slow,
            faults="write:0:stall=150" if options.slow else "",
        )
        device = cuda.allocate(8 * SLOT)
        device[:] = random_bytes(8 * SLOT, 1)
        self.copies = {"device": Copy(device, 0, device=True), "host": Copy(random_bytes(8 * SLOT, 2), 0)}
        self.more = random_bytes(2 * SLOT, 3)
        self.delay_samples, self.scratch = options.queues, cuda.allocate(1)
        self.saves: list[Save] = []
        if before:
            self.save_whole(Copy(device[: before * SLOT], 0, device=True))

    def save_whole(self, copy: Copy) -> None:
        save = save_whole(self.engine, self.folder / "whole", [copy], stream=self.stream)
        assert save.reaches(Milestone.RELEASED)
        save.path.unlink()

    def start(self, kinds: list[str]) -> None:
        for number, kind in enumerate(kinds):
            for save in self.saves:
                assert save.reaches(Milestone.ENQUEUED)
            before = self.cuda.copies_to_host
            if self.delay_samples:
                self.cuda.launch_fill(self.stream, self.scratch.ctypes.data, 0, 1, seconds=0.02)
            try:
                path = self.folder / str(number)
                self.saves.append(Save(self.engine, path, [self.copies[kind]], stream=self.stream))
                if self.delay_samples and kind == "device":
                    self.check_samples(self.saves[-1])
            except (MemoryError, native.NativeError):
                time.sleep(0.02)
                assert self.cuda.copies_to_host == before, "nobody has the save, but it copies"

    def check_samples(self, save: Save) -> None:
        """Requires that a save that failed gives up its sources after the samples, its first copies, ran."""
        if save.error and save.reaches(Milestone.STAGED, 0):
            ran = [line for line in self.cuda.calls("ran") if line.startswith("copy")]
            assert len(ran) == self.cuda.copies_to_host, "sources are given up under their copies"

    def end(self, save: Save) -> None:
        with self.or_cancelled(save):
            save.append([Copy(self.more, save.end)])
        save.job.close_input()
        assert save.reaches(Milestone.WRITTEN), save.status
        if not save.error:
            with self.or_cancelled(save):
                self.engine.finish(job=save.job, footer=FOOTER, offset=save.end)
            assert save.reaches(Milestone.DURABLE), save.status
        assert save.reaches(Milestone.STAGED), "a source is read forever"
        assert save.reaches(Milestone.RELEASED), "a failed save holds on to something"
        if not save.error:
            save.assert_stored()
        save.job.remove() if save.error else save.path.unlink()

    @contextlib.contextmanager
    def or_cancelled(self, save: Save) -> Iterator[None]:
        try:
            yield
        except MemoryError:
            save.job.cancel("out of memory")

    def close(self) -> None:
        """Saves with memory; then nothing may be left of the saves that failed."""
        assert not list(self.folder.iterdir())
        assert open_files(self.folder) == []
        self.save_whole(self.copies["device"])
        pool = self.engine.pool()
        assert pool["idle"] == pool["slots"], pool
        assert self.engine.close(10.0)
        self.saves.clear()
        KEPT.clear()
        del self.engine
        assert self.cuda.misuse == []
        self.cuda.close()


def sweep(memory: Memory, options: argparse.Namespace, before: int) -> int:
    """Returns the number of allocations that failed."""
    total = 0
    for nth in itertools.count(1):
        attempt = Attempt(options, before)
        memory.fail(nth)
        attempt.start(options.kinds)
        for save in attempt.saves:
            attempt.end(save)
        failed = memory.suffice()
        attempt.close()
        if failed == 0:
            return total
        total += failed


def sweep_reads(memory: Memory, options: argparse.Namespace) -> int:
    path, data, total = options.folder / "data", random_bytes(3 * MIB), 0
    path.write_bytes(data.tobytes())
    for nth in itertools.count(1):
        reader, target = make_reader(threads=2), np.zeros_like(data)
        memory.fail(nth)
        request = Request(0, data.nbytes, target.ctypes.data)
        _, bad, error = finish_read(start_read(reader, [(str(path), data.nbytes, b"")], [request]))
        failed = memory.suffice()
        assert not bad and (error or np.array_equal(target, data))
        assert open_files(options.folder) == []
        if failed == 0:
            return total
        total += failed


def sweep_fences(memory: Memory, options: argparse.Namespace) -> int:
    """A fence that finds no memory raises nothing, and fails the save: its sources change next."""
    for nth in itertools.count(1):
        attempt = Attempt(options, 0)
        attempt.start(["device"])
        (save,) = attempt.saves
        save.expect(Milestone.ENQUEUED)
        memory.fail(nth)
        save.job.hold_back(attempt.stream)
        failed = memory.suffice()
        assert bool(save.error) == bool(failed)
        attempt.end(save)
        attempt.close()
        if failed == 0:
            return nth - 1
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("cuda", type=Path, help="the fake driver")
    parser.add_argument("folder", type=Path)
    parser.add_argument("thread", help="its name; 'main' is the trainer's")
    parser.add_argument(
        "kinds", nargs="*", default=["device", "host"], help="of the saves: device, host; or read, fence"
    )
    parser.add_argument("--and-following", action="store_true", help="no later allocation succeeds either")
    parser.add_argument("--queues", action="store_true", help="fail only those of queues")
    parser.add_argument(
        "--slow", action="store_true", help="a slow device and disk, so that a slot is used for long"
    )
    parser.add_argument("--paranoid", action="store_true")
    options = parser.parse_args()
    sizes = QUEUE_BYTES if options.queues else (1, sys.maxsize)
    memory = Memory(options.library, options.thread, and_following=options.and_following, sizes=sizes)
    if options.kinds == ["read"]:
        return print(sweep_reads(memory, options))
    if options.kinds == ["fence"]:
        return print(sweep_fences(memory, options))
    # A queue asks for memory at every fifth element or so.
    uses = range(6) if options.queues and not options.slow else [0]
    print(sum(sweep(memory, options, before) for before in uses))


if __name__ == "__main__":
    main()
