"""When a save's background work begins: its lazy copies, and its finishing thread.

They begin at the first poll or fence, or some time after the call that saves has returned, whichever comes
first. Right after `save_checkpoint`, Megatron's timers synchronize the device, and would wait for everything
enqueued by then; on the host, its collective calls wait for a core and its log lines for the GIL. That cost
4 to 6 ms of 15 on 2 cores. What precedes the last eager chunk, such as the header, is never postponed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron_datastates.engine.staging import FileSave
from megatron_datastates.flag import Flag
from megatron_datastates.pipeline.saving.background import AFTER_POLL_SECONDS, COPIES_AFTER_POLL_SECONDS
from megatron_datastates.pipeline.saving.held import HeldTime
from megatron_datastates.pipeline.saving.stable import StableFile

_WAIT_SECONDS = 0.1
_HELD_SECONDS = 60.0  # longer than a call that saves holds the trainer


class Postponement:
    """When the background work of one save begins. On the trainer's thread, but for `end` and `wait`.

    Args:
        files: of the save, as far as they are begun.
        held: what the time from the return of the call that saves until the first poll is charged to.
        lazy_delay: seconds from that return after which work begins by itself.

    Attributes:
        is_awaited: the trainer does nothing but wait for this save, from its start or from some time on.
    """

    def __init__(
        self, files: Sequence[FileSave | StableFile], held: HeldTime, lazy_delay: float, is_awaited: bool
    ) -> None:
        self.is_awaited = is_awaited
        self._files, self._held, self._lazy_delay = files, held, 0.0 if is_awaited else lazy_delay
        self._in_interval = False  # that return will end an interval (held.py): work is not due before
        self._released_at: float | None = None  # from the return of the call until the next poll or fence
        self._begins_by = 0.0  # by time.monotonic: when the finishing thread begins without a poll or fence
        self._pause = 0.0  # seconds that pass before it does so at a poll
        self._is_polled = False  # which begins the copies
        self._ended = Flag()  # by the first poll or fence: work may begin beside the trainer

    @property
    def delay(self) -> float:
        """Returns the seconds after which copies that are asked for now begin by themselves."""
        if self._ended.is_set():
            return 0.0
        return _HELD_SECONDS if self._in_interval else self._lazy_delay

    def note_interval(self) -> None:
        """Notes that the return of the call that saves ends an interval, and so calls `release`."""
        self._in_interval = True

    def begin(self) -> None:
        """Notes that the save begins."""
        self._begins_by = time.monotonic() + self.delay

    def release(self) -> None:
        """Notes that the trainer resumes: after the call that saves, work begins in `lazy_delay` seconds."""
        if self._in_interval:
            self._in_interval = False
            self._released_at = time.perf_counter()
            self._begins_by = time.monotonic() + self._lazy_delay
            for file in self._files:
                file.allow_lazy_copies(self._lazy_delay)

    def charge(self) -> None:
        """Charges the time since the call that saves returned, at a poll."""
        # Megatron polls at the top of its next iteration. The save makes it wait for what comes before that:
        # timers that synchronize the device, and a barrier.
        if self._released_at is not None and "save_checkpoint" in self._held.parts:
            self._held.add("until_poll", time.perf_counter() - self._released_at)
        self._released_at = None

    def end_at_poll(self, *, is_awaited: bool = False) -> None:
        """Lets work begin: at once if the trainer does nothing but wait for it, else a little later."""
        is_awaited |= self.is_awaited
        self.charge()
        if not self._is_polled:
            self._is_polled = True
            for file in self._files:
                file.allow_lazy_copies(0.0 if is_awaited else COPIES_AFTER_POLL_SECONDS, hurries=is_awaited)
        if not self._ended.is_set():
            self._pause = 0.0 if is_awaited else AFTER_POLL_SECONDS
            self._ended.set()

    def end_at_fence(self) -> None:
        """Lets work begin. What led to the fence is charged to no save."""
        self._released_at = None
        self.end()

    def end(self) -> None:
        """Lets the finishing thread begin. Copies begin at a fence, the first poll or the call's return."""
        self._ended.set()

    def wait(self) -> None:
        """Waits, as lazy copies do, until the trainer has returned to its work. On the finishing thread.

        What it does until its next poll counts as held, and needs the GIL, or a core for another thread.
        """
        while (left := self._begins_by - time.monotonic()) > 0.0:
            if self._ended.wait(min(left, _WAIT_SECONDS)):
                time.sleep(self._pause)
                return
