"""Removes old checkpoints of a run, by rules, and files of killed saves from the directories of others.

Always kept: the newest complete checkpoint; the one that the tracker names; directories in another format,
damaged ones, links, and what a link points to; and every directory that a save may be writing to. Those
are directories with files of ours that no manifest names and that are younger than MIN_AGE_SECONDS, empty
ones that are younger, and directories without a manifest of any age, unless both the tracker and a
complete checkpoint are newer: then a crash left them. Even of these, one with an index is kept: the index
is written after all ranks are durable, so perhaps only the manifest is lost, which `repair` rebuilds.

Protocol, for each directory, oldest first:
  1. list it and read its manifest; then decide again whether it may be removed. A save that begins after
     that has files that are not on the list; the second decision sees the files of one that began before;
  2. rename the manifest to REMOVAL_NAME. If it is not the one that was read, a save has published
     meanwhile: put it back (never in place of a newer one), and keep the directory;
  3. sync the directory: from now on it is not a checkpoint, and REMOVAL_NAME shows the next call why;
  4. remove what is on the list, REMOVAL_NAME last, then the directory itself, and sync its parent. If a
     save has begun meanwhile, its files, the directory and files of others are kept.
A kill leaves a complete checkpoint, or an incomplete directory that a later call removes. Only a kill (or
a crash of the machine) within step 2, while a save publishes at that moment, loses what that save has
published: its files are kept until they are MIN_AGE_SECONDS old, and `repair` rebuilds its manifest.

Left-overs are in the directory of a complete checkpoint that is kept: data files, indexes and temporary
files of saves that its manifest does not name. They are removed if nothing of their save is younger than
MIN_AGE_SECONDS:
  1. read the manifest, then sync the directory: a crash must not bring back an older one that names them;
  2. right before each file is removed, check again that the manifest is the same, and how old the file is.
A save checks before and after it writes its manifest that all its files are there. So a save that was
silent for longer than MIN_AGE_SECONDS and continues just then fails rather than lose files unseen (except
between the check of step 2 and the removal). Ages are by this machine's clock and the file system's.
tests/model/ searches all interleavings of these protocols with saves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import (
    DataStatesError,
    FormatError,
    NotACheckpointError,
    OptionError,
    StorageError,
)
from megatron_datastates.files import changed_at, is_denied
from megatron_datastates.format.directory import BACKEND, TRACKER_NAME, iteration_name
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId, is_own_file_name, save_id_in_name
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.pipeline.runs import Iteration, find_iterations, require_tracked

REMOVAL_NAME = ".datastates-removal.tmp"  # what was the manifest of a checkpoint that is being removed
_UNREADABLE = "it cannot be read: "
MIN_AGE_SECONDS = 3600.0  # of files that no manifest names, before they count as left by a save that is dead


@dataclasses.dataclass(frozen=True)
class RetentionRules:
    """What to keep, in addition to what is always kept. `keep_last` or `keep_every` has to be given."""

    keep_last: int | None = None  # this many of the newest complete checkpoints
    keep_every: int | None = None  # iterations that are a multiple of this
    min_age_seconds: float = MIN_AGE_SECONDS

    def __post_init__(self) -> None:
        if not self.min_age_seconds >= 0.0:
            raise OptionError(f"an age is at least 0, not {self.min_age_seconds:g}")
        given = [number for number in (self.keep_last, self.keep_every) if number is not None]
        if not given or min(given) < 1:
            raise OptionError("say what to keep: --keep-last, --keep-every, or both")


@dataclasses.dataclass(frozen=True)
class UnnamedFile:
    """A file in our format that no manifest names."""

    path: Path
    bytes: int
    age_seconds: float  # of the youngest file of its save in its directory


@dataclasses.dataclass(frozen=True)
class PrunePlan:
    """What is removed, and why the rest is kept; oldest first."""

    removed: list[Iteration]
    kept: list[tuple[Iteration, str]]
    left_overs: list[UnnamedFile]  # removed from directories that are kept


def plan_prune(root: str | os.PathLike[str], rules: RetentionRules) -> PrunePlan:
    """Decides about all iterations directly under `root`.

    Raises:
        StorageError: `root` cannot be listed, or its tracker cannot be read.
        FormatError: the tracker is damaged, so any checkpoint may be the one that it should name.
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
    plan = PrunePlan([], [], [])
    for one in found:
        why = complaints[one.path] or _reason(one, whole, tracked, rules) or _link_to(one, linked)
        is_ours = (
            one.format == BACKEND and not one.path.is_symlink() and not (why or "").startswith(_UNREADABLE)
        )
        unnamed = _unnamed(one.path) if is_ours else []
        why = why or _under_way(unnamed, rules) or _just_made(one, rules)
        if why is None:
            plan.removed.append(one)
            continue
        plan.kept.append((one, why))
        if one.complete and complaints[one.path] is None:
            plan.left_overs.extend(file for file in unnamed if file.age_seconds >= rules.min_age_seconds)
    return plan


