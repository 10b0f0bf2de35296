"""Flags that threads wait for, safe against a trainer whose signal handlers raise exceptions.

threading.Event guards itself with a lock. A signal handler that raises (Ctrl-C, SystemExit at a SIGTERM) in
the middle of its `set` or `wait` may leave that lock held, and then the next call waits forever. So whatever
the trainer's thread sets or waits for is a Flag.
"""

from __future__ import annotations

import contextlib
import threading
import time

# For which a waiter may miss that the flag is set, if `set` was interrupted before it released that waiter.
_SLICE_SECONDS = 0.1


class Flag:
    """A flag that is set once, and never cleared. Thread-safe, also in signal handlers and forked children.

    It has no lock of its own. Each waiter adds one, which it holds itself and which `set` releases.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Lock] = []  # changed by atomic operations only

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Sets the flag, and releases its waiters. Once more does no harm."""
        self._is_set = True  # first: whoever adds itself from now on looks afterwards, and does not wait
        for waiter in tuple(self._waiters):
            with contextlib.suppress(RuntimeError):  # it is released already
                waiter.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the flag is set, at most `seconds` if given; returns whether it is."""
        if self._is_set or (seconds is not None and seconds <= 0.0):
            return self._is_set
        deadline = None if seconds is None else time.monotonic() + seconds
        waiter = threading.Lock()
        waiter.acquire()
        try:
            self._waiters.append(waiter)
            while not self._is_set:
                left = _SLICE_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0.0:
                    break
                waiter.acquire(timeout=min(left, _SLICE_SECONDS))
        finally:
            with contextlib.suppress(ValueError):  # it was interrupted before it was added
                self._waiters.remove(waiter)
        return self._is_set
