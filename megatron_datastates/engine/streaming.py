"""A data file that is written sequentially, from buffers of the caller.

Belongs here: passing buffers to the engine that also saves, so that they are checksummed, written and synced
like any other file. Does not belong here: the meaning of the bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_datastates.config import MIB
from megatron_datastates.engine import native
from megatron_datastates.engine.staging import StagingEngine
from megatron_datastates.engine.tail import contiguous_copies
from megatron_datastates.format.values import ALIGNMENT

_PASSED_BYTES = MIB  # what is at least as long is passed to the engine where it is, without a copy


class SequentialFile:
    """A file of any bytes, written from the first to the last one, through the engine.

    `write`, `tell` and `flush` are those of a binary file. All methods raise FailedCallError or OSError once
    an error occurred; the caller then calls `remove`.

    Args:
        reserve_bytes: at most what will be written.
        buffer_bytes: host memory besides the engine's, a multiple of 4 KiB.
    """

    def __init__(self, engine: StagingEngine, path: Path, reserve_bytes: int, buffer_bytes: int) -> None:
        self._path, self._file = path, StreamedFile(engine, path, reserve_bytes)
        self._buffer = np.empty(buffer_bytes, np.uint8)
        self._begin = self._held = 0  # bytes that the engine has, and those in the buffer

    def write(self, data: Any) -> int:
        rest = np.frombuffer(data, np.uint8)
        size = len(rest)
        if size >= _PASSED_BYTES:
            # All but the last bytes, which finish() needs; what is put before them ends at an aligned offset.
            count = (self._held + size - 1) // ALIGNMENT * ALIGNMENT - self._held
            self._file.put(self._buffer[: self._held], rest[:count])
            self._begin, self._held, rest = self._begin + self._held + count, 0, rest[count:]
        while len(rest):
            if self._held == len(self._buffer):
                self._put(self._held)
            part = rest[: len(self._buffer) - self._held]
            self._buffer[self._held : self._held + len(part)] = part
            self._held, rest = self._held + len(part), rest[len(part) :]
        return size

    def tell(self) -> int:
        return self._begin + self._held

    def flush(self) -> None:
        """Does nothing: only `finish` makes the file complete."""

    def _put(self, count: int) -> None:
        self._file.put(self._buffer[:count])
        self._begin, self._held = self._begin + count, self._held - count

    def finish(self) -> None:
        """Returns when the file is complete and durable."""
        if self._begin == 0 and self._held < len(self._buffer):  # too little for the engine
            with self._path.open("xb") as file:
                try:
                    file.write(self._buffer[: self._held])
                    file.flush()
                    os.fsync(file.fileno())
                except BaseException:
                    self._path.unlink(missing_ok=True)  # `remove` knows only files of the engine
                    raise
            return
        aligned = max(self._held - 1, 0) // ALIGNMENT * ALIGNMENT
        last = self._buffer[aligned : self._held].tobytes()
        if aligned:
            self._put(aligned)
        self._file.checksums()
        self._file.finish(last)

    def remove(self) -> None:
        """Cancels the file, waits until nothing is in flight, and removes it."""
        self._file.remove()


class StreamedFile:
    """A data file being written by one thread.

    Every method raises FailedCallError once an error occurred; the caller then calls `remove`.
    """

    def __init__(self, engine: StagingEngine, path: Path, total_bytes: int) -> None:
        """Prepares a file at `path`; its first `put` reserves `total_bytes`, which exclude the footer."""
        self._engine, self._path, self._total_bytes = engine, path, total_bytes
        self._job: native.SaveJob | None = None
        self._end = 0

    def put(self, *buffers: npt.NDArray[np.uint8]) -> None:
        """Appends buffers, a multiple of 4 KiB together; returns, or raises, once they may change."""
        sizes = np.array([len(buffer) for buffer in buffers], np.uint64)
        ends = self._end + np.cumsum(sizes, dtype=np.uint64)
        begin, self._end = self._end, int(ends[-1])
        assert (self._end - begin) % ALIGNMENT == 0, "the next buffer would start at an unaligned offset"
        addresses = [buffer.ctypes.data for buffer in buffers]
        copies = contiguous_copies(addresses, sizes, ends - sizes, native.EAGER_FLAG)
        if self._job is None:
            with native.errors_for_users():
                self._job = self._engine.native.start(
                    path=str(self._path),
                    reserve_bytes=self._total_bytes,
                    end=self._end,
                    stream=0,
                    lazy_seconds=0.0,
                    **copies,
                )
        else:
            self._engine.native.append(job=self._job, begin=begin, end=self._end, **copies)
        # In this order: once the file has failed, only STAGED waits until nothing reads the buffers.
        self._wait(self._job, native.Milestone.APPENDED, native.Milestone.STAGED)

    def checksums(self) -> bytes:
        """Waits until all blocks are written; returns their checksums (none if the options disable them)."""
        assert self._job is not None
        self._job.close_input()
        self._wait(self._job, native.Milestone.WRITTEN)
        return bytes(self._job.block_checksums()) if self._engine.options.checksums else b""

    def finish(self, footer: bytes) -> None:
        """Writes the footer after all buffers; returns when the file is durable."""
        assert self._job is not None
        self._engine.native.finish(job=self._job, footer=footer, offset=self._end)
        self._wait(self._job, native.Milestone.DURABLE)

    def remove(self) -> None:
        """Cancels the file, waits until nothing is in flight, and removes it."""
        if self._job is not None:
            self._job.cancel("the conversion was abandoned")
            self._engine.remove(self._job)
            self._job = None

    def _wait(self, job: native.SaveJob, *milestones: native.Milestone) -> None:
        for milestone in milestones:
            while not job.wait(milestone, native.SLICE_SECONDS):
                pass
        error = job.status()["error"]
        if error is not None:
            raise native.error_of(error)
