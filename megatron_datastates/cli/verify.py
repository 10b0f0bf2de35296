"""datastates verify."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from megatron_datastates.cli.shared import AsJson, Directory, app, cannot, out, progress_bar
from megatron_datastates.errors import DataStatesError
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.pipeline.verify import Verdict
from megatron_datastates.pipeline.verify import verify as verify_checkpoint


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
        cannot(error)
    if as_json:
        print(json.dumps(dataclasses.asdict(verdict) | {"good": verdict.good}))
    else:
        _print_verdict(directory, verdict)
    raise typer.Exit(0 if verdict.good else 1)


def _verify_with_progress(directory: Path, quick: bool) -> Verdict:
    total = Checkpoint.open(directory).manifest.data_bytes
    with progress_bar("verifying", disable=quick) as progress:
        task = progress.add_task("", total=total)
        return verify_checkpoint(directory, quick=quick, progress=lambda done: progress.advance(task, done))


def _print_verdict(directory: Path, verdict: Verdict) -> None:
    for fault in verdict.faults:
        out.print(f"fault: {fault}", markup=False, highlight=False, soft_wrap=True)
    unchecked = f", {verdict.unchecked_files} files without checksums" if verdict.unchecked_files else ""
    out.print(
        f"{directory}: {'good' if verdict.good else 'FAULTY'}: {verdict.tensors} tensors and "
        f"{verdict.objects} objects in {verdict.files} files, "
        f"{verdict.bytes_checked / 1e6:.1f} MB checked{unchecked}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
