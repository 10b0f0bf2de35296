"""datastates verify."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from megatron_datastates.cli.shared import AsJson, Directory, app, binary_size, cannot, progress_bar, say
from megatron_datastates.errors import DataStatesError
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.pipeline.verify import Verdict
from megatron_datastates.pipeline.verify import verify as verify_checkpoint


@app.command()
def verify(
    directory: Directory,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check the structure only; read no tensors and no objects.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check that a checkpoint is complete and undamaged.

    Checks every checksum, every extent, every element and every object, and lists all faults.

    Exit codes: 0 good; 1 faulty; 2 it cannot be checked.

    \b
    Example: datastates verify runs/gpt/iter_0001000
    """
    try:
        verdict = _verify_with_progress(directory, quick)
    except (DataStatesError, OSError) as error:
        cannot(error)
    if as_json:
        print(json.dumps(dataclasses.asdict(verdict) | {"good": verdict.good}))
    else:
        _print_verdict(directory, verdict)
    raise typer.Exit(0 if verdict.good else 1)


def _verify_with_progress(directory: Path, quick: bool) -> Verdict:
    total = sum(file.footer_offset for file in Checkpoint.open(directory).manifest.files)
    with progress_bar("verifying", disable=quick) as progress:
        task = progress.add_task("", total=total)
        return verify_checkpoint(directory, quick=quick, progress=lambda done: progress.advance(task, done))


def _print_verdict(directory: Path, verdict: Verdict) -> None:
    for fault in verdict.faults:
        say(f"fault: {fault}")
    for note in verdict.notes:
        say(f"note: {note}")
    unchecked = f", {verdict.unchecked_files} files without checksums" if verdict.unchecked_files else ""
    streams = f" and {verdict.streams} streams" if verdict.streams else ""
    say(
        f"{directory}: {'good' if verdict.good else 'FAULTY'}: {verdict.tensors} tensors and "
        f"{verdict.objects} objects{streams} in {verdict.files} files, "
        f"{binary_size(verdict.bytes_checked)} checked{unchecked}"
    )
