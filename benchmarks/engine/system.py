"""What a save takes from the rest of the machine: resident memory, and memory traffic of other cores."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.command import Result
from benchmarks.engine.saves import POOL_BYTES, Sizes, large_state, timed_saves
from benchmarks.rounds import Bar, interleave, median
from benchmarks.states import host_tensors, lazy
from megatron_datastates.config import MIB

_ALONE, _OTHER_CORES, _ANY_CORE = "alone", "beside a save on the other cores", "beside a save on any core"
_SPAWN = multiprocessing.get_context("spawn")


def measure_memory(folder: Path, sizes: Sizes) -> tuple[Result, list[Bar]]:
    """Measures by how much the resident memory of a process grows at most while it saves."""
    pipe, other = _SPAWN.Pipe()
    child = _SPAWN.Process(target=_send_growth, args=(folder, sizes.bytes, other))
    child.start()
    other.close()
    growth = pipe.recv()
    child.join()
    result = {"bytes": sizes.bytes, "pool_mib": POOL_BYTES // MIB, "growth_mib": round(growth / MIB, 1)}
    return result, [Bar("resident memory", growth / MIB, POOL_BYTES / MIB + 64, "MiB", at_least=False)]


def _send_growth(folder: Path, size: int, pipe: Connection) -> None:
    state = large_state(size)
    with timed_saves(folder) as warm_up:  # imports and first uses are not part of a save
        warm_up.once(lazy(host_tensors(4, MIB)))
    before = machine.status_bytes("VmRSS")
    machine.reset_peak()
    with timed_saves(folder) as saves:
        saves.once(state)
    pipe.send(machine.status_bytes("VmHWM") - before)


def measure_interference(folder: Path, sizes: Sizes) -> tuple[Result, list[Bar]]:
    """Measures how much slower memory traffic on one core becomes while a save is under way."""
    cores = sorted(os.sched_getaffinity(0))
    state = large_state(sizes.bytes)
    with _traffic(cores[-1], sizes.traffic_bytes) as copied:

        def rate_during(work: Callable[[], object]) -> float:
            begin, before = time.perf_counter(), copied.value
            work()
            return float(copied.value - before) / (time.perf_counter() - begin)

        try:
            if len(cores) > 1:
                os.sched_setaffinity(0, cores[:-1])  # which the engine's threads inherit
            with timed_saves(folder) as apart:
                os.sched_setaffinity(0, cores)
                with timed_saves(folder) as anywhere:
                    contenders = {
                        _ALONE: lambda: rate_during(lambda: time.sleep(1.0)),
                        _OTHER_CORES: lambda: rate_during(lambda: apart.once(state)),
                        _ANY_CORE: lambda: rate_during(lambda: anywhere.once(state)),
                    }
                    found = interleave(sizes.repeats, contenders)
        finally:
            os.sched_setaffinity(0, cores)
    rates = {name: median(values) for name, values in found.items()}
    slower = {name: 1 - rate / rates[_ALONE] for name, rate in rates.items() if name != _ALONE}
    result = {
        "copied_gb_per_s": {name: round(rate / 1e9, 3) for name, rate in rates.items()},
        "slowed_by": {name: round(share, 4) for name, share in slower.items()},
    }
    return result, [Bar("memory traffic slowed", 100 * slower[_OTHER_CORES], 10, "%", at_least=False)]


@contextlib.contextmanager
def _traffic(core: int, size: int) -> Iterator[Any]:
    """Yields a counter of the bytes that a process on `core` copies, as long as this is entered."""
    copied: Any = _SPAWN.Value(ctypes.c_double, 0.0, lock=False)
    stop = _SPAWN.Event()
    process = _SPAWN.Process(target=_copy_until, args=(stop, core, size, copied), daemon=True)
    process.start()
    try:
        while copied.value == 0.0:
            time.sleep(0.01)
        yield copied
    finally:
        stop.set()
        process.join()


def _copy_until(stop: Any, core: int, size: int, copied: Any) -> None:
    """Copies memory larger than a core's caches, as a training step does."""
    os.sched_setaffinity(0, [core])
    a = np.ones(size, np.uint8)
    b = np.empty_like(a)
    while not stop.is_set():
        for at in range(0, len(a), 4 * MIB):
            np.copyto(b[at : at + 4 * MIB], a[at : at + 4 * MIB])
            copied.value += 4 * MIB
