"""Converts all checkpoints of a run, one after the other; those that are there already are left alone."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from megatron_datastates.convert.job import Means, Plan, convert, plan_conversion
from megatron_datastates.convert.sink import Moved, write_synced
from megatron_datastates.convert.source import open_source
from megatron_datastates.convert.team import Team
from megatron_datastates.engine.commit import sync_directory
from megatron_datastates.errors import NotACheckpointError, StorageError

_TRACKER_NAME = "latest_checkpointed_iteration.txt"  # Megatron's: which iteration a run goes on from


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
    for name, skipped in team.first(lambda: _todo(source, target)):
        of, to = source / name, target / name
        if skipped:
            found.append(Converted(str(of), str(to), wish.format, 0, 0, 0, 0, 0.0, skipped))
        else:
            found.append(convert_one(of, to, wish, team, begun))
    team.first(lambda: _copy_tracker(source, target))
    return found


def _todo(source: Path, target: Path) -> list[tuple[str, str]]:
    """Names of iterations, with the reason why nothing is to be done for one."""
    names = [name for name in os.listdir(source) if re.fullmatch(r"iter_\d+", name, re.ASCII)]
    if not names:
        raise StorageError(f"{source} holds no iterations: give the directory that was given to --save")
    return [(name, _why_skipped(source / name, target / name)) for name in sorted(names, key=_iteration)]


def _iteration(name: str) -> int:
    return int(name.removeprefix("iter_"))


def _why_skipped(source: Path, target: Path) -> str:
    try:
        open_source(source)
    except NotACheckpointError as error:
        return str(error)
    return "it is there already" if target.exists() and open_source(target) else ""


def _copy_tracker(source: Path, target: Path) -> None:
    try:
        text = (source / _TRACKER_NAME).read_text().strip()
    except OSError:
        return
    if text.isdecimal() and (target / f"iter_{int(text):07d}").is_dir():
        temporary = target / f".{_TRACKER_NAME}.converting"
        write_synced(temporary, text.encode())
        temporary.rename(target / _TRACKER_NAME)
        sync_directory(target)
