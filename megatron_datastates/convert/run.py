"""Converts one checkpoint, or those of a run one by one, and sets the tracker that Megatron resumes by.

Of a run, those that were converted before are left alone, and one that fails does not keep others from it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from megatron_datastates.convert.job import convert
from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.planning import FORMATS, Plan, default_format, plan_conversion
from megatron_datastates.convert.sinks.sink import Progress
from megatron_datastates.convert.sources.by_parameter import ByParameterSource
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.convert.team import Team
from megatron_datastates.convert.trackers import copy_tracker, how_to_load, load_option
from megatron_datastates.errors import (
    DataStatesError,
    NotACheckpointError,
    OptionError,
    StorageError,
    describe_error,
)
from megatron_datastates.files import names_in, path_of, real_path
from megatron_datastates.format.directory import INTEGRITY_NAME, LEGACY
from megatron_datastates.pipeline.runs.run_folders import checkpoint_directories, why_no_run
from megatron_datastates.pipeline.runs.runs import format_seen, is_complete

FULLY_RESHARDABLE = "fully-reshardable"
CONVERTING, VERIFYING = "converting", "verifying"  # the stages of a conversion
Start = Callable[[Plan, str], Progress]  # of a stage; all ranks call it


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
    skipped: str = ""  # why there is nothing to convert; empty if there is
    failed: str = ""  # why it was not converted; empty if it was
    next: str = ""  # what to do with it, or what was done: how Megatron loads it
    note: str = ""  # what of the source the target does not have; why that may be of two saves


@dataclasses.dataclass(frozen=True)
class RunConversion:
    """What was done with the checkpoints of a run, or with one, and how Megatron loads the converted one."""

    results: list[ConversionResult]
    next: str
    lacks_tracked: bool  # what the source's tracker names is missing; or the target's could not be written


@dataclasses.dataclass(frozen=True)
class ConversionRequest:
    """Options of a conversion; see plan_conversion and convert."""

    format: str = ""
    ranks: int = 0
    verify: bool = False
    limits: Limits = Limits()  # noqa: RUF009 - immutable
    optimizer: str = ""  # FULLY_RESHARDABLE: optimizer state by parameter


def convert_one(
    source: Path, target: Path, request: ConversionRequest, team: Team, start: Start
) -> RunConversion:
    """Converts one checkpoint. If the target has the name of an iteration, the run's tracker names it then.

    Args:
        start: called with the plan before each stage; returns the function to report its progress to.

    Raises:
        what plan_conversion and convert raise.
    """
    found = _convert(source, target, request, team, start)
    next, lacks = team.on_rank_zero(
        lambda: _track(lambda: (how_to_load(source, target), False), target.parent)
    )
    return RunConversion([dataclasses.replace(found, next=next)], next, lacks)


def _track(set_tracker: Callable[[], tuple[str, bool]], run: Path) -> tuple[str, bool]:
    """Returns what came of the tracker: what was converted is there, whether or not that could be written."""
    try:
        return set_tracker()
    except (DataStatesError, OSError) as error:
        return f"{describe_error(error)}: choose a checkpoint with {load_option(run)} --ckpt-step N", True


def _convert(
    source: Path, target: Path, request: ConversionRequest, team: Team, start: Start
) -> ConversionResult:
    begin = time.monotonic()
    plan = team.on_every_rank(
        lambda: plan_conversion(_open(source, request), target, format=request.format, ranks=request.ranks)
    )
    convert(
        plan,
        request.limits,
        verify=request.verify,
        progress=start(plan, CONVERTING),
        start_verification=lambda: start(plan, VERIFYING),
        team=team,
    )
    found = plan.source
    counts = (len(plan.files), len(found.tensors), len(found.objects), plan.bytes)
    seconds = round(time.monotonic() - begin, 3)
    note = "; ".join(filter(None, (found.left_out, found.doubt, _without_sums(source))))
    return ConversionResult(str(source), str(target), plan.format, *counts, seconds, note=note)


def _without_sums(source: Path) -> str:
    """Returns what the target lacks if Megatron has stored sums of the source's files."""
    if INTEGRITY_NAME not in names_in(source):
        return ""
    return f"{INTEGRITY_NAME} was not converted: load the target without --verify-integrity"


