"""datastates preflight."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    PATH,
    argument,
    cannot,
    counted,
    json_option,
    note,
    parse_size,
    print_json,
    reported_errors,
    say,
    say_rows,
    size_text,
)
from megatron_datastates.errors import OptionError

if TYPE_CHECKING:
    from megatron_datastates.preflight.run import Result
    from megatron_datastates.preflight.trial import Trial

_LEAST_BYTES = 1 << 20


@app.command()
@argument(
    "directory",
    metavar="DIR",
    type=PATH,
    help="Where checkpoints are to go, as given to --save. Made if it is not there.",
)
@click.option(
    "--size", metavar="SIZE", default="1GiB", help="State of each rank, on its GPU if there is one."
)
@click.option(
    "--saves", metavar="N", default=3, type=click.IntRange(min=1), help="How many checkpoints to save."
)
@json_option
def preflight(directory: Path, size: str, saves: int, as_json: bool) -> None:
    """Try saves and loads here, before a run: this software, this storage, these nodes.

    Looks at what is installed, makes the calls on files that saves rely on, saves a state of made-up tensors
    some times, loads it, and compares every bit. Prints how long a save holds the trainer, and at what rates
    the storage wrote and read. All that was written is removed.

    Start it with torchrun to try all ranks of a job at once. It then also finds a directory that the nodes do
    not share.

    Exit codes: 0 all works; 1 something does not; 2 it could not be tried.

    \b
    Examples:
        datastates preflight runs/gpt
        torchrun --nproc-per-node 8 -m megatron_datastates preflight /lustre/me/run --size 4GiB
    """
    with reported_errors():
        wanted = parse_size("--size", size)
        if wanted < _LEAST_BYTES:
            cannot(OptionError(f"--size {size}: expected at least 1MiB"))
        from megatron_datastates.preflight import run

        ranks = run.Ranks()
        is_first = ranks.rank == 0
        try:
            result = run.preflight(
                ranks, directory, wanted, saves, note if is_first and not as_json else lambda text: None
            )
        finally:
            ranks.close()
    if is_first:
        print_json(_plain(result)) if as_json else _print(result)
    raise click.exceptions.Exit(0 if result.is_good else 1)


def _plain(result: Result) -> dict[str, object]:
    checks = [
        {"name": check.name, "verdict": check.verdict.name.lower(), "text": check.text}
        for check in result.checks
    ]
    trial = None
    if result.trial is not None:
        rates = {"write_rate": result.trial.write_rate, "load_rate": result.trial.load_rate}
        trial = dataclasses.asdict(result.trial) | rates
    return {"good": result.is_good, "ranks": result.ranks, "nodes": result.nodes} | {
        "checks": checks,
        "trial": trial,
    }


def _print(result: Result) -> None:
    width = max(len(check.name) for check in result.checks)
    for check in result.checks:
        say(f"{check.verdict.name.lower():7}{check.name.ljust(width)}  {check.text}", 9 + width)
    if result.trial is not None:
        _print_trial(result, result.trial)
    say(f"preflight: {'OK' if result.is_good else 'FAILED'}")


def _print_trial(result: Result, trial: Trial) -> None:
    where = f"{counted(result.ranks, 'rank')} on {counted(result.nodes, 'node')}"
    say(f"{where}, {size_text(trial.bytes)} a checkpoint; medians, and the largest in parentheses:")
    rows = [
        ("call that saves", _times([f"{value:.1f} ms" for value in _middle(trial.start_ms)])),
        ("until on storage", _times([f"{value:.2f} s" for value in _middle(trial.durable_s)])),
        ("written at", f"{size_text(round(trial.write_rate))}/s"),
        ("loaded at", f"{size_text(round(trial.load_rate))}/s"),
        ("for your model", f"datastates plan ... --rate {trial.write_rate / 1e9:.2f}GB/s --rate-per all"),
    ]
    say_rows([(f"  {name}", text) for name, text in rows])


def _middle(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), max(values)


def _times(texts: list[str]) -> str:
    return f"{texts[0]} ({texts[1]})"
