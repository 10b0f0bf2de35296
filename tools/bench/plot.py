"""Draws the results of engine.py and load.py. Example: plot.py RESULTS.json PICTURE.svg."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import numpy as np
import typer
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, OTHERS, LIMIT = "#1f6f8b", "#b8b8b8", "#c0392b"


def draw_write(axes: Axes, part: dict[str, Any]) -> None:
    """Rates as bars, with the whole spread of the rounds."""
    rates = sorted(part["gb_per_s"].items(), key=lambda item: item[1])
    names, values = [name for name, _ in rates], [rate for _, rate in rates]
    ends = [part["spread_gb_per_s"][name] for name in names]
    errors = [[v - low for v, (low, _) in zip(values, ends, strict=True)]]
    errors.append([high - v for v, (_, high) in zip(values, ends, strict=True)])
    colours = [OURS if name.startswith("datastates") else OTHERS for name in names]
    axes.barh(names, values, color=colours, xerr=errors, error_kw={"lw": 0.8, "alpha": 0.6})
    axes.set_xlabel("GB/s, start to durable")
    axes.set_title(f"Writing {part['bytes'] / 2**30:.0f} GiB, beside fio")


def draw_start(axes: Axes, part: dict[str, Any]) -> None:
    """Held time by number of runs, and the bar of 1 ms + 1 microsecond a run."""
    for kind, marker in (("tensors of 512 B", "o"), ("runs of one tensor", "s")):
        found = {
            int(m[1].replace(",", "")): v for k, v in part.items() if (m := re.match(rf"([\d,]+) {kind}", k))
        }
        axes.plot(list(found), [v["held_ms"] for v in found.values()], marker=marker, color=OURS, label=kind)
    counts = np.geomspace(10, 1e5, 50)
    axes.plot(counts, 1 + counts / 1e3, "--", color=LIMIT, label="1 ms + 1 µs each")
    axes.set(xscale="log", yscale="log", xlabel="runs", ylabel="ms")
    axes.set_title("Trainer held by starting a save")
    axes.legend(frameon=False)


def draw_sweep(axes: Axes, part: dict[str, Any]) -> None:
    """Rates for two copying threads: writing threads by slot sizes."""
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


def draw_loads(axes: Axes, part: dict[str, Any]) -> None:
    """Rates of both formats by sharding, with the whole spread of the rounds, and the disk's own."""
    rates, ends = part["gb_per_s"], part["spread_gb_per_s"]
    cases = list(dict.fromkeys(name.rpartition(", ")[0] for name in rates if ", " in name))[::-1]
    for place, (backend, colour) in enumerate((("torch_dist", OTHERS), ("datastates", OURS))):
        names = [f"{case}, {backend}" for case in cases]
        values = [rates[name] for name in names]
        errors = [
            [rates[name] - ends[name][0] for name in names],
            [ends[name][1] - rates[name] for name in names],
        ]
        heights = np.arange(len(cases)) + 0.4 * place
        style = {"lw": 0.8, "alpha": 0.6}
        axes.barh(heights, values, 0.38, color=colour, xerr=errors, error_kw=style, label=backend)
    best = part["best_of_the_disk"]
    axes.axvline(rates[best], ls="--", color=LIMIT, label=f"fio, {best}")
    axes.set_yticks(np.arange(len(cases)) + 0.2, cases)
    axes.set_xlabel("GB/s, all ranks together")
    axes.set_title(f"Loading {part['bytes'][f'{cases[-1]}, datastates'] / 2**30:.1f} GiB, caches dropped")
    axes.legend(frameon=False, fontsize=7, loc="lower right")


DRAWERS = {"write": draw_write, "start": draw_start, "sweep": draw_sweep, "loads": draw_loads}


def save(figure: Figure, machine: dict[str, Any], picture: Path) -> None:
    """Writes the picture, with the machine named; the same results make the same file."""
    mpl.rcParams["svg.hashsalt"] = "datastates"
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores", fontsize=9)
    figure.savefig(picture, metadata={"Date": None})


def main(
    results: Annotated[Path, typer.Argument(help="What engine.py or load.py --out wrote.")],
    picture: Annotated[Path, typer.Argument(help="Where to draw; the ending says in which format.")],
) -> None:
    """Draws the parts that RESULTS has, side by side."""
    found = json.loads(results.read_text())
    parts = [part for part in DRAWERS if part in found]
    figure, axes = plt.subplots(
        1, len(parts), figsize=(5.2 * len(parts), 3.4), layout="constrained", squeeze=False
    )
    for part, place in zip(parts, axes[0], strict=True):
        DRAWERS[part](place, found[part])
    save(figure, found["machine"], picture)


if __name__ == "__main__":
    typer.run(main)
