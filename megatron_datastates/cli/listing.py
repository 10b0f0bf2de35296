"""datastates ls."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_datastates.cli.shared import AsJson, Run, add_row, app, binary_size, cannot, print_table, say
from megatron_datastates.errors import DataStatesError, NotACheckpointError
from megatron_datastates.format.directory import BACKEND
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.pipeline.runs import Iteration, find_iterations, is_published, stored_bytes


@app.command("ls")
def list_checkpoints(
    root: Run,
    as_json: AsJson = False,
) -> None:
    """List the iterations of a run.

    For each: its format, whether it is complete, its size, date, ranks and parallelism.

    Exit codes: 0 listed; 2 nothing to list.

    \b
    Example: datastates ls runs/gpt
    """
    try:
        rows = [_row(one) for one in find_iterations(root)]
    except (DataStatesError, OSError) as error:
        cannot(error)
    if as_json:
        print(json.dumps(rows))
    if not rows and is_published(root):
        cannot(
            NotACheckpointError(f"{root} is a checkpoint, not the directory of a run: use `datastates show`")
        )
    if not rows:
        cannot(NotACheckpointError(f"{root} holds no checkpoint: it has no directory iter_*"))
    if not as_json:
        _print_rows(rows)


def _row(one: Iteration) -> dict[str, Any]:
    row = {
        "iteration": one.number,
        "path": str(one.path),
        "format": one.format,
        "complete": one.complete,
        "created": _changed(one.path),
        "bytes": stored_bytes(one.path),
        "ranks": None,
        "parallel": {},
        "problem": None,
    }
    if one.format == BACKEND and one.complete:
        try:
            manifest = Checkpoint.open(one.path).manifest
            row |= {
                "created": manifest.created,
                "ranks": manifest.world_size,
                "parallel": manifest.parallel,
            }
        except DataStatesError as error:
            row |= {"complete": False, "problem": str(error)}
    return row


def _changed(path: Path) -> str:
    when = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
    return when.isoformat(timespec="seconds")


def _print_rows(rows: list[dict[str, Any]]) -> None:
    table = Table("iteration", "format", "complete", "size", "date (UTC)", "ranks", "parallelism", box=None)
    for row in rows:
        add_row(
            table,
            str(row["iteration"]),
            row["format"],
            "yes" if row["complete"] else "DAMAGED" if row["problem"] else "no",
            binary_size(row["bytes"]),
            row["created"].replace("T", " ").removesuffix("+00:00"),
            str(row["ranks"] or "-"),
            " ".join(f"{name} {size}" for name, size in row["parallel"].items() if size > 1) or "-",
        )
    print_table(table)
    for row in rows:
        if row["problem"]:
            say(f"{row['path']}: {row['problem']}")
