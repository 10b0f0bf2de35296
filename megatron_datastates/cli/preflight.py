"""datastates preflight."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    PATH,
    Size,
    argument,
    cannot,
    counted,
    json_option,
    note,
    print_json,
    reported_errors,
    say,
    say_rows,
)
from megatron_datastates.config import MIB
from megatron_datastates.errors import DataStatesError
from megatron_datastates.units import size_text

if TYPE_CHECKING:
    from megatron_datastates.preflight.run import Result
    from megatron_datastates.preflight.trial import Trial


@app.command()
@argument(
    "directory",
    metavar="DIR",
    type=PATH,
    help="Where checkpoints are to go, as given to --save. Made if it is not there.",
)
@click.option(
    "--size",
    metavar="SIZE",
    type=Size(MIB),
    default="1GiB",
    help="State of each rank, on its GPU if there is one.",
)
@click.option(
    "--saves", metavar="N", default=3, type=click.IntRange(min=1), help="How many checkpoints to save."
)
@json_option
def preflight(directory: Path, size: int, saves: int, as_json: bool) -> None:
    """Try saves and loads on the storage and nodes of a run, before it.

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
    with reported_errors(), _cleaning_up():
        from megatron_datastates.preflight import run
        from megatron_datastates.preflight.ranks import Ranks

        ranks = Ranks()
        is_first = ranks.rank == 0
        show = note if is_first and not as_json else lambda text: None
        result = run.preflight(ranks, directory, size, saves, show)
        if is_first:
            print_json(_plain(result)) if as_json else _print(result)
        ranks.close()
    raise click.exceptions.Exit(0 if result.is_good else 1)


@contextlib.contextmanager
def _cleaning_up() -> Iterator[None]:
    """Removes what was written at a SIGTERM, too; reports errors of torch in one line.

    Where a rank ends, torch raises an error on those that wait for it, and torchrun sends them a SIGTERM.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except (click.exceptions.Exit, DataStatesError):
        raise
    except (RuntimeError, ValueError, MemoryError) as error:
        first = (str(error).splitlines() or [""])[0]
        text = f"{type(error).__name__}: {first}"
        if "RANK" in os.environ:
            text = f"rank {os.environ['RANK']}: {text} (other ranks may say why)"
        cannot(DataStatesError(text))
    finally:
        signal.signal(signal.SIGTERM, before)


def _plain(result: Result) -> dict[str, object]:
    checks = [
        {"name": check.name, "verdict": check.verdict.name.lower(), "text": check.text}
        for check in result.checks
    ]
    trial = None
    if result.trial is not None:
        load_rate = result.trial.load_rate if result.is_good else None
        trial = dataclasses.asdict(result.trial) | {
            "write_rate": result.trial.write_rate,
            "load_rate": load_rate,
        }
        del trial["fault"]  # of rank 0; the check of loads has that of all
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
    rate = _rate(trial.write_rate)
    rows = [
        ("call that saves", _times(trial.start_ms, "{:.1f} ms")),
        ("until on storage", _times(trial.durable_s, "{:.2f} s")),
        ("written at", rate),
        *([("loaded at", _rate(trial.load_rate))] if result.is_good else []),
        ("for your model", f"datastates plan ... --rate {rate.replace(' ', '')} --rate-per all"),
    ]
    say_rows([(f"  {name}", text) for name, text in rows])


def _rate(rate: float) -> str:
    return f"{size_text(round(rate))}/s"


def _times(values: list[float], form: str) -> str:
    return f"{form.format(statistics.median(values))} ({form.format(max(values))})"
