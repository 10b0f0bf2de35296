"""How long a save holds the trainer: all of save_checkpoint, polls, fence and finalize.

Spans may be nested; only the outermost counts towards the total, each counts towards its own part.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol


class Holder(Protocol):
    """A save that spans are charged to."""

    held: HeldTime

    def released(self) -> None:
        """The outermost span has ended."""
        ...


class HeldTime:
    """Seconds, in total and by part."""

    def __init__(self) -> None:
        self.total = 0.0
        self.parts: dict[str, float] = {}

    def add(self, part: str, seconds: float, *, to_total: bool = True) -> None:
        """Charges a part; of nested ones, only the outermost counts towards the total."""
        self.parts[part] = self.parts.get(part, 0.0) + seconds
        if to_total:
            self.total += seconds


class _Span:
    holder: Holder | None = None


_open_spans: list[_Span] = []


def charge_open_spans(holder: Holder) -> bool:
    """Charges `holder` with the spans that are open now and nobody's; returns whether there is one."""
    unclaimed = [span for span in _open_spans if span.holder is None]
    for span in unclaimed:
        span.holder = holder
    return bool(unclaimed)


@contextlib.contextmanager
def holding(part: str, holder: Holder | None = None) -> Iterator[None]:
    """The trainer waits for a save in here. Used on the trainer's thread alone."""
    span = _Span()
    span.holder = holder
    _open_spans.append(span)
    begin = time.perf_counter()
    try:
        yield
    finally:
        _open_spans.pop()
        if span.holder is not None:
            _charge(span.holder, part, time.perf_counter() - begin)


def _charge(holder: Holder, part: str, seconds: float) -> None:
    holder.held.add(part, seconds, to_total=not _open_spans)
    if not _open_spans:
        holder.released()
