"""How long a save holds the trainer: all of save_checkpoint, polls, fence and finalize.

Intervals may be nested; only the outermost counts towards the total, each counts towards its own part.
"""

from __future__ import annotations

import threading
import time
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
    """Measures a block in which the trainer waits for a save."""

    def __init__(self, part: str, holder: Holder | None = None) -> None:
        self.holder = holder
        self.parts: list[tuple[str, float]] = []  # nested blocks that ended before there was a holder
        self._part = part
        self._begin = 0.0

    def __enter__(self) -> None:
        _open.intervals.append(self)
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        _open.intervals.pop()
        seconds = time.perf_counter() - self._begin
        if self.holder is not None:
            _charge(self.holder, self._part, seconds)
        elif _open.intervals:
            _open.intervals[-1].parts += [(self._part, seconds), *self.parts]


class _Open(threading.local):
    """The open intervals of a thread: programs may save on several."""

    def __init__(self) -> None:
        self.intervals: list[trainer_held] = []


_open = _Open()


def charge_open_intervals(holder: Holder) -> bool:
    """Charges `holder` with the open intervals that have no holder yet; returns whether there are any."""
    unclaimed = [interval for interval in _open.intervals if interval.holder is None]
    for interval in unclaimed:
        interval.holder = holder
        for part, seconds in interval.parts:
            holder.held.add(part, seconds, to_total=False)
    return bool(unclaimed)


def _charge(holder: Holder, part: str, seconds: float) -> None:
    holder.held.add(part, seconds, to_total=not _open.intervals)
    if not _open.intervals:
        holder.on_trainer_released()
