"""The command line of benchmarks.training: what is measured, and what is printed and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks import machine
from benchmarks.command import (
    PATH,
    Result,
    benchmark_command,
    choose,
    load_average,
    resume,
    scratch,
    write_results,
)
from benchmarks.training.measures import Rounds, measure_formats, measure_near_tier, measure_slow_disk
from benchmarks.training.restores import measure_restores
from benchmarks.training.runs import FORMATS, Model, Setting
from benchmarks.training.table import markdown
from benchmarks.training.turns import measure_turns

_MODELS = {"small": Model(8, 128, 64), "large": Model(64, 192, 64)}
_QUICK = Model(2, 32, 16)
_TURNS_MODELS = _MODELS | {"large, longer": Model(64, 192, 256), "large, longest": Model(64, 192, 1024)}
PARTS = {f"{name}, DP {ranks}": (name, ranks) for name in _MODELS for ranks in (1, 2)}
_SLOW = "slow disk"
_NEAR = "near tier"
_RESTORE = "near tier, restore"
_TURNS = "in turns"
_ALL = (*PARTS, _TURNS, _SLOW, _NEAR, _RESTORE)
_INTERVALS = (1, 2, 5, 10)
_SLOW_FACTORS = (0.5, 2.0, 5.0)  # iterations that writing one checkpoint takes
_NEAR_FACTOR = 3.0
_RESTORE_RATE = 100_000_000  # bytes a second that the far side has for each node


@benchmark_command
@click.option("--iterations", default=20, help="Iterations that count; 10 precede them.")
@click.option("--repeats", default=3, help="Rounds of runs, at most; medians are reported.")
@click.option("--minutes", type=float, default=14, help="Time for the rounds of a part; one is always made.")
@click.option("--only", multiple=True, help=f"A part to run: {'; '.join(_ALL)}.")
@click.option("--format", "kind", multiple=True, help=f"A format to run: {'; '.join(FORMATS)}.")
@click.option(
    "--quick", "is_quick", is_flag=True, help="A tiny model, two formats, one round; figures mean little."
)
@click.option("--folder", type=PATH, default=".", help="Where to save; on the disk to be measured.")
@click.option(
    "--out", type=PATH, help="Write the results to this JSON file, with tables (.md) and a picture (.svg)."
)
def run(
    iterations: int,
    repeats: int,
    minutes: float,
    only: Sequence[str],
    kind: Sequence[str],
    is_quick: bool,
    folder: Path,
    out: Path | None,
) -> None:
    """Measures what checkpoints cost training, in Megatron's own loop on this machine's CPU.

    Runs with each format and each interval take turns with runs that save nothing. The first 10 iterations,
    and the first save, do not count. "Blocked" is the time in save_checkpoint, in polls, and in fences;
    "lost" is the difference between whole runs, divided by the saves; goodput is the time without
    checkpoints divided by the time with them. "The papers' throughput" is that of DataStates-LLM: the bytes
    of a checkpoint divided by the time blocked. "The interval sustained" is the shortest time between saves
    with which all storage keeps up.

    The part "in turns" makes other runs: blocks of 6 iterations with a save in each, and blocks without, take
    turns in one process, and each block is compared with the two beside it.

    A part that the file of --out has already is not measured again, unless --only names it.

    \b
    Examples:
      python -m benchmarks.training --only "large, DP 1" --out benchmarks/results/training.json
      python -m benchmarks.training --out benchmarks/results/training.json  # all others, 15 minutes each
      python -m benchmarks.training --only "in turns"                       # what each save costs a run
      python -m benchmarks.training --only "slow disk" --repeats 1          # back-pressure
      python -m benchmarks.training --only "near tier" --repeats 1          # before a slow disk
      python -m benchmarks.training --only "near tier, restore"             # 1 minute: after lost nodes
      python -m benchmarks.training --quick                                 # only to see that it works
    """
    chosen = choose(only, _ALL, [next(iter(PARTS))] if is_quick else _ALL, "part")
    quick_formats = ("none", "datastates async")
    formats = choose(kind, FORMATS, quick_formats if is_quick else tuple(FORMATS), "format")
    results = resume(out, {"machine": machine.describe(folder)})
    for part in chosen:
        if part in results["parts"] and not only:
            continue
        with scratch(folder) as inside:
            found = _measure(part, inside, formats, iterations, Rounds(repeats, 60 * minutes), is_quick)
        results["parts"][part] = found | {"load_average": load_average()}
        click.echo(markdown(part, results))
        write_results(results, out)
    if out is not None:
        from benchmarks.training import picture  # here: matplotlib is needed for pictures only

        out.with_suffix(".md").write_text("\n".join(markdown(part, results) for part in results["parts"]))
        picture.draw(results, out.with_suffix(".svg"))


def _measure(
    part: str, folder: Path, formats: list[str], iterations: int, rounds: Rounds, is_quick: bool
) -> Result:
    name, ranks = PARTS.get(part, ("large", 1))
    setting = Setting(_MODELS[name], ranks, 10 + iterations, 10)
    intervals: tuple[int, ...] = _INTERVALS
    factors: tuple[float, ...] = _SLOW_FACTORS
    if is_quick:
        setting, rounds = Setting(_QUICK, ranks, 4, 2), Rounds(1, 0)
        intervals, factors = (1,), (5.0,)
    if part == _SLOW:
        return measure_slow_disk(setting, intervals[::2], rounds, folder, factors)
    if part == _NEAR:
        return measure_near_tier(setting, intervals[::2], rounds, folder, _NEAR_FACTOR)
    if part == _TURNS:
        models = {"quick": _QUICK} if is_quick else _TURNS_MODELS
        return measure_turns(models, rounds, folder, is_quick=is_quick)
    if part == _RESTORE:
        setting = dataclasses.replace(setting, data_parallel=2, iterations=2, warm_up=0)
        return measure_restores(setting, rounds, folder, _RESTORE_RATE)
    return measure_formats(setting, intervals, rounds, folder, formats)


if __name__ == "__main__":
    run()
