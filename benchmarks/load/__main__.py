"""The command line of benchmarks.load: what is measured, and what is printed and written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from benchmarks import disk, machine
from benchmarks.command import PATH, Result, benchmark_command, choose, measure_parts, scratch, write_results
from benchmarks.load.measures import (
    CASES,
    Checkpoints,
    measure_again,
    measure_loads,
    measure_optimizer,
    measure_verify,
)
from benchmarks.load.states import Model
from benchmarks.rounds import Bar
from megatron_datastates.config import GIB

_ALL = (*CASES, "optimizer", "again", "verify")
_QUICK = ("plain", "optimizer", "again", "verify")  # which need one world of two ranks
_QUICK_MODEL = Model(layers=2, hidden=256, ffn=704, vocabulary=2000, small_layers=20)


@benchmark_command
@click.option("--gib", default=2.0, help="Size of each checkpoint, in GiB.")
@click.option("--repeats", default=5, help="Rounds of every comparison; medians are reported.")
@click.option("--only", multiple=True, help=f"A case to run: {'; '.join(_ALL)}.")
@click.option(
    "--quick", "is_quick", is_flag=True, help="A tiny model, few cases, one round; figures that mean little."
)
@click.option("--folder", type=PATH, default=".", help="Where checkpoints are; on the disk to be measured.")
@click.option("--out", type=PATH, help="Write the results to this JSON file, and a picture (.svg) beside it.")
def run(
    gib: float, repeats: int, only: Sequence[str], is_quick: bool, folder: Path, out: Path | None
) -> None:
    """Measures how fast this machine reads checkpoints, next to torch_dist and to what its disk can do.

    Ranks are processes of gloo worlds on this machine. They load through Megatron's dist_checkpointing.load,
    into memory that is resident already, and the system's file caches are dropped before each load where that
    is permitted. Two ranks keep both cores of a small machine busy; in the case "one rank" there are cores to
    spare, as on most machines with GPUs. Contenders take turns, several times, and medians are reported. The
    first load of each kind is checked, element by element.

    \b
    Examples:
      python -m benchmarks.load                      # about 10 minutes and 16 GiB of disk
      python -m benchmarks.load --gib 0.5 --repeats 2
      python -m benchmarks.load --only plain --out results.json
      python -m benchmarks.load --gib 0.7 --folder /dev/shm    # storage that is never the limit
      python -m benchmarks.load --quick              # only to see that it works
    """
    chosen = choose(only, _ALL, _QUICK if is_quick else _ALL, "case")
    cases = [case for case in CASES if case in chosen]
    if is_quick:
        repeats = 1
    model = _QUICK_MODEL if is_quick else Model.of_bytes(int(gib * GIB))
    results: Result = {
        "machine": machine.describe(folder),
        "gib": model.bytes / GIB if is_quick else gib,
        "repeats": repeats,
        "caches_dropped": disk.drop_caches(),
    }
    with scratch(folder) as inside, contextlib.closing(Checkpoints(inside, model)) as checkpoints:
        measures: dict[str, Callable[[], tuple[Result, list[Bar]]]] = {
            "loads": lambda: measure_loads(checkpoints, repeats, cases),
            "optimizer": lambda: measure_optimizer(checkpoints, repeats),
            "again": lambda: measure_again(checkpoints, repeats),
            "verify": lambda: measure_verify(checkpoints, repeats),
        }
        parts = [part for part in measures if part in chosen or (part == "loads" and cases)]
        measure_parts(results, parts, lambda part: measures[part]())
    write_results(results, out)
    if out is not None:
        from benchmarks.load import picture  # here: matplotlib is needed for pictures only

        picture.draw(results, out.with_suffix(".svg"))


if __name__ == "__main__":
    run()
