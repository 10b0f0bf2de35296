"""The tail of a data file: entries of unknown size, appended after the tensors while those are being copied.

Belongs here: bringing bytes into slots chunk by chunk. Does not belong here: what the bytes mean.

Invariant: at most two chunks are in host memory besides the slots. A full one is appended to the native job,
which takes a slot for it; the next is filled meanwhile, and is appended once the first is in its slot. So the
producer of the bytes waits for slots, and slots wait for nothing but their own writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_datastates.engine import native
from megatron_datastates.format.values import ALIGNMENT, SMALL_ALIGNMENT
from megatron_datastates.plan.layout import align_up

_MOST_CHUNK_BYTES = 4 << 20


def contiguous_copies(
    addresses: npt.ArrayLike, sizes: npt.ArrayLike, offsets: npt.ArrayLike, flag: int = 0
) -> dict[str, Any]:
    """Returns arguments of `start` and `append`: copies from host memory, each in one piece."""
    sources, rows, places = (np.asarray(column, np.uint64) for column in (addresses, sizes, offsets))
    columns = {"sources": sources, "bytes": rows, "offsets": places, "row_bytes": rows, "row_steps": rows}
    return columns | {"storages": np.zeros_like(rows), "flags": np.full(len(rows), flag, np.uint8)}


class TailWriter:
    """Writes the tail of one data file. Used by one thread at a time.

    Args:
        begin: where the tail begins in the file; a multiple of 4096.
        slot_bytes: a chunk is one slot, or 4 MiB if slots are larger.
        raise_failure: raises the error of a save that has failed.
    """

    def __init__(
        self,
        engine: native.Engine,
        job: native.SaveJob,
        begin: int,
        slot_bytes: int,
        raise_failure: Callable[[], None],
    ) -> None:
        self._engine, self._job, self._raise_failure = engine, job, raise_failure
        self._chunk_bytes = min(slot_bytes, _MOST_CHUNK_BYTES)
        self._chunk_at = begin  # in the file
        self._filled = 0  # bytes of the chunk
        self._chunk: npt.NDArray[np.uint8] | None = None
        self._appended: npt.NDArray[np.uint8] | None = None  # may still be read by the engine
        self.deadline: float | None = None  # of time.monotonic; the save fails if a slot comes later

    @property
    def position(self) -> int:
        """Where the next byte goes in the file."""
        return self._chunk_at + self._filled

    def begin_entry(self) -> int:
        """Returns where the next entry begins: at the next multiple of 64, after zeros."""
        self.write(bytes(align_up(self.position, SMALL_ALIGNMENT) - self.position))
        return self.position

    def write(self, data: Any) -> int:
        """Appends a buffer, which may change afterwards; returns its size. Waits for slots.

        Raises:
            FailedCallError: the save has failed.
        """
        source = memoryview(data)
        if source.nbytes == 0:
            return 0
        view = np.frombuffer(source.cast("B"), np.uint8)
        at = 0
        while at < len(view):
            if self._chunk is None:
                self._chunk = np.empty(self._chunk_bytes, np.uint8)
            part = min(len(view) - at, self._chunk_bytes - self._filled)
            self._chunk[self._filled : self._filled + part] = view[at : at + part]
            self._filled += part
            at += part
            if self._filled == self._chunk_bytes:
                self._append(self._chunk_bytes)
        return len(view)

    def close(self) -> int:
        """Appends what is left, padded with zeros; returns the end of the data, a multiple of 4096."""
        if self._filled:
            end = align_up(self._filled, ALIGNMENT)
            self.write(bytes(end - self._filled))
        if self._filled:
            self._append(self._filled)
        self._job.close_input()
        self._await_slot()
        self._chunk = self._appended = None
        return self._chunk_at

    def _append(self, size: int) -> None:
        assert self._chunk is not None
        self._await_slot()
        self._engine.append(
            job=self._job,
            begin=self._chunk_at,
            end=self._chunk_at + size,
            **contiguous_copies([self._chunk.ctypes.data], [size], [self._chunk_at]),
        )
        self._chunk, self._appended = self._appended, self._chunk
        self._chunk_at += size
        self._filled = 0

    def _await_slot(self) -> None:
        """Waits until the chunk appended last is in a slot, so that its memory can be filled again."""
        while not self._job.wait(native.Milestone.APPENDED, native.SLICE_SECONDS):
            if self.deadline is not None and time.monotonic() > self.deadline:
                self._job.cancel(
                    "no staging memory became free in time for objects that may change at once: raise "
                    "--datastates-staging-memory or --datastates-fence-deadline"
                )
        self._raise_failure()
