"""Removing old checkpoints of a run, by rules.

Kept, whatever the rules say: the newest checkpoint that is complete; the one that the tracker names; what is
in another format, damaged, a link, or what a link beside it points to; whatever a save may be writing to:
directories with data files that no manifest names, unless both the tracker and a complete checkpoint are
newer (then a crash left them). Of these, one with an index stays all the same: the index is written once all
ranks are durable, so all that is lost may be the manifest, which `repair` makes anew.

Protocol, for each directory, oldest first:
  1. look again whether it may go;
  2. rename the manifest to REMOVAL_NAME, sync the directory: from here on it is no checkpoint, and the next
     call knows who left it so, index and all;
  3. remove all else in it, that file last, then the directory itself, and sync its parent.
A kill leaves a complete checkpoint, or an incomplete directory that the next call removes.
No lock keeps a trainer away: a save that begins between 1 and 2 into the very directory is lost. That takes a
trainer that saves an old iteration again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_datastates.engine.commit import sync_directory
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import DataStatesError, NotACheckpointError, OptionError, StorageError
from megatron_datastates.format.values import MANIFEST_NAME, is_data_file_name, is_own_file_name
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.pipeline.runs import (
    BACKEND,
    TRACKER_NAME,
    Iteration,
    find_iterations,
    require_tracked,
)

REMOVAL_NAME = ".datastates-removal.tmp"  # what was the manifest of a checkpoint that is being removed


@dataclasses.dataclass(frozen=True)
class Rules:
    """What to keep beside what is always kept. At least one of them is given."""

    keep_last: int | None = None  # so many of the newest complete checkpoints
    keep_every: int | None = None  # iterations that are a multiple of this

    def __post_init__(self) -> None:
        given = [number for number in (self.keep_last, self.keep_every) if number is not None]
        if not given or min(given) < 1:
            raise OptionError("say what to keep: so many of the last, every so many iterations, or both")


@dataclasses.dataclass(frozen=True)
class PrunePlan:
    """What goes, and why all else stays; oldest first."""

    removed: list[Iteration]
    kept: list[tuple[Iteration, str]]


def plan_prune(root: str | os.PathLike[str], rules: Rules) -> PrunePlan:
    """Looks at all iterations right under `root`.

    Raises:
        StorageError: `root` cannot be listed, or its tracker not be read.
        FormatError: the tracker names nothing that is known, so anything may be what it should name.
        NotACheckpointError: there is no iteration.
    """
    path = Path(root)
    try:
        found = find_iterations(path)
        linked = _link_targets(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be listed: {error.strerror}") from error
    if not found:
        raise NotACheckpointError(f"{path} holds no checkpoint (no directory iter_*)")
    tracked = require_tracked(path / TRACKER_NAME)
    complaints = {one.path: _complaint(one) for one in found}
    whole = [one.number for one in found if one.complete and complaints[one.path] is None]
    plan = PrunePlan([], [])
    for one in found:
        why = complaints[one.path] or _reason(one, whole, tracked, rules) or _link_to(one, linked)
        if why is None:
            plan.removed.append(one)
        else:
            plan.kept.append((one, why))
    return plan


def _link_targets(root: Path) -> dict[str, str]:
    """Of all links right under `root`: where they lead -> their names."""
    with os.scandir(root) as entries:
        return {os.path.realpath(entry.path): entry.name for entry in entries if entry.is_symlink()}


def _link_to(one: Iteration, linked: dict[str, str]) -> str | None:
    """A link stays, so what it leads to does, too, were it only a part of this directory."""
    own = os.path.realpath(one.path)
    names = [name for target, name in linked.items() if Path(target).is_relative_to(own)]
    return f"the link {names[0]} points to it" if names else None


def _complaint(one: Iteration) -> str | None:
    """Why this is nothing to be removed by rules."""
    if one.path.is_symlink():
        return "a link"
    if one.path.name != f"iter_{one.number:07d}":
        return "not named as Megatron names iterations"
    if one.format != BACKEND and any(one.path.iterdir()):  # an empty one may be what a kill has left
        return "not a datastates checkpoint"
    return _damage(one.path) if one.complete else None


def _damage(path: Path) -> str | None:
    """What can be seen without reading data. Others' files are read: Megatron cannot load without them."""
    try:
        checkpoint = Checkpoint.open(path)
        sizes = {entry.name: entry.bytes for entry in checkpoint.manifest.files}
        if any((path / name).stat().st_size != size for name, size in sizes.items()):
            return "damaged: see datastates verify"
        for other in checkpoint.manifest.others:
            checkpoint.read_other(other.name)
        unnamed = [name for name in os.listdir(path) if is_data_file_name(name) and name not in sizes]
    except (DataStatesError, OSError):
        return "damaged: see datastates verify"
    return "a save into it may be under way" if unnamed else None


def _reason(one: Iteration, whole: list[int], tracked: int | None, rules: Rules) -> str | None:
    """Why this stays. `whole`: complete iterations, ascending."""
    if one.number == tracked:
        return "the tracker names it"
    if not one.complete:
        is_left_over = whole and tracked is not None and one.number < min(whole[-1], tracked)
        if not is_left_over:
            return "incomplete: its save may be under way"
        return "its manifest is lost: see datastates repair" if _may_be_whole(one.path) else None
    if one.number == whole[-1]:
        return "the newest complete one"
    if rules.keep_last is not None and one.number in whole[-rules.keep_last :]:
        return f"one of the last {rules.keep_last}"
    if rules.keep_every is not None and one.number % rules.keep_every == 0:
        return f"a multiple of {rules.keep_every}"
    return None


def _may_be_whole(path: Path) -> bool:
    """Whether an index is there that no removal of ours has left."""
    names = os.listdir(path)
    return REMOVAL_NAME not in names and any(name.startswith("index-") for name in names)


def prune(
    root: str | os.PathLike[str],
    rules: Rules,
    *,
    progress: Callable[[Iteration], None] = lambda removed: None,
    faults: str = "",
) -> list[Iteration]:
    """Removes what `plan_prune` gives; tells `progress` of each; gives those that are gone.

    Raises:
        StorageError: something cannot be removed. What was removed before stays so.
        DataStatesError: as `plan_prune`.
    """
    points, gone = Faults(faults), []
    for one in plan_prune(root, rules).removed:
        if one not in plan_prune(root, rules).removed:
            continue
        try:
            _remove(one.path, points)
        except OSError as error:
            raise StorageError(f"{one.path} was not removed: {error}. {_state(one.path)}") from error
        gone.append(one)
        progress(one)
    return gone


def _state(path: Path) -> str:
    return "It is still complete" if (path / MANIFEST_NAME).exists() else "It is no checkpoint any more"


def _turn(name: str) -> tuple[bool, bool, str]:
    """Ours go last: while anything is left, they tell the next call whose it is, and that it may go."""
    return (name == REMOVAL_NAME, is_own_file_name(name), name)


def _remove(path: Path, faults: Faults) -> None:
    faults.point("remove manifest")
    with contextlib.suppress(FileNotFoundError):
        (path / MANIFEST_NAME).rename(path / REMOVAL_NAME)
    faults.point("sync removal of manifest")
    sync_directory(path)
    for entry in sorted(os.scandir(path), key=lambda entry: _turn(entry.name)):
        faults.point("remove file")
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            Path(entry.path).unlink()
    faults.point("remove directory")
    path.rmdir()
    sync_directory(path.parent)
