"""Runs of all cases in turns, and what is made of them: overheads, goodput, the papers' throughput."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import Result, notes
from benchmarks.rounds import median, spread, within
from benchmarks.training.runs import NONE, Case, Run, Setting, train

_BASE = Case(NONE)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How often each run is made."""

    most: int
    seconds: float  # for all of them; one round is always made


def measure_formats(
    setting: Setting, intervals: Sequence[int], rounds: Rounds, folder: Path, formats: Sequence[str]
) -> Result:
    """Measures every format at every interval, beside runs without checkpoints, in turns."""
    saving = [name for name in formats if name != NONE]
    cases = [_BASE, *(Case(name, interval) for name, interval in itertools.product(saving, intervals))]
    return _described(setting) | _measure(setting, cases, rounds, folder)


def measure_slow_disk(
    setting: Setting, intervals: Sequence[int], rounds: Rounds, folder: Path, factors: Sequence[float]
) -> Result:
    """Measures our asynchronous saves on disks that need so many iterations for a checkpoint.

    A slow disk is imitated by the engine's own limit, set by what a first run finds.
    """
    probe = train(setting, Case("datastates async", setting.warm_up), folder)
    plain = train(setting, _BASE, folder)
    rate = probe.checkpoint_bytes / setting.data_parallel / median(list(plain.iterations.values()))
    limits = {factor: int(rate / factor) for factor in factors}
    cases = [_BASE]
    for interval in intervals:
        cases.append(Case("datastates async", interval))
        cases += [Case("datastates async", interval, limit) for limit in limits.values()]
    names = {str(factor): limit for factor, limit in limits.items()}
    found = _measure(setting, cases, rounds, folder)
    return _described(setting) | {"iterations_a_write": names} | found


def measure_near_tier(
    setting: Setting, intervals: Sequence[int], rounds: Rounds, folder: Path, factor: float
) -> Result:
    """Measures a near tier before storage that needs `factor` iterations for a checkpoint.

    That storage is imitated by a limit, of the drain or of the saves that go there right away.
    """
    probe = train(setting, Case("datastates async", setting.warm_up), folder)
    plain = train(setting, _BASE, folder)
    limit = int(
        probe.checkpoint_bytes / setting.data_parallel / median(list(plain.iterations.values())) / factor
    )
    cases = [_BASE]
    for interval in intervals:
        rarely = max(setting.iterations // interval, 1)  # the last one only
        cases += [Case("datastates async", interval, limit, every) for every in (0, 1, rarely)]
    found = _measure(setting, list(dict.fromkeys(cases)), rounds, folder)
    return _described(setting) | {"iterations_a_write": {str(factor): limit}} | found


def _described(setting: Setting) -> Result:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "layers": setting.model.layers,
        "hidden": setting.model.hidden,
        "sequence": setting.model.sequence,
        "data_parallel": setting.data_parallel,
        "iterations": setting.iterations - setting.warm_up,
    }


def _measure(setting: Setting, cases: Sequence[Case], rounds: Rounds, folder: Path) -> Result:
    runs: dict[Case, list[Run]] = {case: [] for case in cases}
    for number in within(rounds.most, rounds.seconds):
        for case in cases:
            with notes.status(f"round {number + 1}: {case}"):
                runs[case].append(train(setting, case, folder))
    base = runs[_BASE]
    found = {str(case): summary(setting, case, done, base) for case, done in runs.items()}
    return {"rounds": len(base), "cases": found}


def summary(setting: Setting, case: Case, runs: Sequence[Run], base: Sequence[Run]) -> Result:
    """Returns medians over a case's runs; ratios are medians of each round's own ratio."""
    everything = [1e3 * seconds for run in runs for seconds in run.iterations.values()]
    counted = setting.iterations - setting.warm_up
    result: Result = {
        "format": case.format,
        "interval": case.interval,
        "iteration_ms": round(median(everything), 1),
        "end_to_end_s": round(median([run.seconds for run in runs]), 3),
        "spread_end_to_end_s": spread([run.seconds for run in runs]),
        "goodput": round(median([b.seconds / r.seconds for r, b in zip(runs, base, strict=True)]), 4),
    }
    saves = setting.saves(case.interval)
    if not saves:
        return result
    blocked = [run.blocked / saves for run in runs]
    sizes = runs[-1].checkpoint_bytes
    by_difference = [(r.seconds - b.seconds) / saves for r, b in zip(runs, base, strict=True)]
    return result | {
        "write_limit": case.write_limit,
        "drain_every": case.drain_every,
        "drained_after_s": round(median([run.drained for run in runs]), 3),
        "sustained_s": sustained(case, runs),
        "saves": saves,
        "checkpoint_bytes": sizes,
        "iteration_with_checkpoint_ms": _iterations(runs, case.interval, saved=True),
        "iteration_without_checkpoint_ms": _iterations(runs, case.interval, saved=False),
        "mean_iteration_ms": round(1e3 * median([(run.seconds - run.waited) / counted for run in runs]), 1),
        "blocked_ms_per_save": round(1e3 * median(blocked), 2),
        "spread_blocked_ms": spread([1e3 * value for value in blocked]),
        "lost_ms_per_save": round(1e3 * median(by_difference), 1),
        "waited_at_end_s": round(median([run.waited for run in runs]), 3),
        "first_save_ms": round(1e3 * median([run.first_save for run in runs]), 1),
        "throughput_gb_per_s": round(sizes / median(blocked) / 1e9, 3),
    }


def sustained(case: Case, runs: Sequence[Run]) -> float | None:
    """Returns the shortest time between saves, in seconds, for which all storage keeps up.

    That is how long a save takes until it is published, without its wait for the one before it; with a
    drain, how long a checkpoint is copied for each save, if that is longer. None where no report has it.
    """
    times = [seconds for run in runs for seconds in run.published]
    copied = [seconds for run in runs for seconds in run.copied]
    if not times or (case.drain_every and not copied):
        return None
    drain = median(copied) / case.drain_every if case.drain_every else 0.0
    return round(max(median(times), drain), 3)


def _iterations(runs: Sequence[Run], interval: int, saved: bool) -> float | None:
    """Returns the median time of iterations that end with a save, or of the others; None without any."""
    found = [
        1e3 * seconds
        for run in runs
        for number, seconds in run.iterations.items()
        if (number % interval == 0) is saved
    ]
    return round(median(found), 1) if found else None