def _under_way(unnamed: Sequence[UnnamedFile], rules: RetentionRules) -> str | None:
    young = min(unnamed, key=lambda file: file.age_seconds, default=None)
    if young is None or young.age_seconds >= rules.min_age_seconds:
        return None
    return (
        f"a save into it may be under way: {young.path.name}, which no manifest names, is "
        f"{age_text(young.age_seconds)} old"
    )


def _just_made(one: Iteration, rules: RetentionRules) -> str | None:
    """Returns why an empty directory is kept: Megatron makes it a moment before the first file of a save."""
    age = time.time() - one.path.stat().st_mtime
    if one.complete or age >= rules.min_age_seconds or any(one.path.iterdir()):
        return None
    return f"a save into it may be under way: it is empty, and was made {age_text(age)} ago"


def age_text(seconds: float) -> str:
    """Returns an age for people. An age below 0, by the clock of another machine, counts as 0 s."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 0.0):.0f} s"


def _unnamed(path: Path) -> list[UnnamedFile]:
    """Returns the files in our format that a directory's manifest does not name; all if it has none."""
    named = {REMOVAL_NAME} | _named_by(path / MANIFEST_NAME)
    found: list[tuple[os.DirEntry[str], os.stat_result]] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if is_own_file_name(entry.name) and entry.name not in named:
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry, entry.stat(follow_symlinks=False)))
    last_change: dict[SaveId | str, float] = {}
    for entry, status in found:
        save = save_id_in_name(entry.name) or entry.name
        last_change[save] = max(last_change.get(save, 0.0), changed_at(status))
    now = time.time()
    return [
        UnnamedFile(path / name, status.st_size, now - last_change[save_id_in_name(name) or name])
        for name, status in sorted((entry.name, status) for entry, status in found)
    ]


def _named_by(manifest_path: Path) -> set[str]:
    try:
        manifest = Manifest.decode(manifest_path.read_bytes(), os.fspath(manifest_path))
    except (OSError, FormatError):
        return set()
    return manifest.names


def _link_targets(root: Path) -> dict[str, str]:
    """Returns, for all links directly under `root`, their names by what they point to."""
    with os.scandir(root) as entries:
        return {os.path.realpath(entry.path): entry.name for entry in entries if entry.is_symlink()}


def _link_to(one: Iteration, linked: dict[str, str]) -> str | None:
    """Returns why a directory is kept if a link points to it, or to something in it."""
    own = os.path.realpath(one.path)
    names = [name for target, name in linked.items() if Path(target).is_relative_to(own)]
    return f"the link {names[0]} points to it" if names else None


def _complaint(one: Iteration) -> str | None:
    """Returns why the rules do not apply to this directory, or None."""
    if one.path.is_symlink():
        return "a link"
    if one.path.name != iteration_name(one.number):
        return "not named as Megatron names iterations"
    try:
        is_empty = not any(one.path.iterdir())
    except OSError as error:
        return f"{_UNREADABLE}{error.strerror}"
    if one.format != BACKEND and not is_empty:  # an empty one may be what a kill has left
        return "not a datastates checkpoint"
    return _damage(one.path) if one.complete else None


def _damage(path: Path) -> str | None:
    """Returns what is damaged, as far as it shows without reading data; files of Megatron's are read."""
    try:
        checkpoint = Checkpoint.open(path)
        sizes = {entry.name: entry.bytes for entry in checkpoint.manifest.files}
        if any((path / name).stat().st_size != size for name, size in sizes.items()):
            return "damaged: see datastates verify"
        for other in checkpoint.manifest.others:
            checkpoint.read_other(other.name)
    except (DataStatesError, OSError) as error:
        return f"{_UNREADABLE}{error}" if is_denied(error) else "damaged: see datastates verify"
    return None


def _reason(one: Iteration, whole: list[int], tracked: int | None, rules: RetentionRules) -> str | None:
    """Returns why this is kept, or None. `whole`: complete iterations, ascending."""
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
    """Returns whether there is an index that no earlier call of prune has left."""
    names = os.listdir(path)
    return REMOVAL_NAME not in names and any(name.startswith("index-") for name in names)


