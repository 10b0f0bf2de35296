"""Which shards fit into this machine, memory on tmpfs, and how much memory a save takes at its peak."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.environment import IS_FAKE, MEMORY, TMPFS
from benchmarks.states import Tensors
from megatron_datastates.config import GIB, MIB
from megatron_datastates.engine.memory import free_bytes

SEGMENT_BYTES = 64 * MIB  # a multiple of every slot size; staging memory is made in such pieces
NO_TMPFS = "tmpfs: /dev/shm is missing, or has no room"
_LEAST_BYTES = (1 if IS_FAKE else 16) * MIB  # of a shard: it is measured even where no room is known


def host_room() -> int:
    """Returns how much host memory may still be taken: what is free, or what is left of --memory."""
    known = float(os.environ.get(MEMORY, "0"))
    return max(free_bytes(), int(known * GIB) - _resident_bytes())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fitting(
    wanted: Iterable[int], device: Device | None, folder: Path | None = None, host_copies: float = 2.0
) -> tuple[list[int], list[str]]:
    """Returns those of the wanted shard sizes for which there is room, and why others are left out.

    If none fits, halves the least until it does: a small measurement is better than none.

    Args:
        wanted: sizes in bytes.
        device: holds one shard; None: no shard is on the device.
        folder: on a disk that is to hold one shard; None: none is written.
        host_copies: how many times the shard is in host memory (pools, bare copies, files on tmpfs).
    """
    rooms = {"host memory": host_room() * 0.8 / host_copies}
    if device is not None:
        rooms["device memory"] = device.free_bytes() * 0.8
    if folder is not None:
        rooms["disk"] = shutil.disk_usage(folder).free * 0.8
    scarce = min(rooms, key=rooms.__getitem__)
    sizes = sorted(wanted)
    fits = [size for size in sizes if size <= rooms[scarce]]
    left_out = [
        f"{size / GIB:g} GiB: the {scarce} has room for a shard of {rooms[scarce] / GIB:.2f} GiB"
        for size in sizes
        if size not in fits
    ]
    least = sizes[0]
    while not fits:
        least //= 2
        if least <= max(rooms[scarce], _LEAST_BYTES):
            fits = [least]
    return fits, left_out


def pool_for(shard: Tensors) -> int:
    """Returns how much staging memory holds every byte of a shard, alignment and header included."""
    steps = ((tensor.nbytes, 4096 if tensor.nbytes >= MIB else 64) for tensor in shard.values())
    return SEGMENT_BYTES + sum(-(-size // step) * step for size, step in steps)


@contextlib.contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[Path | None]:
    """Yields a new folder in memory, named after `folder`, or None if there is no room for `size` bytes."""
    if not TMPFS.is_dir() or min(shutil.disk_usage(TMPFS).free, host_room()) < 1.25 * size:
        yield None
        return
    made = TMPFS / folder.name
    made.mkdir(exist_ok=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


class MemoryWatch:
    """Measures by how much host and device memory in use grow at most while this is entered.

    Host memory is measured twice: as the system counts it (with page-locked memory, without clean page
    cache), and as the proportional share (PSS) of this process and its children.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._peak: dict[str, int] = {}

    def __enter__(self) -> MemoryWatch:
        with contextlib.suppress(AttributeError, RuntimeError):
            torch._C._host_emptyCache()  # page-locked memory of an earlier way
        self._before = self._used()
        self._peak = dict(self._before)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def growth(self) -> dict[str, float]:
        """Returns the growth by kind of memory, in GiB."""
        return {f"{name}_gib": (self._peak[name] - self._before[name]) / GIB for name in self._peak}

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            used = self._used()
            self._peak = {name: max(self._peak[name], used[name]) for name in used}

    def _used(self) -> dict[str, int]:
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        kib = {name: int(facts[name].split()[0]) for name in ("MemTotal", "MemAvailable")}
        return {
            "host_of_system": (kib["MemTotal"] - kib["MemAvailable"]) << 10,
            "host_of_processes": sum(map(_share, _descendants(os.getpid()))),
            "device": -self._device.free_bytes(),
        }


def _descendants(process: int) -> Iterator[int]:
    """Yields a process and all that descend from it."""
    yield process
    with contextlib.suppress(OSError):  # it has ended
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from _descendants(int(child))


def _share(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):  # it has ended, or this kernel has no such file
        return 0
