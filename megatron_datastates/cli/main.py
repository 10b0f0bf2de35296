"""Sub-commands of `datastates`. Exit codes: 0 good, 1 the checkpoint is faulty, 2 it cannot be looked at."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from megatron_datastates.config import ENVIRONMENT_PREFIX, Options
from megatron_datastates.errors import DataStatesError
from megatron_datastates.pipeline.load import Checkpoint, find_published
from megatron_datastates.pipeline.verify import Verdict
from megatron_datastates.pipeline.verify import verify as verify_checkpoint

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
_out = Console()
_notes = Console(stderr=True)

Directory = Annotated[Path, typer.Argument(help="A checkpoint, such as CKPT/iter_0000100.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.callback()
def _describe() -> None:
    """Looks into checkpoints saved with --ckpt-format datastates."""


@app.command()
def verify(
    directory: Directory,
    quick: Annotated[bool, typer.Option(help="Check the structure only, not the data.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check that a checkpoint is whole: every checksum, every extent, every element.

    Example: datastates verify runs/gpt/iter_0001000
    """
    try:
        verdict = _verify_with_progress(directory, quick)
    except (DataStatesError, OSError) as error:
        _cannot(error)
    if as_json:
        print(json.dumps(dataclasses.asdict(verdict) | {"good": verdict.good}))
    else:
        _print_verdict(directory, verdict)
    raise typer.Exit(0 if verdict.good else 1)


def _verify_with_progress(directory: Path, quick: bool) -> Verdict:
    total = Checkpoint.open(directory).manifest.data_bytes
    bars = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("verifying", *bars, console=_notes, transient=True, disable=quick) as progress:
        task = progress.add_task("", total=total)
        return verify_checkpoint(directory, quick=quick, progress=lambda done: progress.advance(task, done))


def _print_verdict(directory: Path, verdict: Verdict) -> None:
    for fault in verdict.faults:
        _out.print(f"fault: {fault}", markup=False, highlight=False, soft_wrap=True)
    unchecked = f", {verdict.unchecked_files} files without checksums" if verdict.unchecked_files else ""
    _out.print(
        f"{directory}: {'good' if verdict.good else 'FAULTY'}: {verdict.tensors} tensors and "
        f"{verdict.objects} objects in {verdict.files} files, "
        f"{verdict.bytes_checked / 1e6:.1f} MB checked{unchecked}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@app.command("ls")
def list_checkpoints(
    root: Annotated[Path, typer.Argument(help="The directory given to --save.")], as_json: AsJson = False
) -> None:
    """List the published checkpoints of a run.

    Example: datastates ls runs/gpt
    """
    try:
        rows = [_row(iteration, path) for iteration, path in find_published(root).items()]
    except (DataStatesError, OSError) as error:
        _cannot(error)
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        sizes = " ".join(f"{name} {size}" for name, size in row["parallel"].items() if size > 1)
        print(f"{row['iteration']:>10}  {row['created']}  {row['bytes'] / 1e6:>12.1f} MB  "
              f"{row['ranks']} ranks  {sizes}")  # fmt: skip
    if not rows:
        _cannot(DataStatesError(f"{root} holds no published datastates checkpoint"))


def _row(iteration: int, path: Path) -> dict[str, Any]:
    manifest = Checkpoint.open(path).manifest
    return {
        "iteration": iteration,
        "created": manifest.created,
        "bytes": manifest.data_bytes,
        "ranks": manifest.world_size,
        "parallel": manifest.parallel,
    }


@app.command("options")
def list_options() -> None:
    """List the --datastates-* options of training runs.

    Example: datastates options
    """
    for name, spec in Options.specs().items():
        print(f"--datastates-{name.replace('_', '-')} {spec.metavar}")
        print(f"    {spec.help.replace('%%', '%')}")
    print(f"Each has a twin in the environment: {ENVIRONMENT_PREFIX}SLOT_SIZE=8MiB, and so on.")


def _cannot(error: Exception) -> NoReturn:
    _notes.print(f"datastates: {error}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def main() -> None:
    """The console script."""
    app()
