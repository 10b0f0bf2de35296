"""Draws the simulation; `python -m benchmarks.near_simulation.picture RESULTS PICTURE` does it again."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt

from benchmarks.command import Result
from benchmarks.picture import LIMIT, OTHERS, OURS, run_picture, set_svg_style

_COLOURS = (LIMIT, OTHERS, OURS)  # by the order of strategies
_TIERS = {"near": OURS, "copies": "#7fb3c4", "far": LIMIT}


def draw(results: Result, picture: Path) -> None:
    """Draws lost work over the rate of shared storage, and which tier restores."""
    set_svg_style()
    figure, (lost, tiers) = plt.subplots(1, 2, figsize=(10, 3.2), width_ratios=(3, 2), layout="constrained")
    names = list(results["rates"][0]["strategies"])
    rates = [rate["far_gb_per_s"] for rate in results["rates"]]
    for name, colour in zip(names, _COLOURS, strict=True):
        values = [rate["strategies"][name]["lost_minutes_a_day"] for rate in results["rates"]]
        lost.plot(rates, values, marker="o", color=colour, label=name)
    lost.set(xscale="log", yscale="log", xlabel="shared storage, GB/s", ylabel="minutes a day")
    lost.set_xticks(rates, [f"{rate:g}" for rate in rates])
    lost.set_title("Work that is lost", fontsize=9)
    lost.legend(fontsize=7)
    base = [0.0] * len(names)
    for tier, colour in _TIERS.items():
        shares = [100 * results["rates"][0]["strategies"][name][tier] for name in names]
        label = {"near": "near tiers", "copies": "near tiers and copies", "far": "shared storage"}[tier]
        tiers.barh(names, shares, left=base, color=colour, label=label)
        base = [left + share for left, share in zip(base, shares, strict=True)]
    tiers.set(xlabel="% of failures", xlim=(0, 100))
    tiers.tick_params(axis="y", labelsize=7)
    tiers.invert_yaxis()
    tiers.set_title("What a failed job resumes from", fontsize=9)
    figure.legend(*tiers.get_legend_handles_labels(), fontsize=7, loc="outside lower right", ncols=3)
    figure.suptitle(
        f"Simulated: {results['nodes']:,} nodes, {results['failures_a_day']:.1f} failures a day", fontsize=9
    )
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    run_picture(draw)
