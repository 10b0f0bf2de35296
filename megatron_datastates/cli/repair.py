"""datastates repair."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    advancing,
    checkpoint_of,
    counted,
    directory_argument,
    iteration_option,
    json_option,
    print_json,
    reported_errors,
    say,
)
from megatron_datastates.pipeline.runs.runs import stored_bytes
from megatron_datastates.units import size_text

if TYPE_CHECKING:
    from megatron_datastates.pipeline.upkeep.repair import Repair


@app.command()
@directory_argument
@iteration_option
@json_option
def repair(directory: Path, iteration: int | None, as_json: bool) -> None:
    """Rebuild a lost or damaged manifest.

    It is rebuilt from the index and the data files, and only if they prove that it will be right: the index
    and the complete data file of every rank that stored something are there, all are from the same save, and
    every checksum is correct. Otherwise nothing is written.

    Exit codes: 0 repaired; 2 refused, or it cannot be done (nothing was written).

    \b
    Example: datastates repair runs/gpt/iter_0001000
    """
    with reported_errors(2):
        path = checkpoint_of(directory, iteration)
        done = _repair_with_progress(path)
    if as_json:
        manifest = done.manifest
        print_json({
            "save_id": str(manifest.save_id), "iteration": manifest.iteration, "files": len(manifest.files),
            "bytes_checked": done.bytes_checked, "notes": done.notes,
        })  # fmt: skip
        return
    for note in done.notes:
        say(f"note: {note}")
    say(
        f"{path}: repaired: save {done.manifest.save_id}, {counted(len(done.manifest.files), 'data file')}, "
        f"{size_text(done.bytes_checked)} checked"
    )


def _repair_with_progress(directory: Path) -> Repair:
    from megatron_datastates.pipeline.upkeep.repair import repair as repair_checkpoint

    with advancing("checking", stored_bytes(directory)) as progress:
        return repair_checkpoint(directory, progress=progress)