def _open(directory: Path, request: ConversionRequest) -> Source:
    if request.optimizer not in ("", FULLY_RESHARDABLE):
        raise OptionError(f"--optimizer {request.optimizer!r}: expected {FULLY_RESHARDABLE}")
    source = open_source(directory)
    if not request.optimizer:
        return source
    by_parameter = ByParameterSource(source)
    by_parameter.require_whole()
    return by_parameter


def convert_run(
    source: Path,
    target: Path,
    request: ConversionRequest,
    team: Team,
    start: Start,
    finished: Callable[[ConversionResult], None] = lambda result: None,
) -> RunConversion:
    """Converts each checkpoint in `source`, in order, and then copies Megatron's tracker file.

    Args:
        finished: called with each result; another that fails is one of them.

    Raises:
        StorageError: there are no checkpoints, or a target exists in another format.
        OptionError: the source has checkpoints of several formats, and no format was requested.
    """
    results: list[ConversionResult] = []
    for name, outcome in team.on_rank_zero(lambda: _list_checkpoints(source, target, request.format)):
        from_directory, to_directory = source / name, target / name
        if outcome is None:
            try:
                result = _convert(from_directory, to_directory, request, team, start)
            except (DataStatesError, OSError) as error:  # on all ranks: see Team.gather
                result = _not_converted(from_directory, to_directory, request, failed=describe_error(error))
        else:
            result = _not_converted(from_directory, to_directory, request, **outcome)
        results.append(result)
        finished(result)
    return RunConversion(
        results,
        *team.on_rank_zero(lambda: _track(lambda: copy_tracker(source, target, _not_there(results)), target)),
    )


def _not_there(found: Sequence[ConversionResult]) -> list[str]:
    """Returns the names of those that failed, and that no earlier call has converted."""
    failed = [path_of(one.target) for one in found if one.failed]
    return [path.name for path in failed if isinstance(_try_open(path), DataStatesError)]


def _not_converted(source: Path, target: Path, request: ConversionRequest, **why: str) -> ConversionResult:
    return ConversionResult(str(source), str(target), request.format, 0, 0, 0, 0, 0.0, **why)


def _list_checkpoints(source: Path, target: Path, format: str) -> list[tuple[str, dict[str, str] | None]]:
    """Returns the names of checkpoints, each with why it is not converted: `skipped` or `failed`, or None."""
    if real_path(target) == real_path(source):
        raise StorageError(f"{target} is the source itself: choose another target")
    if format and format not in FORMATS:
        raise OptionError(f"format {format!r} cannot be written: expected one of {', '.join(FORMATS)}")
    names = [path.name for path in checkpoint_directories(source)]
    if not names:
        raise StorageError(why_no_run(source, "leave --all out"))
    opened = {name: _try_open(source / name) for name in names}
    formats = {one.format for one in opened.values() if isinstance(one, Source)}
    wanted = {format or default_format(one, target) for one in formats}
    if len(wanted) > 1:
        raise OptionError(
            f"{source} contains iterations in the formats {' and '.join(sorted(formats))}: choose one for "
            "the target with --to"
        )
    return [(name, _why_not(opened[name], source / name, target / name, wanted)) for name in names]


def _try_open(directory: Path) -> Source | DataStatesError:
    try:
        return open_source(directory)
    except DataStatesError as error:
        return error
    except OSError as error:
        return StorageError(f"{directory} cannot be read: {error.strerror}")


def _why_not(
    source: Source | DataStatesError, directory: Path, target: Path, wanted: Collection[str]
) -> dict[str, str] | None:
    if isinstance(source, DataStatesError):
        is_unfinished = (
            isinstance(source, NotACheckpointError)
            and not is_complete(directory)
            and format_seen(directory) != LEGACY  # nothing says whether that is complete
        )
        return {"skipped" if is_unfinished else "failed": str(source)}
    if not target.exists():
        return None
    existing = _try_open(target)
    if isinstance(existing, DataStatesError):
        return {"failed": f"the target exists, and cannot be read as a checkpoint: {existing}"}
    if existing.format not in wanted:
        raise StorageError(
            f"{target} exists in format {existing.format}, expected {' '.join(wanted)}: choose another target"
        )
    return {"skipped": "the target exists already"}
