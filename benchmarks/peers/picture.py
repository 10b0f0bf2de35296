"""Draws results of benchmarks.peers; `python -m benchmarks.peers.picture RESULTS PICTURE` does it again."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks.command import Result
from benchmarks.peers.megatron import OURS
from benchmarks.picture import LIMIT, OTHERS, run_picture, save_figure
from benchmarks.picture import OURS as COLOUR_OF_OURS


def draw(results: Result, picture: Path) -> None:
    """Draws a row of three panels for each part: time held, time until durable, cold loads."""
    parts = results["parts"]
    if not parts:
        return
    figure, axes = plt.subplots(
        len(parts), 3, figsize=(14, 3.6 * len(parts)), layout="constrained", squeeze=False
    )
    for (name, part), row in zip(parts.items(), axes, strict=True):
        every = part["contenders"].items()
        found = {name: one for name, one in every if one["exact"] and one["first"]["exact"]}
        disk = {verb: part["bytes"] / 1e9 / one["gb_per_s"] for verb, one in part["disk"].items()}
        _bars(row[0], {n: one["held_ms"] for n, one in found.items()}, f"{name}: trainer held, ms", None)
        _bars(row[1], {n: one["durable_s"] for n, one in found.items()}, "durable, s", disk["write"])
        _bars(row[2], {n: one["load_s"]["cold"] for n, one in found.items()}, "cold load, s", disk["read"])
    save_figure(figure, results["machine"], picture)


def _bars(axes: Axes, values: dict[str, float], title: str, limit: float | None) -> None:
    names = list(values)[::-1]
    colours = [COLOUR_OF_OURS if name in OURS else OTHERS for name in names]
    axes.barh(range(len(names)), [values[name] for name in names], color=colours)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title(title, fontsize=9)
    if limit is not None:
        axes.axvline(limit, ls="--", color=LIMIT, label="the disk, or the memory, itself")
        axes.legend(frameon=False, fontsize=7)


if __name__ == "__main__":
    run_picture(draw)
