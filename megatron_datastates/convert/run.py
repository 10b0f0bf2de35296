"""Converts the checkpoints of a run, one after another; leaves alone those that were converted before."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from megatron_datastates.convert.job import convert
from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.planning import Plan, default_format, plan_conversion
from megatron_datastates.convert.sinks.sink import Progress, write_synced
from megatron_datastates.convert.sources.by_parameter import ByParameterSource
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.convert.team import Team
from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.errors import NotACheckpointError, OptionError, StorageError
from megatron_datastates.format.directory import TRACKER_NAME, iteration_in_name, iteration_name
from megatron_datastates.pipeline.runs import tracked_iteration

FULLY_RESHARDABLE = "fully-reshardable"


@dataclasses.dataclass(frozen=True)
class ConversionResult:
    """What was done with one checkpoint."""

    source: str
    target: str
    format: str
    files: int
    tensors: int
    objects: int
    bytes: int  # of tensors
    seconds: float
    skipped: str = ""  # why it was not converted; empty if it was


@dataclasses.dataclass(frozen=True)
class ConversionRequest:
    """Options of a conversion; see plan_conversion and convert."""

    format: str = ""
    ranks: int = 0
    verify: bool = False
    limits: Limits = Limits()  # noqa: RUF009 - immutable
    optimizer: str = ""  # FULLY_RESHARDABLE: optimizer state by parameter


def convert_one(
    source: Path, target: Path, request: ConversionRequest, team: Team, start: Callable[[Plan], Progress]
) -> ConversionResult:
    """Converts one checkpoint.

    Args:
        start: called with the plan before anything is written; returns the function to report progress to.

    Raises:
        what plan_conversion and convert raise.
    """
    begin = time.monotonic()
    plan = team.on_every_rank(
        lambda: plan_conversion(_open(source, request), target, format=request.format, ranks=request.ranks)
    )
    convert(plan, request.limits, verify=request.verify, progress=start(plan), team=team)
    found = plan.source
    counts = (len(plan.files), len(found.tensors), len(found.objects), sum(plan.file_bytes))
    return ConversionResult(
        str(source), str(target), plan.format, *counts, round(time.monotonic() - begin, 3)
    )


def _open(directory: Path, request: ConversionRequest) -> Source:
    if request.optimizer not in ("", FULLY_RESHARDABLE):
        raise OptionError(f"--optimizer {request.optimizer!r}: expected {FULLY_RESHARDABLE}")
    source = open_source(directory)
    return ByParameterSource(source) if request.optimizer else source


def convert_run(
    source: Path, target: Path, request: ConversionRequest, team: Team, start: Callable[[Plan], Progress]
) -> list[ConversionResult]:
    """Converts each `iter_*` directory in `source`, in order, and then copies Megatron's tracker file.

    Raises:
        StorageError: there are no iterations, or a target exists in another format.
        OptionError: the source has iterations of several formats, and no format was requested.
        what convert_one raises: the iterations before the one that failed are complete, and another call
            continues from there.
    """
    found: list[ConversionResult] = []
    for name, reason in team.on_rank_zero(lambda: _list_iterations(source, target, request.format)):
        one, made = source / name, target / name
        if reason:
            found.append(ConversionResult(str(one), str(made), request.format, 0, 0, 0, 0, 0.0, reason))
        else:
            found.append(convert_one(one, made, request, team, start))
    team.on_rank_zero(lambda: _copy_tracker(source, target))
    return found


def _list_iterations(source: Path, target: Path, format: str) -> list[tuple[str, str]]:
    """Returns the names of iterations, each with the reason to skip it, or an empty string."""
    if target.resolve() == source.resolve():
        raise StorageError(f"{target} is the source itself: choose another target")
    numbers = {name: iteration_in_name(name) for name in os.listdir(source)}
    names = sorted((n for n in numbers if numbers[n] is not None), key=lambda name: numbers[name] or 0)
    if not names:
        raise StorageError(f"{source} contains no iter_* directories: choose the --save directory of a run")
    found = {name: _try_open(source / name) for name in names}
    formats = {one.format for one in found.values() if not isinstance(one, NotACheckpointError)}
    wanted = {format or default_format(one) for one in formats}
    if len(wanted) > 1:
        raise OptionError(
            f"{source} contains iterations in the formats {' and '.join(sorted(formats))}: choose one for "
            "the target with --to"
        )
    return [(name, _why_skipped(found[name], target / name, wanted)) for name in names]


def _try_open(directory: Path) -> Source | NotACheckpointError:
    try:
        return open_source(directory)
    except NotACheckpointError as error:
        return error


def _why_skipped(source: Source | NotACheckpointError, target: Path, wanted: Collection[str]) -> str:
    if isinstance(source, NotACheckpointError):
        return str(source)
    if not target.exists():
        return ""
    existing = open_source(target).format
    if existing not in wanted:
        raise StorageError(
            f"{target} exists in format {existing}, expected {' '.join(wanted)}: choose another target"
        )
    return "the target exists already"


def _copy_tracker(source: Path, target: Path) -> None:
    """Copies the tracker file, unless the target has one that names a later iteration or none at all."""
    wanted, existing = tracked_iteration(source / TRACKER_NAME), tracked_iteration(target / TRACKER_NAME)
    if wanted is None or not (target / iteration_name(wanted)).is_dir():
        return
    if os.path.lexists(target / TRACKER_NAME) and (existing is None or existing >= wanted):
        return
    temporary = target / f".{TRACKER_NAME}.converting"
    write_synced(temporary, str(wanted).encode())
    temporary.rename(target / TRACKER_NAME)
    sync_directory(target)
