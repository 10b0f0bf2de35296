"""What every part of benchmarks.gpu gets: the device, a folder, its time, and where to report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.gpu.device import Device
from benchmarks.rounds import within

Report = Callable[
    ..., None
]  # records values under the names of keyword arguments; later ones replace earlier


@dataclasses.dataclass(frozen=True)
class Part:
    """The arguments of a part."""

    device: Device
    folder: Path
    is_small: bool  # a try on the fake device
    deadline: float  # of time.monotonic(), for the last round's end
    report: Report

    def rounds(self, most: int, deadline: float | None = None) -> Iterator[int]:
        """Yields numbers of rounds while there is time for another."""
        end = self.deadline if deadline is None else deadline
        return within(most, end - time.monotonic())
