"""How much memory and how many threads a conversion may use, and how it divides them."""

from __future__ import annotations

import dataclasses
import os

from megatron_datastates.config import GIB, MIB
from megatron_datastates.errors import OptionError

_MOST_STAGING_BYTES = 256 * MIB
_MOST_WINDOW_BYTES = 64 * MIB
_LEAST_WORKER_BYTES = 64 * MIB  # a window, a second one to verify, and a reader's own memory
_LEAST_STAGING_BYTES = 2 * MIB
_READER_BYTES = 16 * MIB
LEAST_MEMORY_BYTES = _LEAST_WORKER_BYTES + _LEAST_STAGING_BYTES


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a conversion may use in each process.

    Raises:
        OptionError: the memory is too small for one worker, or `workers` is negative.
    """

    memory_bytes: int = 2 * GIB
    workers: int = 0  # 0: one per CPU core, as far as the memory allows

    def __post_init__(self) -> None:
        if self.memory_bytes < LEAST_MEMORY_BYTES:
            least = f"{LEAST_MEMORY_BYTES // MIB}MiB"
            raise OptionError(f"a conversion needs at least {least} of memory, not {self.memory_bytes} B")
        if self.workers < 0:
            raise OptionError(f"{self.workers} workers: expected 1 or more, or 0 for one per CPU core")

    @property
    def staging_bytes(self) -> int:
        return min(max(self.memory_bytes // 8, _LEAST_STAGING_BYTES), _MOST_STAGING_BYTES)

    def worker_count(self, files: int) -> int:
        """Returns how many threads share the work on `files` files: at least one."""
        affordable = (self.memory_bytes - self.staging_bytes) // _LEAST_WORKER_BYTES
        return max(1, min(self.workers or os.cpu_count() or 1, files, affordable))

    def window_bytes(self, files: int) -> int:
        """Returns the size of one worker's window. A worker that verifies has two windows."""
        each = (self.memory_bytes - self.staging_bytes) // self.worker_count(files)
        return min((each - 2 * _READER_BYTES) // 2 // MIB * MIB, _MOST_WINDOW_BYTES)
