"""Runs that save in every iteration for a while, then not at all, in turns: what saves cost, in one process.

Whole runs differ from each other by more than our asynchronous saves cost. Blocks of iterations in one run
share all that makes runs differ: memory, caches, the machine's speed that minute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.command import Result, notes
from benchmarks.rounds import median, within
from benchmarks.training.measures import Rounds
from benchmarks.training.runs import Case, Model, Setting, Span, checkpoint_bytes, outermost, run_ranks

_CASE = Case("datastates async", 1)
_BLOCK = 6  # iterations
_UNCOUNTED = 2  # first ones of each block: the last block's saves may still be written, or not yet
_BLOCKS = 13  # the first, the last, and every other one without saves


def measure_turns(models: dict[str, Model], rounds: Rounds, folder: Path, *, is_quick: bool) -> Result:
    """Measures our asynchronous saves beside iterations without saves, for each of the models."""
    blocks = 3 if is_quick else _BLOCKS
    turns: dict[str, list[Result]] = {name: [] for name in models}
    for number in within(rounds.most, rounds.seconds):
        for name, model in models.items():
            with notes.status(f"round {number + 1}: {name}"):
                turns[name].append(_run(Setting(model, 1, _BLOCK * blocks + 1, 0), blocks, folder))
    described = {
        name: {"layers": one.layers, "hidden": one.hidden, "sequence": one.sequence}
        for name, one in models.items()
    }
    return {
        "date": time.strftime("%Y-%m-%d"),
        "rounds": len(next(iter(turns.values()))),
        "turns": {name: described[name] | summary(runs) for name, runs in turns.items()},
    }


def _run(setting: Setting, blocks: int, folder: Path) -> Result:
    with run_ranks(setting, _CASE, folder, save_blocks=_BLOCK) as records:
        size, saves = checkpoint_bytes(folder / "checkpoints")
    expected = _BLOCK * (blocks // 2) + 1  # after the last block, one ends the run
    if saves != expected:
        raise RuntimeError(f"expected {expected} complete checkpoints, found {saves}")
    return measure_blocks(records[0]) | {"checkpoint_bytes": size}


def measure_blocks(spans: dict[str, list[Span]], block: int = _BLOCK, uncounted: int = _UNCOUNTED) -> Result:
    """Returns mean iterations of each block without and with saves, in s, and what a save blocked, in s."""
    begins = [begin for begin, _ in spans["step"]]
    iterations = [after - before for before, after in pairwise(begins)]
    means = [
        statistics.mean(iterations[at + uncounted : at + block]) for at in range(0, len(iterations), block)
    ]
    first, counted = spans["save"][0], [span for span in spans["save"] if span[0] < begins[-1]]
    holding = [span for name in ("save", "poll", "fence") for span in outermost(spans, name)]
    blocked = sum(b - a for a, b in holding if first[1] <= a < begins[-1])
    return {
        "without_s": means[::2],
        "with_s": means[1::2],
        "blocked_s": blocked / (len(counted) - 1),
    }


def summary(runs: Sequence[Result]) -> Result:
    """Returns medians over all blocks with saves; each is compared with the two blocks beside it."""
    ratios, costs = [], []
    for run in runs:
        for saving, (before, after) in zip(run["with_s"], pairwise(run["without_s"]), strict=True):
            ratios.append(saving / ((before + after) / 2))
            costs.append(saving - (before + after) / 2)
    quarters = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "blocks": len(ratios),
        "checkpoint_bytes": runs[-1]["checkpoint_bytes"],
        "iteration_ms": round(1e3 * median([one for run in runs for one in run["without_s"]]), 1),
        "blocked_ms": round(1e3 * median([run["blocked_s"] for run in runs]), 2),
        "cost_ms": round(1e3 * median(costs), 1),
        "ratio": round(median(ratios), 4),
        "quartiles": [round(quarters[0], 4), round(quarters[2], 4)],
    }
