"""When threads work in the background of the trainer, and what it asks storage that may hang."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

from megatron_datastates.threads import BackgroundThread, Call

T = TypeVar("T")
# Delay of a thread that a poll starts. After it the trainer is done with the poll and with what Megatron does
# next; an earlier thread would take the GIL from the trainer for milliseconds.
AFTER_POLL_SECONDS = 0.01
# The delay of copies that a poll starts: they would share the cores with what Megatron does after a poll (it
# ends saves that are published, with a collective call).
COPIES_AFTER_POLL_SECONDS = 0.003
AFTER_LATE_SECONDS = 0.1  # for storage whose last answer came too late


class Answers:
    """Asks storage that may hang: the trainer waits for an answer for a while, and then does without.

    While one question hangs, none is asked, and none waited for. Where the last answer came too late, as each
    may from slow storage, the next one is waited for AFTER_LATE_SECONDS at most.
    """

    def __init__(self) -> None:
        self._asking: BackgroundThread | None = None  # the last one
        self._is_late = False

    def get(self, ask: Callable[[], T], seconds: float) -> T:
        """Returns what `ask` returns, which is called on a thread; or here, if no thread can be started.

        Raises:
            TimeoutError: it has not returned after `seconds`, or less (see above); or an earlier one hangs.
            Exception: what it raises.
        """
        if self.is_answered():
            call = Call(ask)
            thread = BackgroundThread(call.make)
            try:
                thread.start()
            except RuntimeError:
                return ask()
            self._asking = thread
            patience = min(seconds, AFTER_LATE_SECONDS) if self._is_late else seconds
            # In a forked child, which has no such thread, `join` returns at once.
            self._is_late = not (thread.join(patience) and call.done())
            if not self._is_late:
                return call.result()
        raise TimeoutError(errno.ETIMEDOUT, "no answer")

    def is_answered(self, seconds: float = 0.0) -> bool:
        """Waits until no question hangs; returns False if one still does after `seconds`."""
        return self._asking is None or self._asking.join(seconds)
