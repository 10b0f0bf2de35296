"""Draws results of benchmarks.load; `python -m benchmarks.load.picture RESULTS PICTURE` does it again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from benchmarks.command import Result
from benchmarks.picture import LIMIT, OTHERS, OURS, draw_rates, put_legend_below, run_picture, save_figure


def draw(results: Result, picture: Path) -> None:
    """Draws the rates of both formats by sharding, and the disk's best; nothing if no loads were measured."""
    part = results.get("loads")
    if part is None:
        return
    figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    rates, best = part["gb_per_s"], part["best_of_the_disk"]
    cases = list(dict.fromkeys(name.rpartition(", ")[0] for name in rates if ", " in name))[::-1]
    for place, (backend, colour) in enumerate((("torch_dist", OTHERS), ("datastates", OURS))):
        names = [f"{case}, {backend}" for case in cases]
        places = np.arange(len(cases)) + 0.4 * place
        draw_rates(axes, names, part, places.tolist(), height=0.38, color=colour, label=backend)
    axes.axvline(rates[best], ls="--", color=LIMIT, label=f"fio, {best}")
    axes.set_yticks(np.arange(len(cases)) + 0.2, cases)
    axes.set_xlabel("GB/s, all ranks together")
    axes.set_title(f"Loading {part['bytes'][f'{cases[-1]}, datastates'] / 2**30:.1f} GiB, caches dropped")
    put_legend_below(axes)
    save_figure(figure, results["machine"], picture)


if __name__ == "__main__":
    run_picture(draw)
