"""Draws results of benchmarks.scale; `python -m benchmarks.scale.picture RESULTS PICTURE` does it again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from benchmarks.command import Result
from benchmarks.picture import LIMIT, OURS, run_picture, save_figure

MIB = 1 / (1 << 20)
COLOURS = (OURS, "#d08c2f", "#7a5195", "#4c9a5b")
STYLES = (("-", "o"), ("--", "s"))  # line and marker, by the order of a panel's lines


@dataclasses.dataclass(frozen=True)
class Line:
    """One fact of one measure, over the number of ranks."""

    label: str
    measure: str
    fact: str
    scale: float = 1.0

    def points(self, layouts: list[Result]) -> tuple[list[int], list[float]]:
        """Returns numbers of ranks and values; a layout without the fact has none."""
        found = {layout["ranks"]: layout[self.measure].get(self.fact) for layout in layouts}
        known = sorted((ranks, value * self.scale) for ranks, value in found.items() if value)
        return [ranks for ranks, _ in known], [value for _, value in known]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One diagram: lines of one unit, and the bar that they should stay below."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    bar: float | None = None


PANELS = (
    Panel("Planning a rank's file", "ms", (Line("largest rank", "plan", "largest_rank_ms"),)),
    Panel(
        "Index",
        "MiB",
        (
            Line("of the checkpoint", "commit", "merged_index_bytes", MIB),
            Line("largest rank's own", "plan", "largest_index_bytes", MIB),
        ),
    ),
    Panel(
        "Publishing on rank 0",
        "s",
        (
            Line("layout known", "commit", "cached_seconds"),
            Line("merge of a new layout", "commit", "merge_seconds"),
        ),
        bar=2,
    ),
    Panel(
        "One rank's load, up to its plan",
        "s",
        (Line("as saved", "load", "seconds"), Line("TP doubled, no optimizer", "reshard", "seconds")),
        bar=1,
    ),
    Panel(
        "Resident memory, growth at its peak",
        "MiB",
        (Line("one rank's load", "load", "peak_mib"), Line("rank 0's merge", "commit", "first_peak_mib")),
        bar=300,
    ),
)


def _draw_panel(axes: Axes, panel: Panel, curves: dict[str, list[Result]]) -> None:
    for line, (style, marker) in zip(panel.lines, STYLES, strict=False):
        for layouts, colour in zip(curves.values(), COLOURS, strict=False):
            axes.plot(*line.points(layouts), style, marker=marker, ms=4, color=colour)
        axes.plot([], [], style, marker=marker, ms=4, color="#555555", label=line.label)
    if panel.bar is not None:
        axes.axhline(panel.bar, color=LIMIT, ls=":", label=f"bar: {panel.bar:g} {panel.unit}")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=panel.unit, title=panel.title)
    ranks = sorted({layout["ranks"] for layouts in curves.values() for layout in layouts})
    axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.legend(frameon=False, fontsize=8)


def draw(results: Result, picture: Path) -> None:
    """Draws a panel for each kind of figure, and in it a line for each model."""
    curves: dict[str, list[Result]] = {}
    for name, layout in results["layouts"].items():
        curves.setdefault(layout["curve"] or name, []).append(layout)
    figure, places = plt.subplots(2, 3, figsize=(14, 7.5), layout="constrained")
    for panel, axes in zip(PANELS, places.flat, strict=False):
        _draw_panel(axes, panel, curves)
    places.flat[-1].axis("off")
    for name, colour in zip(curves, COLOURS, strict=False):
        places.flat[-1].plot([], [], "o-", color=colour, label=name)
    places.flat[-1].legend(frameon=False, loc="center")
    save_figure(figure, results["machine"], picture)


if __name__ == "__main__":
    run_picture(draw)
