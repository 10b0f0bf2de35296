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
from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.planning import Plan
from megatron_datastates.convert.run import ConversionRequest, ConversionResult, convert_one, convert_run
from megatron_datastates.convert.sinks.sink import Progress
from megatron_datastates.convert.team import team_of_torchrun
from megatron_datastates.errors import CorruptDataError, DataStatesError, OptionError

_INTERRUPTED = 130  # the shells' convention: 128 plus the number of SIGINT


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Directory of a checkpoint, such as runs/gpt/iter_0001000; with --all, of a run.",
            callback=readable,
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            help="Directory to create. It must not exist yet, except with --all.",
            callback=readable,
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="datastates or torch_dist (default: the other one).",
        ),
    ] = "",
    every: Annotated[
        bool, typer.Option("--all", help="Convert every iteration of the run that TARGET lacks.")
    ] = False,
    ranks: Annotated[
        int,
        typer.Option(
            metavar="N", show_default=False, help="Write N data files (default: one per rank of the source)."
        ),
    ] = 0,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for data in each process, such as 512MiB.")
    ] = "2GiB",
    workers: Annotated[
        int,
        typer.Option(
            metavar="N",
            show_default=False,
            help="Data files that each process writes at a time (default: one per CPU core).",
        ),
    ] = 0,
    verify: Annotated[
        bool,
        typer.Option(
            help="Before the target appears, read both again and compare every byte; also check the CRCs in "
            "torch_dist archives."
        ),
    ] = False,
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT",
            show_default=False,
            help="fully-reshardable: write optimizer state by parameter, which stock Megatron loads into any "
            "parallel layout (default: as it is stored).",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Convert between torch_dist and datastates, bit for bit.

    Tensors, objects and common state stay the same, so Megatron resumes from either. Also converts a
    checkpoint to its own format with another number of files (--to, --ranks), and reads Megatron's old zarr
    format. Needs neither a GPU nor Megatron. The target appears only once it is complete. Under torchrun,
    ranks share the work.

    Exit codes: 0 converted; 1 the source is corrupt, or --verify found a difference; 2 it cannot be
    converted; 130 interrupted.

    \b
    Example: datastates convert runs/gpt/iter_0001000 converted/iter_0001000 --verify

    \b
    Example: datastates convert runs/gpt/iter_0001000 stock/iter_0001000 --optimizer fully-reshardable

    \b
    Example: torchrun --nproc-per-node 8 tools/convert.py runs/gpt converted --all --memory 4GiB
    """
    try:
        with team_of_torchrun() as team, ExitStack() as shown:
            progress = progress_bar("converting", disable=team.rank > 0)

            def start(plan: Plan) -> Progress:
                if not progress.live.is_started:  # a refused conversion shows no bar
                    shown.enter_context(progress)
                total = sum(plan.file_bytes[n] for n in plan.files_of(team)) * (2 if verify else 1)
                task = progress.add_task("", total=total)
                return lambda done: progress.advance(task, done)

            request = ConversionRequest(to, ranks, verify, Limits(_size(memory), workers), optimizer)
            job = convert_run if every else convert_one
            found = job(source, target, request, team, start)
    except CorruptDataError as error:
        cannot(error, 1)
    except (DataStatesError, OSError) as error:
        cannot(error)
    except KeyboardInterrupt:
        cannot(DataStatesError("interrupted: removed the incomplete target"), _INTERRUPTED)
    if team.rank == 0:
        _print_converted(found, as_json)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise OptionError(f"--memory {text!r}: {error}") from None


def _print_converted(found: ConversionResult | list[ConversionResult], as_json: bool) -> None:
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
