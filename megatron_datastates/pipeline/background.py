"""Threads for work in the background of the trainer."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable


class BackgroundThread:
    """A thread that the interpreter does not wait for when it ends, and that nobody waits for at its start.

    threading.Thread.start returns when the thread runs. The thread then has the GIL, and the trainer waits
    until it lets go of it: milliseconds, in every save.

    Args:
        after: a started thread whose end the function waits for.
    """

    def __init__(self, function: Callable[[], None], after: BackgroundThread | None = None) -> None:
        self._function: Callable[[], None] | None = function
        self._after = after
        self._ended = threading.Event()
        self._process = os.getpid()

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError if no thread can be started."""
        _thread.start_new_thread(self._run, ())

    def join(self, seconds: float | None = None) -> bool:
        """Waits until the started thread has ended; returns False if it has not after `seconds`.

        Returns at once in a forked child, where the thread does not exist.
        """
        return os.getpid() != self._process or self._ended.wait(seconds)

    def _run(self) -> None:
        after, function = self._after, self._function
        self._after = self._function = None  # a thread that has ended keeps nothing
        try:
            if after is not None:
                after.join()
            assert function is not None
            function()
        finally:
            del after, function
            self._ended.set()
