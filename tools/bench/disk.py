"""What the disk itself can do: fio with direct I/O, or plain threads where fio is missing.

These are the yardsticks of the other benchmarks. To measure writing, each configuration writes one file set
of the given size anew, syncs it, and removes it. To measure reading, all read the same files, laid out once.
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


FIO_WRITES = (
    Yardstick("psync", 4 * MIB, 2),
    Yardstick("psync", 4 * MIB, 4),
    Yardstick("io_uring", 1 * MIB, 1, 8),
    Yardstick("io_uring", 4 * MIB, 1, 8),
    Yardstick("io_uring", 1 * MIB, 2, 8),
)
FIO_READS = (
    Yardstick("psync", 1 * MIB, 8),
    Yardstick("psync", 4 * MIB, 4),
    Yardstick("psync", 8 * MIB, 4),
    Yardstick("io_uring", 1 * MIB, 1, 8),
    Yardstick("io_uring", 4 * MIB, 2, 8),
)
THREADS = (
    Yardstick("threads", 4 * MIB, 2),
    Yardstick("threads", 4 * MIB, 4),
    Yardstick("threads", 1 * MIB, 8),
)


def yardsticks(reads: bool = False) -> tuple[Yardstick, ...]:
    """Fio's configurations, or those of the plain threads where fio is not installed."""
    return (FIO_READS if reads else FIO_WRITES) if shutil.which("fio") else THREADS


def write_rate(yardstick: Yardstick, folder: Path, size: int) -> float:
    """Bytes per second of writing and syncing `size` bytes; 0.0 if this machine cannot run it."""
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        if yardstick.engine == "threads":
            return _write_with_threads(yardstick, Path(inside) / "file", size)
        return _fio(yardstick, inside, size, "write")


def read_rate(yardstick: Yardstick, folder: Path, size: int) -> float:
    """Bytes per second of reading `size` bytes; 0.0 if this machine cannot run it.

    The files are laid out in `folder` by the first call, and left there for the next.
    """
    if yardstick.engine == "threads":
        return _read_with_threads(yardstick, folder / "file", size)
    return _fio(yardstick, str(folder), size, "read")


def drop_caches() -> bool:
    """Has the system forget what it holds of files; False where that is not permitted."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def best_write_rate(folder: Path, size: int) -> dict[str, Any]:
    """GB/s of the best of all yardsticks that this machine can run."""
    rates = {str(yardstick): write_rate(yardstick, folder, size) / 1e9 for yardstick in yardsticks()}
    best = max(rates, key=rates.__getitem__)
    return {"gb_per_s": rates[best], "by": best, "bytes": size}


def _fio(yardstick: Yardstick, folder: str, size: int, kind: str) -> float:
    command = ["fio", "--name=w", f"--directory={folder}", f"--rw={kind}", "--direct=1", "--end_fsync=1"]
    command += [f"--size={size // yardstick.jobs}", f"--bs={yardstick.block}", f"--numjobs={yardstick.jobs}"]
    command += [f"--ioengine={yardstick.engine}", f"--iodepth={yardstick.depth}", "--group_reporting"]
    command += ["--filename_format=$jobnum", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return 0.0
    return float(json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"])


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:  # this file system takes no direct access
        return os.open(path, flags)


def _write_with_threads(yardstick: Yardstick, path: Path, size: int) -> float:
    descriptor = _open_direct(path, os.O_CREAT | os.O_WRONLY)
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


def _read_with_threads(yardstick: Yardstick, path: Path, size: int) -> float:
    if not path.exists():
        _write_with_threads(yardstick, path, size)
    descriptor = _open_direct(path, os.O_RDONLY)
    # Blocks divided among the threads, each with page-aligned memory of its own.
    places = range(0, path.stat().st_size, yardstick.block)

    def read(first: int) -> int:
        block = mmap.mmap(-1, yardstick.block)
        return sum(os.preadv(descriptor, [block], place) for place in places[first :: yardstick.jobs])

    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(yardstick.jobs) as pool:
            done = sum(pool.map(read, range(yardstick.jobs)))
        return done / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)
