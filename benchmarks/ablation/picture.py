"""Draws results of benchmarks.ablation.

`python -m benchmarks.ablation.picture RESULTS PICTURE` does it again.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.command import Result
from benchmarks.picture import LIMIT, OTHERS, OURS, put_legend_below, run_picture, save_figure

_TITLES = {
    "overlap": "Objects and large tensors",
    "coalescing": "Tiny tensors",
    "lazy": "An iteration that saves",
}
_BARS = (
    ("iteration_ms", OTHERS, "iteration"),
    ("durable_ms", OURS, "durable"),
    ("held_ms", LIMIT, "trainer held"),
)


def draw_part(axes: Axes, name: str, part: Result) -> None:
    """Draws the times of each contender as bars; the best is ours and on top."""
    contenders = dict(reversed(part["contenders"].items()))
    bars = [bar for bar in _BARS if any(bar[0] in figures for figures in contenders.values())]
    height = 0.8 / len(bars)
    for row, (figure, colour, label) in enumerate(bars):
        places = [place - row * height for place in range(len(contenders))]
        values = [figures.get(figure, 0) for figures in contenders.values()]
        drawn = axes.barh(places, values, height, color=colour, label=label)
        axes.bar_label(drawn, [f"{value:.0f}" if value else "" for value in values], padding=2, fontsize=7)
    axes.set_yticks([place - 0.4 + height / 2 for place in range(len(contenders))], list(contenders))
    axes.set_xlabel("ms")
    axes.margins(x=0.12)
    axes.set_title(_TITLES[name])
    put_legend_below(axes)


def draw(results: Result, picture: Path) -> None:
    """Draws a panel for each part that was measured."""
    parts = [part for part in _TITLES if part in results]
    size = (6.2 * len(parts), 3.0)
    figure, axes = plt.subplots(1, len(parts), figsize=size, layout="constrained", squeeze=False)
    for part, place in zip(parts, axes[0], strict=True):
        draw_part(place, part, results[part])
    save_figure(figure, results["machine"], picture)


if __name__ == "__main__":
    run_picture(draw)
