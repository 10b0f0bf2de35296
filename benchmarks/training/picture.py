"""Draws results of benchmarks.training; `python -m benchmarks.training.picture RESULTS PICTURE` redraws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.command import Result
from benchmarks.picture import LIMIT, run_picture, save_figure

_STYLES = {
    "torch_dist": ("#b8b8b8", "s"),
    "torch_dist async": ("#7a7a7a", "s"),
    "datastates": ("#7fb3c4", "o"),
    "datastates async": ("#1f6f8b", "o"),
}
_OF_LIMITS = (":", "-.", "--")  # lines of runs whose writing is limited, the fastest first


def draw(results: Result, picture: Path) -> None:
    """Draws a row of two panels for each part: end-to-end time and blocked time, by interval."""
    parts = {name: part for name, part in results["parts"].items() if "cases" in part}
    if not parts:
        return
    figure, axes = plt.subplots(
        len(parts), 2, figsize=(9, 3.2 * len(parts)), layout="constrained", squeeze=False
    )
    for (name, part), (left, right) in zip(parts.items(), axes, strict=True):
        base = next(one for one in part["cases"].values() if one["format"] == "none")
        left.axhline(base["end_to_end_s"], ls="--", color=LIMIT, label="no checkpoints")
        _lines(left, part, "end_to_end_s")
        _lines(right, part, "blocked_ms_per_save")
        left.set_title(f"{name}: {part['iterations']} iterations, end to end", fontsize=9)
        left.set_ylabel("s")
        right.set_title("trainer blocked by a save", fontsize=9)
        right.set(yscale="log", ylabel="ms")
        left.legend(frameon=False, fontsize=7)
    save_figure(figure, results["machine"], picture)


def _lines(axes: Axes, part: Result, value: str) -> None:
    cases = [one for one in part["cases"].values() if "saves" in one]
    limits = sorted({one["write_limit"] for one in cases if one["write_limit"]}, reverse=True)
    for kind, limit in dict.fromkeys((one["format"], one["write_limit"]) for one in cases):
        found = [one for one in cases if (one["format"], one["write_limit"]) == (kind, limit)]
        colour, marker = _STYLES[kind]
        label = f"{kind}, at most {limit / 1e6:.0f} MB/s" if limit else kind
        places = [one["interval"] for one in found]
        line = _OF_LIMITS[limits.index(limit) % len(_OF_LIMITS)] if limit else "-"
        style: Any = {"ls": line, "color": colour, "marker": marker}
        axes.plot(places, [one[value] for one in found], label=label, **style)
    axes.set_xlabel("iterations between saves")


if __name__ == "__main__":
    run_picture(draw)
