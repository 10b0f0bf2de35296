"""What the disk itself can do: fio with direct I/O, or plain threads where fio is missing.

These are the yardsticks of the other benchmarks. Each configuration writes one file set of the given size
anew, syncs it, and removes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """One way of writing (or reading) `bytes` with direct I/O."""

    engine: str  # fio's ioengine, or "threads"
    block: int  # bytes of each write
    jobs: int  # threads, each with a file (fio) or a stride (threads) of its own
    depth: int = 1  # writes in flight per job

    def __str__(self) -> str:
        depth = f" x {self.depth} in flight" if self.depth > 1 else ""
        return f"{self.engine} {self.block // MIB} MiB x {self.jobs}{depth}"


FIO = (
    Yardstick("psync", 4 * MIB, 2),
    Yardstick("psync", 4 * MIB, 4),
    Yardstick("io_uring", 1 * MIB, 1, 8),
    Yardstick("io_uring", 4 * MIB, 1, 8),
    Yardstick("io_uring", 1 * MIB, 2, 8),
)
THREADS = (
    Yardstick("threads", 4 * MIB, 2),
    Yardstick("threads", 4 * MIB, 4),
    Yardstick("threads", 1 * MIB, 8),
)


def yardsticks() -> tuple[Yardstick, ...]:
    """Fio's configurations, or those of the plain threads where fio is not installed."""
    return FIO if shutil.which("fio") else THREADS


def write_rate(yardstick: Yardstick, folder: Path, size: int) -> float:
    """Bytes per second of writing and syncing `size` bytes; 0.0 if this machine cannot run it."""
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        if yardstick.engine == "threads":
            return _write_with_threads(yardstick, Path(inside) / "file", size)
        return _fio(yardstick, inside, size)


def best_write_rate(folder: Path, size: int) -> dict[str, Any]:
    """GB/s of the best of all yardsticks that this machine can run."""
    rates = {str(yardstick): write_rate(yardstick, folder, size) / 1e9 for yardstick in yardsticks()}
    best = max(rates, key=rates.__getitem__)
    return {"gb_per_s": rates[best], "by": best, "bytes": size}


def _fio(yardstick: Yardstick, folder: str, size: int) -> float:
    command = ["fio", "--name=w", f"--directory={folder}", "--rw=write", "--direct=1", "--end_fsync=1"]
    command += [f"--size={size // yardstick.jobs}", f"--bs={yardstick.block}", f"--numjobs={yardstick.jobs}"]
    command += [f"--ioengine={yardstick.engine}", f"--iodepth={yardstick.depth}", "--group_reporting"]
    done = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True)
    if done.returncode:
        return 0.0
    return float(json.loads(done.stdout)["jobs"][0]["write"]["bw_bytes"])


def _write_with_threads(yardstick: Yardstick, path: Path, size: int) -> float:
    flags = os.O_CREAT | os.O_WRONLY
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
    except OSError:  # this file system takes no direct writes
        descriptor = os.open(path, flags)
    places = range(0, size - yardstick.block + 1, yardstick.block)
    block = mmap.mmap(-1, yardstick.block)  # page-aligned, as direct writes need it
    block.write(os.urandom(yardstick.block))
    try:
        with contextlib.suppress(OSError):  # not every file system reserves
            os.posix_fallocate(descriptor, 0, size)
        begin = time.perf_counter()
        with ThreadPoolExecutor(yardstick.jobs) as pool:
            written = sum(pool.map(lambda place: os.pwrite(descriptor, block, place), places))
        os.fsync(descriptor)
        return written / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)
