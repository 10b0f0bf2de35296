"""datastates convert."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from megatron_datastates.cli.shared import AsJson, app, cannot, progress_bar, readable, say
from megatron_datastates.config import parse_bytes
from megatron_datastates.convert.job import Means, Plan
from megatron_datastates.convert.run import Converted, Wish, convert_one, convert_run
from megatron_datastates.convert.sinks.sink import Moved
from megatron_datastates.convert.team import team_of_torchrun
from megatron_datastates.errors import CorruptDataError, DataStatesError, OptionError

_INTERRUPTED = 130  # as shells say it: 128 and the signal's number


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(help="A checkpoint, such as CKPT/iter_0000100; a run with --all.", callback=readable),
    ],
    target: Annotated[
        Path,
        typer.Argument(help="The directory to make. It must not exist, but for --all.", callback=readable),
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="datastates or torch_dist; by default the other one."),
    ] = "",
    every: Annotated[
        bool, typer.Option("--all", help="All iterations of a run that are not there yet.")
    ] = False,
    ranks: Annotated[
        int, typer.Option(metavar="N", show_default=False, help="Make N files; by default one a rank.")
    ] = 0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="For data, in each process.")] = "2GiB",
    workers: Annotated[
        int,
        typer.Option(
            metavar="N", show_default=False, help="Files at a time, in each process; by default a core each."
        ),
    ] = 0,
    verify: Annotated[
        bool,
        typer.Option(help="Re-read and compare everything, and check CRCs of torch_dist, before it appears."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert checkpoints between torch_dist and datastates, or deal one out to other numbers of files.

    Tensors, objects and common state are the same bit for bit, so Megatron goes on from either. No GPU and no
    Megatron are needed. A target appears when it is whole. Under torchrun, ranks share the files.
    Exit codes: 0 converted, 1 what was read is corrupt, or was not written as it was, 2 it cannot be done,
    130 interrupted.

    Example: datastates convert runs/gpt/iter_0001000 converted/iter_0001000 --verify

    Example: torchrun --nproc-per-node 8 tools/convert.py runs/gpt converted --all --memory 4GiB
    """
    try:
        with team_of_torchrun() as team, ExitStack() as shown:
            progress = progress_bar("converting", disable=team.rank > 0)

            def begun(plan: Plan) -> Moved:
                if not progress.live.is_started:  # not before there is something to show
                    shown.enter_context(progress)
                total = sum(plan.file_bytes[n] for n in plan.files_of(team)) * (2 if verify else 1)
                task = progress.add_task("", total=total)
                return lambda done: progress.advance(task, done)

            wish = Wish(to, ranks, verify, Means(_size(memory), workers))
            job = convert_run if every else convert_one
            found = job(source, target, wish, team, begun)
    except CorruptDataError as error:
        cannot(error, 1)
    except (DataStatesError, OSError) as error:
        cannot(error)
    except KeyboardInterrupt:
        cannot(DataStatesError("interrupted: what was not whole was removed"), _INTERRUPTED)
    if team.rank == 0:
        _tell(found, as_json)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise OptionError(f"--memory {text!r}: {error}") from None


def _tell(found: Converted | list[Converted], as_json: bool) -> None:
    if as_json:
        print(json.dumps(msgspec.to_builtins(found)))
        return
    for one in found if isinstance(found, list) else [found]:
        done = (
            f"skipped: {one.skipped}"
            if one.skipped
            else f"{one.format}: {one.tensors} tensors and {one.objects} objects in {one.files} files, "
            f"{one.bytes / 1e6:.1f} MB in {one.seconds:.1f} s"
        )
        say(f"{one.target}: {done}")
