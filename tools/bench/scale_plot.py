"""Draws the results of scale.py. Example: scale_plot.py RESULTS.json PICTURE.svg."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from plot import LIMIT, OURS, save

Result = dict[str, Any]
MIB = 1 / (1 << 20)
COLOURS = (OURS, "#d08c2f", "#7a5195", "#4c9a5b")
STYLES = (("-", "o"), ("--", "s"))  # of a panel's lines


@dataclasses.dataclass(frozen=True)
class Line:
    """One fact of one measure over the number of ranks."""

    label: str
    measure: str
    fact: str
    scale: float = 1.0

    def points(self, layouts: list[Result]) -> tuple[list[int], list[float]]:
        found = {of["ranks"]: of[self.measure].get(self.fact) for of in layouts}
        known = sorted((ranks, value * self.scale) for ranks, value in found.items() if value)
        return [ranks for ranks, _ in known], [value for _, value in known]


@dataclasses.dataclass(frozen=True)
class Panel:
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
        "Commit on rank 0",
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
    """A panel for each kind of figure, a colour for each model; lines join what a model costs as it grows."""
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
    save(figure, results["machine"], picture)


def main(
    results: Annotated[Path, typer.Argument(help="What scale.py --out wrote.")],
    picture: Annotated[Path, typer.Argument(help="Where to draw; the ending says in which format.")],
) -> None:
    """Draws the curves over the number of ranks."""
    draw(json.loads(results.read_text()), picture)


if __name__ == "__main__":
    typer.run(main)
