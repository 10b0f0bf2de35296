"""Comparisons in rounds, and figures beside the bars that the project has set itself."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Bar:
    """One figure beside what it should be."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool  # or at most

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"met": self.met}


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> list[float]:
    return [round(min(values), 4), round(max(values), 4)]


def in_turns(repeats: int, contenders: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Each contender once a round; the first round warms up and does not count."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(repeats + 1):
        for name, contender in contenders.items():
            value = contender()
            if round_:
                found[name].append(value)
    return found


def print_bars(bars: Sequence[Bar]) -> None:
    """A table of them."""
    table = Table("figure", "measured", "bar", "")
    for bar in bars:
        sign = ">=" if bar.at_least else "<="
        verdict = "[green]met[/]" if bar.met else "[red]not met[/]"
        table.add_row(bar.name, f"{bar.value:.3g} {bar.unit}", f"{sign} {bar.limit:g} {bar.unit}", verdict)
    Console().print(table)
