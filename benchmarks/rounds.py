"""Comparisons in interleaved rounds, their medians and ratios, and figures with the limits set for them.

Needs only Python: benchmarks.gpu imports this on machines without this project's requirements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Bar:
    """One measured figure, and the limit that the project has set for it."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool  # else: at most

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def plain(self) -> dict[str, Any]:
        """Returns the bar as it stands in a results' file."""
        return dataclasses.asdict(self) | {"met": self.met}


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of contenders that were measured in interleaved rounds, the disk's own among them.

    Contenders that this machine cannot run have a rate of 0, and are left out of the results.
    """

    found: dict[str, list[float]]  # bytes per second of each round
    ours: frozenset[str]  # contenders that are not the disk's own

    @property
    def gb_per_s(self) -> dict[str, float]:
        """Medians by contender."""
        return {name: median(values) / 1e9 for name, values in self.found.items() if median(values)}

    @property
    def best_of_disk(self) -> str:
        """The name of the disk's fastest configuration."""
        rates = self.gb_per_s
        return max((name for name in rates if name not in self.ours), key=rates.__getitem__)

    def of_disk(self, name: str) -> float:
        """Returns the ratio of a contender's rate to the disk's best."""
        rates = self.gb_per_s
        return rates[name] / rates[self.best_of_disk]

    def plain(self) -> dict[str, Any]:
        """Returns the rates as they stand in a results' file."""
        rates = self.gb_per_s
        return {
            "gb_per_s": {name: round(rate, 3) for name, rate in rates.items()},
            "spread_gb_per_s": {name: spread([v / 1e9 for v in self.found[name]]) for name in rates},
            "best_of_the_disk": self.best_of_disk,
        }


def median(values: Sequence[float]) -> float:
    """Returns the median as a float."""
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> list[float]:
    """Returns the least and the greatest value, to four decimals."""
    return [round(min(values), 4), round(max(values), 4)]


def medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each value over samples that all have the same names."""
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def interleave(repeats: int, contenders: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Calls every contender once a round and returns their values.

    Interleaving makes drifts of the machine harm all contenders alike. One more round comes first, as a
    warm-up that does not count.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(repeats + 1):
        for name, contender in contenders.items():
            value = contender()
            if round_:
                found[name].append(value)
    return found


def within(most: int, seconds: float) -> Iterator[int]:
    """Yields numbers of rounds while there is time for another, by the longest so far; at least one."""
    deadline, longest = time.monotonic() + seconds, 0.0
    for number in range(most):
        begin = time.monotonic()
        if number and begin + longest > deadline:
            return
        yield number
        longest = max(longest, time.monotonic() - begin)


@contextlib.contextmanager
def stopwatch(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Adds the time that passes inside to `seconds[name]`."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin
