"""Draws results of benchmarks.engine; `python -m benchmarks.engine.picture RESULTS PICTURE` does it again."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.command import Result
from benchmarks.picture import LIMIT, OTHERS, OURS, draw_rates, run_picture, save_figure


def draw_write(axes: Axes, part: Result) -> None:
    """Draws the rates of writing as bars, next to those of fio."""
    rates = part["gb_per_s"]
    names = sorted(rates, key=rates.__getitem__)
    colours = [OURS if name.startswith("datastates") else OTHERS for name in names]
    draw_rates(axes, names, part, range(len(names)), color=colours)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("GB/s, start to durable")
    axes.set_title(f"Writing {part['bytes'] / 2**30:.0f} GiB, beside fio")


def draw_start(axes: Axes, part: Result) -> None:
    """Draws the time that the caller is held by the number of copies, and the bar of 1 ms + 1 µs a copy."""
    for kind, label, marker in (
        ("tensors of 512 B", "tensors of 512 B", "o"),
        ("runs of one tensor", "strided copies of one tensor", "s"),
    ):
        matches = {name: re.match(rf"([\d,]+) {kind}", name) for name in part}
        counts = {name: int(m[1].replace(",", "")) for name, m in matches.items() if m}
        held = [part[name]["held_ms"] for name in counts]
        axes.plot(list(counts.values()), held, marker=marker, color=OURS, label=label)
    copies = np.geomspace(10, 1e5, 50)
    axes.plot(copies, 1 + copies / 1e3, "--", color=LIMIT, label="1 ms + 1 µs each")
    axes.set(xscale="log", yscale="log", xlabel="copies", ylabel="ms")
    axes.set_title("Trainer held by starting a save")
    axes.legend(frameon=False)


def draw_sweep(axes: Axes, part: Result) -> None:
    """Draws the rates of two copying threads as a table of writing threads by slot sizes."""
    rates = {tuple(map(int, k.split("/"))): v for k, v in next(iter(part.values())).items()}
    writers, slots = sorted({k[1] for k in rates}), sorted({k[2] for k in rates})
    grid = np.array([[rates[2, w, s] for s in slots] for w in writers])
    axes.imshow(grid, cmap="GnBu", aspect="auto")
    axes.set_xticks(range(len(slots)), [f"{s} MiB" for s in slots])
    axes.set_yticks(range(len(writers)), [f"{w}" for w in writers])
    for (row, column), value in np.ndenumerate(grid):
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
    axes.set(xlabel="slot", ylabel="writing threads")
    axes.set_title("GB/s by threads and slots")


_PANELS = {"write": draw_write, "start": draw_start, "sweep": draw_sweep}


def draw(results: Result, picture: Path) -> None:
    """Draws a panel for each part that was measured and has one; nothing if none has."""
    parts = [part for part in _PANELS if part in results]
    if not parts:
        return
    size = (5.2 * len(parts), 3.4)
    figure, axes = plt.subplots(1, len(parts), figsize=size, layout="constrained", squeeze=False)
    for part, place in zip(parts, axes[0], strict=True):
        _PANELS[part](place, results[part])
    save_figure(figure, results["machine"], picture)


if __name__ == "__main__":
    run_picture(draw)
