"""datastates convert."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    FORMATS,
    READABLE,
    argument,
    checkpoint_of,
    conversion_memory_option,
    counted,
    iteration_option,
    json_option,
    note,
    print_json,
    progress_bar,
    reported_errors,
    require_directory,
    say,
)
from megatron_datastates.convert.limits import Limits
from megatron_datastates.errors import OptionError
from megatron_datastates.pipeline.runs.run_folders import is_checkpoint_name
from megatron_datastates.pipeline.runs.runs import is_published
from megatron_datastates.units import size_text

if TYPE_CHECKING:
    from megatron_datastates.convert.planning import Plan
    from megatron_datastates.convert.run import ConversionRequest, ConversionResult, RunConversion
    from megatron_datastates.convert.sinks.sink import Progress
    from megatron_datastates.convert.team import Team

_REFRESHED_EVERY_SECONDS = 0.2


@app.command()
@argument(
    "source",
    type=READABLE,
    help="Directory of a checkpoint, such as runs/gpt/iter_0001000, or of a run: then its tracker's "
    "checkpoint, or with --all every one.",
)
@argument(
    "target",
    type=READABLE,
    help="Directory to create, such as converted/iter_0001000, or msc://PROFILE/PATH. If SOURCE is a "
    "run, it becomes a run, too, and may exist.",
)
@click.option(
    "--to",
    metavar="FORMAT",
    type=FORMATS,
    help="datastates or torch_dist (default: the other one; in object stores datastates).",
)
@click.option("--all", "every", is_flag=True, help="Convert every checkpoint of the run that TARGET lacks.")
@click.option(
    "--ranks",
    metavar="N",
    type=click.IntRange(min=1),
    help="Write N data files (default: one per rank of the source).",
)
@conversion_memory_option
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(min=1),
    help="Data files that each process writes at a time (default: one per CPU core).",
)
@click.option(
    "--verify/--no-verify",
    default=False,
    help="Before the target appears, read both again and compare every byte; also check the CRCs in "
    "torch_dist archives.",
)
@click.option(
    "--optimizer",
    metavar="LAYOUT",
    type=click.Choice(["fully-reshardable"]),
    help="fully-reshardable: write optimizer state by parameter, which stock Megatron loads into other "
    "parallel layouts, but not with expert parallelism where there was none, or the reverse (default: as it "
    "is stored).",
)
@iteration_option
@json_option
def convert(
    source: Path,
    target: Path,
    to: str | None,
    every: bool,
    ranks: int | None,
    memory: int,
    workers: int | None,
    verify: bool,
    optimizer: str | None,
    iteration: int | None,
    as_json: bool,
) -> None:
    """Convert between torch_dist and datastates, bit for bit.

    Tensors, objects and common state stay the same, so Megatron resumes from either. Also converts a
    checkpoint to its own format with another number of files (--to, --ranks), and reads Megatron's old zarr
    format. Needs neither a GPU nor Megatron. The target appears only once it is complete, and then the
    tracker beside it names it, so that Megatron resumes from it. Under torchrun, ranks share the work.
    For a TARGET in an object store, files are made in the directory for temporary files (TMPDIR) first.

    With --all, if a checkpoint cannot be converted, the others are still converted; unfinished ones are
    skipped, and the output says so.

    Exit codes: 0 converted; 1 the source is damaged, --verify found a difference, or (--all) a checkpoint was
    not converted or the one that the tracker names is missing, or it was converted and the tracker could not
    be written; 2 it cannot be converted (a file is missing or unreadable, or a data file
    truncated); 130 interrupted.

    \b
    Example: datastates convert runs/gpt/iter_0001000 converted/iter_0001000 --verify

    \b
    Example: datastates convert runs/gpt/iter_0001000 stock/iter_0001000 --optimizer fully-reshardable

    \b
    Example: torchrun --nproc-per-node 8 -m megatron_datastates convert runs/gpt converted --all --memory 4GiB
    """
    with reported_errors():
        if every and iteration is not None:
            raise OptionError("--all and --iteration: choose one")
        if every:
            require_directory(source)
        else:
            source, target = _one_of(source, target, iteration)
        from megatron_datastates.convert.run import ConversionRequest
        from megatron_datastates.convert.team import team_of_torchrun

        limits = Limits(memory, workers or 0)
        request = ConversionRequest(to or "", ranks or 0, verify, limits, optimizer or "")
        with team_of_torchrun() as team:
            failed = (_convert_run if every else _convert_one)(source, target, request, team, as_json)
    raise click.exceptions.Exit(1 if failed else 0)


def _one_of(source: Path, target: Path, iteration: int | None) -> tuple[Path, Path]:
    """Returns a checkpoint, and where it goes: of a run, into a run, unless the target names an iteration."""
    chosen = checkpoint_of(source, iteration)
    into_run = chosen != source and not is_checkpoint_name(target.name)
    return chosen, target / chosen.name if into_run else target


class _Bars:
    """One progress bar at a time, on rank 0, over the work of all ranks: one for each stage of a conversion.

    A conversion that is refused shows none.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._shown = contextlib.ExitStack()  # ends what is shown

    def start(self, plan: Plan, stage: str) -> Progress:
        """Shows a bar for a stage in place of the last one; returns the function that advances it."""
        self.close()
        count = self._team.new_count()
        if self._team.rank == 0:
            bar, stopped = progress_bar(stage), threading.Event()
            task = bar.add_task("", total=plan.bytes)
            self._shown.callback(bar.stop)  # also if starting it is interrupted
            self._shown.callback(stopped.set)
            bar.start()

            def follow() -> None:
                while not stopped.wait(_REFRESHED_EVERY_SECONDS):
                    bar.update(task, completed=count.total())

            threading.Thread(target=follow, daemon=True).start()
        return count.add

    def close(self) -> None:
        self._shown.close()


