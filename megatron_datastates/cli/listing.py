"""datastates ls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_datastates.cli.shared import AsJson, app, cannot
from megatron_datastates.errors import DataStatesError
from megatron_datastates.pipeline.load import Checkpoint, find_published


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
        cannot(error)
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        sizes = " ".join(f"{name} {size}" for name, size in row["parallel"].items() if size > 1)
        print(f"{row['iteration']:>10}  {row['created']}  {row['bytes'] / 1e6:>12.1f} MB  "
              f"{row['ranks']} ranks  {sizes}")  # fmt: skip
    if not rows:
        cannot(DataStatesError(f"{root} holds no published datastates checkpoint"))


def _row(iteration: int, path: Path) -> dict[str, Any]:
    manifest = Checkpoint.open(path).manifest
    return {
        "iteration": iteration,
        "created": manifest.created,
        "bytes": manifest.data_bytes,
        "ranks": manifest.world_size,
        "parallel": manifest.parallel,
    }