def prune(
    root: str | os.PathLike[str],
    rules: RetentionRules,
    *,
    progress: Callable[[Iteration], None] = lambda removed: None,
    stays: Callable[[Iteration, str], None] = lambda one, why: None,
    faults: str = "",
) -> list[Iteration]:
    """Removes the checkpoints that `plan_prune` returns; reports each to `progress`; returns those gone.

    What a save began to write to since the plan was made is reported to `stays`, with the reason.

    Raises:
        StorageError: something cannot be removed. What was removed before stays so.
        DataStatesError: as `plan_prune`.
    """
    points, gone = Faults(faults), []
    for one in plan_prune(root, rules).removed:
        try:
            names, manifest = _listed(one.path), _content(one.path / MANIFEST_NAME)
            if one not in plan_prune(root, rules).removed:
                continue
            why = _remove(one.path, names, manifest, points)
        except OSError as error:
            raise StorageError(f"{one.path} was not removed: {error}. {_state(one.path)}") from error
        if why is not None:
            stays(one, why)
            continue
        gone.append(one)
        progress(one)
    return gone


def _state(path: Path) -> str:
    return "It is still complete" if (path / MANIFEST_NAME).exists() else "It is not a checkpoint any more"


def _listed(path: Path) -> list[str]:
    """Returns the names to remove, in order; none if another call has removed the directory."""
    try:
        return sorted(os.listdir(path), key=_turn)
    except FileNotFoundError:
        return []


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _turn(name: str) -> tuple[bool, bool, str]:
    """Sorts our files last: as long as anything is left, they show the next call that it may be removed."""
    return (name == REMOVAL_NAME, is_own_file_name(name), name)


def _remove(path: Path, names: Sequence[str], manifest: bytes | None, faults: Faults) -> str | None:
    """Steps 2 to 4 of the protocol, for what was listed and read in step 1; returns why the rest stays."""
    faults.point("remove manifest")
    if _rename_manifest(path) and _content(path / REMOVAL_NAME) != manifest:
        _put_back(path)
        return "a save has published into it meanwhile"
    faults.point("sync removal of manifest")
    sync_directory(path)
    seen = {*names, REMOVAL_NAME}
    for name in [name for name in names if name not in (MANIFEST_NAME, REMOVAL_NAME)]:
        faults.point("remove file")
        if is_own_file_name(name) or not _has_begun(path, seen):
            _remove_entry(path / name)
    if REMOVAL_NAME in names or manifest is not None:
        faults.point("remove file")
        _remove_entry(path / REMOVAL_NAME)
    faults.point("remove directory")
    try:
        path.rmdir()
    except OSError:
        if _has_begun(path, seen):
            return "the old checkpoint is gone; a save into it has begun meanwhile"
        raise
    sync_directory(path.parent)
    return None


def _rename_manifest(path: Path) -> bool:
    try:
        (path / MANIFEST_NAME).rename(path / REMOVAL_NAME)
    except FileNotFoundError:
        return False
    return True


def _put_back(path: Path) -> None:
    """Renames the manifest back, unless a newer one is in its place, which a link never replaces."""
    try:
        os.link(path / REMOVAL_NAME, path / MANIFEST_NAME)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        if not (path / MANIFEST_NAME).exists():
            (path / REMOVAL_NAME).rename(path / MANIFEST_NAME)
    (path / REMOVAL_NAME).unlink(missing_ok=True)
    sync_directory(path)


def _has_begun(path: Path, seen: set[str]) -> bool:
    """Returns whether a save has made files since the directory was listed; they have new names."""
    names = set(os.listdir(path))
    return MANIFEST_NAME in names or any(is_own_file_name(name) for name in names - seen)


def _remove_entry(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_left_overs(
    left_overs: Sequence[UnnamedFile], min_age_seconds: float = MIN_AGE_SECONDS, *, faults: str = ""
) -> list[UnnamedFile]:
    """Removes what `PrunePlan.left_overs` lists, unless it has changed since; returns what is gone.

    Raises:
        StorageError: something cannot be removed. What was removed before stays so.
    """
    points, gone = Faults(faults), []
    for directory in dict.fromkeys(file.path.parent for file in left_overs):
        try:
            manifest = _content(directory / MANIFEST_NAME)
            still = {file.path for file in _unnamed(directory) if file.age_seconds >= min_age_seconds}
            sync_directory(directory)
            for file in left_overs:
                if file.path.parent == directory and file.path in still:
                    points.point("look at left-over")
                    if _may_go(file.path, manifest, min_age_seconds):
                        points.point("remove left-over")
                        file.path.unlink()
                        gone.append(file)
        except OSError as error:
            raise StorageError(f"left-overs were not removed from {directory}: {error}") from error
    return gone


def _may_go(path: Path, manifest: bytes | None, min_age_seconds: float) -> bool:
    """Returns, right before a removal, whether the manifest is unchanged and the file is old enough."""
    if manifest is None or _content(path.parent / MANIFEST_NAME) != manifest:
        return False
    try:
        return time.time() - changed_at(path.lstat()) >= min_age_seconds
    except FileNotFoundError:
        return False
