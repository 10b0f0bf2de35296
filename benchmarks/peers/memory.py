"""The memory of processes and of all their descendants, each shared page counted once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

_PERIOD_SECONDS = 0.05


class PeakMemory:
    """Measures by how much the memory of some processes, children included, grows at most while entered.

    Pages that several of them share are divided among them (PSS), so that a forked child, or shared memory,
    counts only for what is new.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before = self._most = 0

    def __enter__(self) -> Self:
        self._before = self._most = memory_of(self._pids)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        """Bytes."""
        return self._most - self._before

    def _watch(self) -> None:
        while not self._stop.is_set():
            begin = time.monotonic()
            self._most = max(self._most, memory_of(self._pids))
            self._stop.wait(max(_PERIOD_SECONDS, 2 * (time.monotonic() - begin)))


def memory_of(pids: Sequence[int]) -> int:
    """Returns the proportional set size of processes and all their descendants, in bytes."""
    return sum(_pss(pid) + memory_of(_children(pid)) for pid in pids)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:  # the thread has ended
            continue
    return found


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
