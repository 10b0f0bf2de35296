"""The disk's own limit: fio with direct I/O, or plain threads where fio is missing.

Other benchmarks compare their rates with it. To measure writing, each configuration writes new files of the
given total size, syncs them, and removes them. To measure reading, all configurations read the same files,
written once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class DiskConfig:
    """One way of writing or reading with direct I/O."""

    engine: str  # fio's ioengine, or "threads"
    block: int  # bytes of each write or read
    jobs: int  # threads, each with its own file (fio) or its own stride of one file (threads)
    depth: int = 1  # writes or reads in flight per job

    def __str__(self) -> str:
        depth = f" x {self.depth} in flight" if self.depth > 1 else ""
        return f"{self.engine} {self.block // MIB} MiB x {self.jobs}{depth}"


FIO_WRITES = (
    DiskConfig("psync", 4 * MIB, 2),
    DiskConfig("psync", 4 * MIB, 4),
    DiskConfig("io_uring", 1 * MIB, 1, 8),
    DiskConfig("io_uring", 4 * MIB, 1, 8),
    DiskConfig("io_uring", 1 * MIB, 2, 8),
)
FIO_READS = (
    DiskConfig("psync", 1 * MIB, 8),
    DiskConfig("psync", 4 * MIB, 4),
    DiskConfig("psync", 8 * MIB, 4),
    DiskConfig("io_uring", 1 * MIB, 1, 8),
    DiskConfig("io_uring", 4 * MIB, 2, 8),
)
THREADS = (
    DiskConfig("threads", 4 * MIB, 2),
    DiskConfig("threads", 4 * MIB, 4),
    DiskConfig("threads", 1 * MIB, 8),
)


def writers(folder: Path, size: int) -> dict[str, Callable[[], float]]:
    """Returns contenders for `rounds.interleave`: the rate of writing `size` bytes in each configuration."""
    return {str(c): functools.partial(write_rate, c, folder, size) for c in _configs(FIO_WRITES)}


def readers(folder: Path, size: int) -> dict[str, Callable[[], float]]:
    """Returns contenders for `rounds.interleave`: the rate of reading `size` bytes in each configuration."""
    return {str(c): functools.partial(read_rate, c, folder, size) for c in _configs(FIO_READS)}


def _configs(fio: tuple[DiskConfig, ...]) -> tuple[DiskConfig, ...]:
    return fio if shutil.which("fio") else THREADS


def write_rate(config: DiskConfig, folder: Path, size: int) -> float:
    """Writes and syncs `size` bytes; returns bytes per second, or 0.0 if this machine cannot run it."""
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        if config.engine == "threads":
            return _write_with_threads(config, Path(inside) / "file", size)
        return _fio(config, inside, size, "write")


def read_rate(config: DiskConfig, folder: Path, size: int) -> float:
    """Reads `size` bytes; returns bytes per second, or 0.0 if this machine cannot run it.

    The first call writes the files into `folder`, and leaves them there for the next one.
    """
    if config.engine == "threads":
        return _read_with_threads(config, folder / "file", size)
    return _fio(config, str(folder), size, "read")


def drop_caches(directory: Path | None = None) -> bool:
    """Drops the system's cache of files; returns False where that is not permitted.

    Args:
        directory: what is going to be read. As much memory is written to and freed: the host of a virtual
            machine may take back free memory within seconds, and then a page of a file's cache costs
            10 microseconds (DIARY.md, 11-27).
    """
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    if directory is not None:
        np.ones(sum(file.stat().st_size for file in directory.iterdir() if file.is_file()), np.uint8)
    return True


def best_write_rate(folder: Path, size: int) -> dict[str, Any]:
    """Measures every configuration once; returns the best rate, in GB/s, and its name."""
    rates = {name: measure() / 1e9 for name, measure in writers(folder, size).items()}
    best = max(rates, key=rates.__getitem__)
    return {"gb_per_s": rates[best], "by": best, "bytes": size}


def _fio(config: DiskConfig, folder: str, size: int, kind: str) -> float:
    command = ["fio", "--name=w", f"--directory={folder}", f"--rw={kind}", "--direct=1", "--end_fsync=1"]
    command += [f"--size={size // config.jobs}", f"--bs={config.block}", f"--numjobs={config.jobs}"]
    command += [f"--ioengine={config.engine}", f"--iodepth={config.depth}", "--group_reporting"]
    command += ["--filename_format=$jobnum", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return 0.0
    return float(json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"])


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:  # this file system has no direct I/O
        return os.open(path, flags)


def _write_with_threads(config: DiskConfig, path: Path, size: int) -> float:
    descriptor = _open_direct(path, os.O_CREAT | os.O_WRONLY)
    places = range(0, size - config.block + 1, config.block)
    block = mmap.mmap(-1, config.block)  # page-aligned, as direct I/O requires
    block.write(os.urandom(config.block))
    try:
        with contextlib.suppress(OSError):  # not every file system can reserve space
            os.posix_fallocate(descriptor, 0, size)
        begin = time.perf_counter()
        with ThreadPoolExecutor(config.jobs) as pool:
            written = sum(pool.map(lambda place: os.pwrite(descriptor, block, place), places))
        os.fsync(descriptor)
        return written / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)


def _read_with_threads(config: DiskConfig, path: Path, size: int) -> float:
    if not path.exists():
        _write_with_threads(config, path, size)
    descriptor = _open_direct(path, os.O_RDONLY)
    # The blocks are divided among the threads; each has its own page-aligned buffer.
    places = range(0, path.stat().st_size, config.block)

    def read(first: int) -> int:
        block = mmap.mmap(-1, config.block)
        return sum(os.preadv(descriptor, [block], place) for place in places[first :: config.jobs])

    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(config.jobs) as pool:
            done = sum(pool.map(read, range(config.jobs)))
        return done / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)
