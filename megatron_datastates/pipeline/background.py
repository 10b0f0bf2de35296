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
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
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
        function, self._function = self._function, None  # what it refers to goes when it ends
        try:
            assert function is not None
            function()
        finally:
            del function
            self._ended.set()
