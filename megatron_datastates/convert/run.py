"""Converts all checkpoints of a run, one after the other; those that are there already are left alone."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from megatron_datastates.convert.job import Means, Plan, convert, default_format, plan_conversion
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sinks.sink import Moved, write_synced
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.convert.team import Team
from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.errors import NotACheckpointError, OptionError, StorageError
from megatron_datastates.format.directory import TRACKER_NAME, iteration_in_name, iteration_name
from megatron_datastates.pipeline.runs import tracked_iteration


@dataclasses.dataclass(frozen=True)
class Converted:
    """What became of one checkpoint."""

    source: str
    target: str
    format: str
    files: int
    tensors: int
    objects: int
    bytes: int  # of tensors
    seconds: float
    skipped: str = ""  # why nothing was done


@dataclasses.dataclass(frozen=True)
class Wish:
    """How checkpoints are to be converted; see plan_conversion and convert."""

    format: str = ""
    ranks: int = 0
    verify: bool = False
    means: Means = Means()  # noqa: RUF009 - it cannot be changed


def convert_one(
    source: Path, target: Path, wish: Wish, team: Team, begun: Callable[[Plan], Moved]
) -> Converted:
    """Raises what plan_conversion and convert raise. `begun` is told what is going to be moved."""
    start = time.monotonic()
    plan = team.every(
        lambda: plan_conversion(open_source(source), target, format=wish.format, ranks=wish.ranks)
    )
    convert(plan, wish.means, verify=wish.verify, moved=begun(plan), team=team)
    found = plan.source
    counts = (len(plan.files), len(found.tensors), len(found.objects), sum(plan.file_bytes))
    return Converted(str(source), str(target), plan.format, *counts, round(time.monotonic() - start, 3))


def convert_run(
    source: Path, target: Path, wish: Wish, team: Team, begun: Callable[[Plan], Moved]
) -> list[Converted]:
    """Every `iter_*` right under `source`, in order, and then Megatron's tracker file.

    Raises:
        StorageError: there are none. What convert_one raises, once an iteration cannot be converted: those
            before it are there, and another call goes on from it.
    """
    found: list[Converted] = []
    for name, skipped in team.first(lambda: _todo(source, target, wish.format)):
        of, to = source / name, target / name
        if skipped:
            found.append(Converted(str(of), str(to), wish.format, 0, 0, 0, 0, 0.0, skipped))
        else:
            found.append(convert_one(of, to, wish, team, begun))
    team.first(lambda: _copy_tracker(source, target))
    return found


def _todo(source: Path, target: Path, format: str) -> list[tuple[str, str]]:
    """Names of iterations, with the reason why nothing is to be done for one."""
    if target.resolve() == source.resolve():
        raise StorageError(f"{target} is the source itself: give another target")
    numbers = {name: iteration_in_name(name) for name in os.listdir(source)}
    names = sorted((n for n in numbers if numbers[n] is not None), key=lambda name: numbers[name] or 0)
    if not names:
        raise StorageError(f"{source} holds no iterations: give the directory that was given to --save")
    found = {name: _opened(source / name) for name in names}
    formats = {one.format for one in found.values() if not isinstance(one, NotACheckpointError)}
    wanted = {format or default_format(one) for one in formats}
    if len(wanted) > 1:
        raise OptionError(
            f"{source} holds iterations in formats {' and '.join(sorted(formats))}: say with --to in which "
            "all are to be"
        )
    return [(name, _why_skipped(found[name], target / name, wanted)) for name in names]


def _opened(directory: Path) -> Source | NotACheckpointError:
    try:
        return open_source(directory)
    except NotACheckpointError as error:
        return error


def _why_skipped(source: Source | NotACheckpointError, target: Path, wanted: Collection[str]) -> str:
    if isinstance(source, NotACheckpointError):
        return str(source)
    if not target.exists():
        return ""
    there = open_source(target).format
    if there not in wanted:
        raise StorageError(
            f"{target} exists in format {there}, and {' '.join(wanted)} is wanted: give another target"
        )
    return "it is there already"


def _copy_tracker(source: Path, target: Path) -> None:
    """Unless the target has one already that names a later iteration, trained there, or no iteration."""
    wanted, there = tracked_iteration(source / TRACKER_NAME), tracked_iteration(target / TRACKER_NAME)
    if wanted is None or not (target / iteration_name(wanted)).is_dir():
        return
    if os.path.lexists(target / TRACKER_NAME) and (there is None or there >= wanted):
        return
    temporary = target / f".{TRACKER_NAME}.converting"
    write_synced(temporary, str(wanted).encode())
    temporary.rename(target / TRACKER_NAME)
    sync_directory(target)
