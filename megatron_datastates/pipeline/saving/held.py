"""How long a save holds the trainer: all of save_checkpoint, polls, fence and finalize.

Intervals may be nested; only the outermost counts towards the total, each counts towards its own part.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol


class Holder(Protocol):
    """A save that intervals are charged to."""

    held: HeldTime

    def on_trainer_released(self) -> None:
        """Does what has waited for the trainer's release; called when the outermost interval has ended."""
        ...


_MOST_SPANS = 64  # a save that is polled for minutes has many; its report stays short


class HeldTime:
    """The seconds for which a save held the trainer, in total and by part, and the first spans of time."""

    def __init__(self) -> None:
        self.total = 0.0
        self.parts: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []  # part, begin and end by perf_counter; outermost only

    def add(self, part: str, seconds: float, *, to_total: bool = True) -> None:
        """Adds the last `seconds` to a part, and to the total unless they belong to a nested interval."""
        self.parts[part] = self.parts.get(part, 0.0) + seconds
        if to_total:
            self.total += seconds
            if len(self.spans) < _MOST_SPANS:
                now = time.perf_counter()
                self.spans.append((part, now - seconds, now))


class trainer_held:
    """Measures a block in which the trainer waits for a save.

    Attributes:
        outer: the interval that this one is within.
        parts: nested blocks that ended before there was a holder.
        within: the holders of nested intervals that have ended.
    """

    def __init__(self, part: str, holder: Holder | None = None) -> None:
        self.holder = holder
        self.outer: trainer_held | None = None
        self.parts: list[tuple[str, float]] = []
        self.within: list[Holder] = []
        self._part = part
        self._begin = 0.0

    def __enter__(self) -> None:
        self.outer = _open.innermost()
        self._begin = time.perf_counter()
        _open.innermost = weakref.ref(self)

    def __exit__(self, *error: object) -> None:
        outer, holder = self.outer, self.holder
        _open.innermost = _no_interval if outer is None else weakref.ref(outer)
        seconds = time.perf_counter() - self._begin
        if holder is not None:
            holder.held.add(self._part, seconds, to_total=outer is None)
            self.within.append(holder)
        elif outer is not None:
            outer.parts += [(self._part, seconds), *self.parts]
        if outer is not None:
            outer.within += self.within
            return
        for each in dict.fromkeys(self.within):  # also a save that began while another one held the trainer
            each.on_trainer_released()


def _no_interval() -> None:
    return None


class _Open(threading.local):
    """The open intervals of a thread: programs may save on several.

    The innermost one is referred to weakly: an interrupt may end a block whose end is then not noted.
    """

    def __init__(self) -> None:
        self.innermost: Callable[[], trainer_held | None] = _no_interval


_open = _Open()


def charge_open_intervals(holder: Holder) -> bool:
    """Charges `holder` with the open intervals that have no holder yet; returns whether there are any."""
    unclaimed: list[trainer_held] = []
    interval = _open.innermost()
    while interval is not None:
        if interval.holder is None:
            unclaimed.insert(0, interval)
        interval = interval.outer
    for interval in unclaimed:
        interval.holder = holder
        for part, seconds in interval.parts:
            holder.held.add(part, seconds, to_total=False)
    return bool(unclaimed)
