"""Draws results of benchmarks.gpu; `python -m benchmarks.gpu.picture RESULTS PICTURE` redraws.

Beside what ways to save hold the trainer for: what the bytes in flight cost a training step, from the file
gpu-h100-in-flight.json next to RESULTS.
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.command import Result
from benchmarks.picture import OTHERS, OURS, run_picture, save_figure

_IN_FLIGHT = Path(__file__).resolve().parents[1] / "results" / "gpu-h100-in-flight.json"
_WAYS = {
    "datastates": "datastates",
    "torch_dist_async_fork": "torch_dist, fork",
    "torch_dist_async_persistent": "torch_dist, worker",
    "torch_dist_async_nvrx": "torch_dist, nvrx",
}
_STEPS = {
    "disk 8 in flight": "datastates, 8 MiB in flight",
    "disk": "datastates, 32 MiB in flight",
    "bare": "torch: all copies at once",
}


def draw(results: Result, picture: Path) -> None:
    """Draws two panels: held time by way to save, and how much longer copies make a step."""
    ways = results["parts"]["megatron"]["ways"]
    steps = json.loads(_IN_FLIGHT.read_text())["steps"]["items"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
    _bars(left, {text: ways[name]["held_ms"] for name, text in _WAYS.items() if name in ways})
    left.set(xlabel="ms, of 2.1 GB by dist_checkpointing.save", title="trainer held by a save")
    _bars(right, {text: steps[name]["longer_by_ms"] for name, text in _STEPS.items()})
    right.set(xlabel="ms, of a step of 244 ms", title="step longer by, with 4.7 GB copied")
    machine = results["parts"]["machine"]
    save_figure(figure, machine | {"cpu": f"{machine['gpu']['name']}; {machine['cpu']}"}, picture)


def _bars(axes: Axes, values: dict[str, float]) -> None:
    colors = [OURS if name.startswith("datastates") else OTHERS for name in values]
    bars = axes.barh(list(values), list(values.values()), color=colors)
    axes.bar_label(bars, [f"{value:.0f}" for value in values.values()], padding=3)
    axes.title.set_fontsize(10)
    axes.tick_params(labelsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15)


if __name__ == "__main__":
    run_picture(draw)