def _convert_one(source: Path, target: Path, request: ConversionRequest, team: Team, as_json: bool) -> bool:
    """Converts a checkpoint; returns whether only the tracker was not written, as other errors are raised."""
    from megatron_datastates.convert.run import convert_one

    with contextlib.closing(_Bars(team)) as bars:
        found = convert_one(source, target, request, team, bars.start)
    if team.rank == 0 and as_json:
        print_json(dataclasses.asdict(found.results[0]))
    elif team.rank == 0:
        _print_result(found.results[0])
        if not found.lacks_tracked:
            say(found.next)
        _say_what_is_unchecked(found.results, request)
    if team.rank == 0 and found.lacks_tracked:
        note(f"datastates: {found.next}")
    return found.lacks_tracked


def _convert_run(source: Path, target: Path, request: ConversionRequest, team: Team, as_json: bool) -> bool:
    """Converts a run; returns whether something failed, or the target lacks what the tracker names."""
    from megatron_datastates.convert.run import convert_run

    with contextlib.closing(_Bars(team)) as bars:

        def finished(one: ConversionResult) -> None:
            bars.close()
            if team.rank == 0 and not as_json:
                _print_result(one)

        found = convert_run(source, target, request, team, bars.start, finished)
    if team.rank == 0 and as_json:
        print_json([dataclasses.asdict(one) for one in found.results])
        if found.lacks_tracked:
            note(f"datastates: {found.next}")
    elif team.rank == 0:
        _print_summary(found)
        _say_what_is_unchecked(found.results, request)
    return found.lacks_tracked or any(one.failed for one in found.results)


def _print_result(one: ConversionResult) -> None:
    if one.failed:
        note(f"{one.source}: not converted: {one.failed}")
    elif one.skipped:
        say(f"{one.target}: skipped: {one.skipped}")
    else:
        say(
            f"{one.target}: {one.format}: {counted(one.tensors, 'tensor')} and "
            f"{counted(one.objects, 'object')} in {counted(one.files, 'file')}, {size_text(one.bytes)} in "
            f"{one.seconds:.1f} s"
        )
        if one.note:
            say(f"note: {one.source}: {one.note}")


def _say_what_is_unchecked(found: Sequence[ConversionResult], request: ConversionRequest) -> None:
    converted = [one for one in found if not one.failed and not one.skipped]
    if not request.verify and any(not is_published(Path(one.source)) for one in converted):
        say("note: the source's own checksums were not compared: --verify does that")


def _print_summary(found: RunConversion) -> None:
    failed = sum(bool(one.failed) for one in found.results)
    skipped = sum(bool(one.skipped) for one in found.results)
    done = len(found.results) - failed - skipped
    say(f"{counted(len(found.results), 'checkpoint')}: {done} converted, {skipped} skipped, {failed} failed")
    say(found.next)
