"""How fast host memory is page-locked: by the driver alone, by torch, and as staging memory of ours."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path
from typing import Any

import torch
from gpu_device import IS_FAKE, Device
from gpu_driver import COLLAPSE, Driver, HostMemory
from gpu_saves import Saving, Tell, fitting

from megatron_datastates.config import GIB, MIB

_SEGMENT = (1 if IS_FAKE else 64) * MIB
_SEGMENTS = 4 if IS_FAKE else 16
_THREADS = (1, 2, 4)
# How pages are asked for before they are touched, and whether they are made huge ones afterwards.
_PAGES: dict[str, tuple[int | None, bool]] = {
    "huge": (mmap.MADV_HUGEPAGE, False),
    "small": (mmap.MADV_NOHUGEPAGE, False),
    "collapsed": (None, True),
}


def measure_page_locking(device: Device, folder: Path, small: bool, until: float, tell: Tell) -> None:
    """GB/s of 64 MiB segments by kind of page and number of threads; torch's; our pool's seconds."""
    driver = Driver(device.driver)
    _, left_out = fitting([2 * _SEGMENT * _SEGMENTS], None, host_copies=1.0)
    tell(segment_bytes=_SEGMENT, segments=_SEGMENTS, left_out=left_out)
    if not left_out:
        for pages in _PAGES:
            tell(**{pages: {f"{count}_threads": _by_the_driver(driver, pages, count) for count in _THREADS}})
    tell(torch_pinned=_by_torch())
    sizes, less = fitting([128 * MIB] if small else [GIB, 4 * GIB, 16 * GIB], None, host_copies=1.0)
    pools: dict[str, Any] = {}
    for size in sizes:
        if pools and time.monotonic() > until:
            less.append(f"{size / GIB:g} GiB: no time")
            continue
        saving = Saving(device, folder, size)
        made = saving.make_pool()
        pools[f"{size / GIB:g} GiB"] = made | {"gb_per_s": size / made["seconds"] / 1e9}
        saving.close()
        tell(pools=pools, left_out=left_out + less)
    tell(left_out=left_out + less)


def _by_the_driver(driver: Driver, pages: str, count: int) -> dict[str, float]:
    """All segments divided among threads; GB/s of making the pages, of locking and of unlocking them."""
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
    """Until every segment has been worked on, by that many threads. Raises the first error of any."""
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
    """Of this process's anonymous memory, in huge pages; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))


def _by_torch() -> dict[str, Any]:
    """Its page-locked allocations, of the same sizes, from one thread."""
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
