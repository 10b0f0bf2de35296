"""Measures how fast host memory is page-locked: by the driver alone, by torch, and as our staging memory."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.context import Part
from benchmarks.gpu.driver import COLLAPSE, Driver, HostMemory
from benchmarks.gpu.environment import IS_FAKE
from benchmarks.gpu.memory import fitting
from benchmarks.gpu.saves import DeviceSaves
from megatron_datastates.config import GIB, MIB

_SEGMENT = (1 if IS_FAKE else 64) * MIB
_SEGMENTS = 4 if IS_FAKE else 16
_THREADS = (1, 2, 4)
# The advice before pages are touched, and whether they are collapsed into huge ones afterwards.
_PAGES: dict[str, tuple[int | None, bool]] = {
    "huge": (mmap.MADV_HUGEPAGE, False),
    "small": (mmap.MADV_NOHUGEPAGE, False),
    "collapsed": (None, True),
}


def measure_page_locking(part: Part) -> None:
    """Reports GB/s by kind of page and number of threads, GB/s of torch, and our pool's seconds."""
    driver = Driver(part.device.driver)
    _, left_out = fitting([2 * _SEGMENT * _SEGMENTS], None, host_copies=1.0)
    part.report(segment_bytes=_SEGMENT, segments=_SEGMENTS, left_out=left_out)
    if not left_out:
        for pages in _PAGES:
            rates = {f"{count}_threads": _by_the_driver(driver, pages, count) for count in _THREADS}
            part.report(**{pages: rates})
    part.report(torch_pinned=_by_torch())
    sizes, less = fitting([128 * MIB] if part.is_small else [GIB, 4 * GIB, 16 * GIB], None, host_copies=1.0)
    pools: dict[str, Any] = {}
    for size in sizes:
        if pools and time.monotonic() > part.deadline:
            less.append(f"{size / GIB:g} GiB: no time")
            continue
        saves = DeviceSaves(part.device, part.folder, size)
        made = saves.make_pool()
        pools[f"{size / GIB:g} GiB"] = made | {"gb_per_s": size / made["seconds"] / 1e9}
        saves.close()
        part.report(pools=pools, left_out=left_out + less)
    part.report(left_out=left_out + less)


def _by_the_driver(driver: Driver, pages: str, count: int) -> dict[str, float]:
    """Divides segments among threads; returns GB/s of making pages, of locking and of unlocking them."""
    advice, collapse = _PAGES[pages]
    memory = [HostMemory(_SEGMENT, advice) for _ in range(_SEGMENTS)]
    collapsed: list[bool] = []

    def touch(segment: HostMemory) -> None:
        segment.touch()
        if collapse:
            collapsed.append(segment.advise(COLLAPSE))

    total, before = _SEGMENT * _SEGMENTS, _huge_bytes()
    found = {
        f"{name}_gb_per_s": total / _seconds(driver, memory, count, work) / 1e9
        for name, work in (
            ("touch", touch),
            ("lock", lambda segment: driver.lock(segment.address, segment.bytes)),
        )
    }
    found["huge_share"] = (_huge_bytes() - before) / total
    unlocked = _seconds(driver, memory, count, lambda segment: driver.unlock(segment.address))
    found["unlock_gb_per_s"] = total / unlocked / 1e9
    if collapse:
        found["segments_not_collapsed"] = collapsed.count(False)
    for segment in memory:
        segment.free()
    return found


def _seconds(driver: Driver, memory: list[HostMemory], count: int, work: Any) -> float:
    """Returns the seconds of calling `work` for every segment on `count` threads; raises the first error."""
    errors: list[Exception] = []
    times: list[float] = []
    start = threading.Barrier(count)

    def run(mine: list[HostMemory]) -> None:
        try:
            driver.enter_thread()
            start.wait()
            times.append(time.perf_counter())
            for segment in mine:
                work(segment)
            times.append(time.perf_counter())
        except Exception as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=run, args=(memory[i::count],)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return max(times) - min(times)


def _huge_bytes() -> int:
    """Returns this process's anonymous memory in huge pages; 0 where the system does not report it."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))


def _by_torch() -> dict[str, Any]:
    """Returns GB/s of torch's page-locked allocations, of the same sizes, from one thread."""
    if IS_FAKE:
        return {"left_out": "torch page-locks nothing without a GPU"}
    begin = time.perf_counter()
    kept = [torch.empty(_SEGMENT, dtype=torch.uint8, pin_memory=True) for _ in range(_SEGMENTS)]
    segments = time.perf_counter() - begin
    begin = time.perf_counter()
    kept.append(torch.empty(_SEGMENT * _SEGMENTS, dtype=torch.uint8, pin_memory=True))
    whole = time.perf_counter() - begin
    total = _SEGMENT * _SEGMENTS
    return {"segments_gb_per_s": total / segments / 1e9, "in_one_gb_per_s": total / whole / 1e9}
