"""What the benchmarks' pictures share: colours, rate bars, saving a figure, the command that redraws."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.command import PATH, Result, benchmark_command

OURS, OTHERS, LIMIT = "#1f6f8b", "#b8b8b8", "#c0392b"
_ERROR_STYLE = {"lw": 0.8, "alpha": 0.6}


def set_svg_style() -> None:
    """The same results make the same file; text stays text, for searches, and takes half the bytes."""
    mpl.rcParams["svg.hashsalt"] = "datastates"
    mpl.rcParams["svg.fonttype"] = "none"


def draw_rates(axes: Axes, names: Sequence[str], part: Result, places: Sequence[float], **style: Any) -> None:
    """Draws one horizontal bar for each named rate of a part, with the whole spread of its rounds."""
    rates, ends = part["gb_per_s"], part["spread_gb_per_s"]
    errors = [  # rates and spreads are rounded differently
        [max(rates[name] - ends[name][0], 0) for name in names],
        [max(ends[name][1] - rates[name], 0) for name in names],
    ]
    axes.barh(places, [rates[name] for name in names], xerr=errors, error_kw=_ERROR_STYLE, **style)


def put_legend_below(axes: Axes) -> None:
    """Puts the legend where it hides no bar, below the name of the horizontal axis."""
    count = len(axes.get_legend_handles_labels()[1])
    axes.legend(
        frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=count, borderpad=0
    )


def save_figure(figure: Figure, machine: Result, picture: Path) -> None:
    """Writes the figure with the machine as its title."""
    set_svg_style()
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores", fontsize=9)
    figure.savefig(picture, metadata={"Date": None})


def run_picture(draw: Callable[[Result, Path], None]) -> None:
    """Runs a command line that redraws the picture of a results' file."""

    @benchmark_command
    @click.argument("results", type=PATH, help="A file that the benchmark's --out wrote.")
    @click.argument("picture", type=PATH, help="Where to draw; the suffix sets the format.")
    def command(results: Path, picture: Path) -> None:
        """Draws the picture of RESULTS again."""
        draw(json.loads(results.read_text()), picture)

    command()
