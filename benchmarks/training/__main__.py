"""The command line of benchmarks.training: what is measured, and what is printed and written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import machine
from benchmarks.command import Result, choose, load_average, resume, run_command, scratch, write_results
from benchmarks.training.measures import Rounds, measure_formats, measure_near_tier, measure_slow_disk
from benchmarks.training.restores import measure_restores
from benchmarks.training.runs import FORMATS, Model, Setting
from benchmarks.training.table import markdown

_MODELS = {"small": Model(8, 128, 64), "large": Model(64, 192, 64)}
_QUICK = Model(2, 32, 16)
PARTS = {f"{name}, DP {ranks}": (name, ranks) for name in _MODELS for ranks in (1, 2)}
_SLOW = "slow disk"
_NEAR = "near tier"
_RESTORE = "near tier, restore"
_ALL = (*PARTS, _SLOW, _NEAR, _RESTORE)
_INTERVALS = (1, 2, 5, 10)
_SLOW_FACTORS = (0.5, 2.0, 5.0)  # iterations that writing one checkpoint takes
_NEAR_FACTOR = 3.0
_RESTORE_RATE = 100_000_000  # bytes a second that the far side has for each node


def run(
    iterations: Annotated[int, typer.Option(help="Iterations that count; 10 precede them.")] = 20,
    repeats: Annotated[int, typer.Option(help="Rounds of runs, at most; medians are reported.")] = 3,
    minutes: Annotated[float, typer.Option(help="Time for the rounds of a part; one is always made.")] = 14,
    only: Annotated[list[str] | None, typer.Option(help=f"A part to run: {'; '.join(_ALL)}.")] = None,
    kind: Annotated[
        list[str] | None, typer.Option("--format", help=f"A format to run: {'; '.join(FORMATS)}.")
    ] = None,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model, two formats, one round; figures mean little.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where to save; on the disk to be measured.")] = Path(),
    out: Annotated[
        Path | None,
        typer.Option(help="Write the results to this JSON file, with tables (.md) and a picture (.svg)."),
    ] = None,
) -> None:
    r"""Measures what checkpoints cost training, in Megatron's own loop on this machine's CPU.

    Runs with each format and each interval take turns with runs that save nothing. The first 10 iterations,
    and the first save, do not count. "Blocked" is the time in save_checkpoint, in polls, and in fences;
    "lost" is the difference between whole runs, divided by the saves; goodput is the time without
    checkpoints divided by the time with them. "The papers' throughput" is that of DataStates-LLM: the bytes
    of a checkpoint divided by the time blocked. "The interval sustained" is the shortest time between saves
    with which all storage keeps up.

    A part that the file of --out has already is not measured again, unless --only names it.

    \b
    Examples:
      python -m benchmarks.training --only "large, DP 1" --out benchmarks/results/training.json
      python -m benchmarks.training --out benchmarks/results/training.json  # all others, 15 minutes each
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
        typer.echo(markdown(part, results))
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
    if part == _RESTORE:
        setting = dataclasses.replace(setting, data_parallel=2, iterations=2, warm_up=0)
        return measure_restores(setting, rounds, folder, _RESTORE_RATE)
    return measure_formats(setting, intervals, rounds, folder, formats)


if __name__ == "__main__":
    run_command(run)
