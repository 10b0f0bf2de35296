"""What reading from an open checkpoint costs: bytes and seconds, for the report of a load."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Literal


@dataclasses.dataclass
class ReadCosts:
    """What reading from an open checkpoint has cost so far."""

    bytes: int = 0  # delivered to targets
    bytes_read: int = 0  # from data files, padding of blocks included
    opening: float = 0.0  # seconds: manifest, the index's directory and footers
    planning: float = 0.0  # seconds: finding out which bytes of which files are needed
    reading: float = 0.0  # seconds: reading, checking and delivering data

    @contextlib.contextmanager
    def timing(self, part: Literal["opening", "planning", "reading"]) -> Iterator[None]:
        """Adds the seconds that the block takes to a part. Blocks of different parts must not be nested."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - begin)

    def seconds(self) -> dict[str, float]:
        """Returns the times, by part."""
        return {"opening": self.opening, "planning": self.planning, "reading": self.reading}

    def since(self, before: ReadCosts) -> ReadCosts:
        """Returns what has been added since `before`, a copy of an earlier state."""
        parts = zip(dataclasses.astuple(self), dataclasses.astuple(before), strict=True)
        return ReadCosts(*(now - then for now, then in parts))
