"""Decides which checkpoints of a run, and which left-over files, are removed; removes nothing (prune.py).

Always kept: the newest complete checkpoint; the one that the tracker names; directories in a format that
the caller does not describe (OtherFormat), damaged ones, links, and what a link points to; and every
directory that a save may be writing to. Those are directories with files of ours that no manifest names and
that are younger than MIN_AGE_SECONDS, empty ones that are younger, and directories without a manifest of any
age, unless both the tracker and a complete checkpoint are newer: then a crash left them. (Files that are old
show no crash: a save that has written all of them waits for a fence and for polls, and training may stand
still for hours between these, as in an evaluation.) Even of these, one
with an index is kept: the index is written after all ranks are durable, so perhaps only the manifest is lost,
which `repair` rebuilds.

A checkpoint of another format may be one that a save is writing again, under the same names. What shows that
are files that are younger than MIN_AGE_SECONDS, in a directory without an index, or younger than the index.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_datastates.engine.atomic_files import MIN_AGE_SECONDS
from megatron_datastates.errors import DataStatesError, NotACheckpointError, OptionError, StorageError
from megatron_datastates.files import is_denied, is_object, names_in, path_of
from megatron_datastates.format.directory import BACKEND, REMOVAL_NAME, TRACKER_NAME, iteration_name
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publishing.presence import missing_data_files
from megatron_datastates.pipeline.runs.history import by_branch
from megatron_datastates.pipeline.runs.run_folders import why_no_run
from megatron_datastates.pipeline.runs.runs import Iteration, find_answered, find_iterations, require_tracked
from megatron_datastates.pipeline.upkeep.left_overs import (
    UnnamedFile,
    age_text,
    clock_ahead,
    under_way,
    unfinished_uploads,
    unnamed_files,
)

_UNREADABLE = "it cannot be read: "
_UNDER_WAY = "incomplete: its save may be under way, as the tracker names none that is newer and undamaged. "
_DEAD = "If no job runs, delete it by hand, or resume: it goes once a newer one is complete"
_REPAIRABLE = "If no job runs, see datastates repair"


@dataclasses.dataclass(frozen=True)
class RetentionRules:
    """What to keep, in addition to what is always kept. `keep_last` or `keep_every` has to be given."""

    keep_last: int | None = None  # this many of the newest complete checkpoints
    keep_every: int | None = None  # iterations that are a multiple of this
    min_age_seconds: float = MIN_AGE_SECONDS

    def __post_init__(self) -> None:
        if not self.min_age_seconds >= 0.0:
            raise OptionError(f"--min-age {self.min_age_seconds / 60:g}: expected at least 0")
        given = {"--keep-last": self.keep_last, "--keep-every": self.keep_every}
        if all(number is None for number in given.values()):
            raise OptionError("give --keep-last N, --keep-every N, or both: prune needs to know what to keep")
        for name, number in given.items():
            if number is not None and number < 1:
                raise OptionError(f"{name} {number}: expected at least 1")

    def by_clock_of(self, directory: Path) -> RetentionRules:
        """Returns the rules for a file system, by whose clock files are as old as the plan has found them."""
        return dataclasses.replace(self, min_age_seconds=self.min_age_seconds + clock_ahead(directory))


@dataclasses.dataclass(frozen=True)
class OtherFormat:
    """What removing checkpoints of another format needs to know of it."""

    index_name: str  # without this file, a directory is no checkpoint
    data_suffix: str  # of its data files, which are written before the index
    # Returns what is damaged in a checkpoint; raises errors of what cannot be read.
    find_fault: Callable[[Path], str | None]


OtherFormats = Mapping[str, OtherFormat]  # by name
NO_OTHERS: OtherFormats = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class PrunePlan:
    """What is removed, and why the rest is kept; oldest first."""

    removed: list[Iteration]
    kept: list[tuple[Iteration, str]]
    left_overs: list[UnnamedFile]  # removed from directories that are kept; and uploads that have not ended
    note: str = ""  # what could not be looked for
    undamaged: list[int] = dataclasses.field(default_factory=list)  # iterations, ascending


def plan_prune(
    root: str | os.PathLike[str],
    rules: RetentionRules,
    others: OtherFormats = NO_OTHERS,
    again: tuple[Iteration, PrunePlan] | None = None,
) -> PrunePlan:
    """Decides about all iterations directly under `root`.

    Args:
        others: the formats, besides ours, whose checkpoints the rules apply to.
        again: one of a plan's, to decide about it alone. Of the others, damage is not looked for again.

    Raises:
        StorageError: `root` cannot be listed, or its tracker cannot be read.
        FormatError: the tracker is damaged, so any checkpoint may be the one that it should name.
        NotACheckpointError: there is no iteration.
    """
    path = path_of(root)
    try:
        found = (
            find_answered(path) if is_object(path) else [_seen(one, others) for one in find_iterations(path)]
        )
        linked = _link_targets(path)
        uploads, note = unfinished_uploads(path) if is_object(path) else ([], "")
    except OSError as error:
        where = str(error.filename or path)
        verb = "listed" if where == str(path) else "read"
        raise StorageError(f"{where} cannot be {verb}: {error.strerror}") from error
    if not found and not uploads:
        raise NotACheckpointError(why_no_run(path, or_else=""))
    tracked = require_tracked(path / TRACKER_NAME)
    wanted = found if again is None else [one for one in found if one.path == again[0].path]
    complaints = {one.path: _complaint(one, others) for one in wanted}
    known = again[1].undamaged if again is not None else []
    undamaged_at = {
        one.number: one.path
        for one in found
        if one.complete and (complaints[one.path] is None if one.path in complaints else one.number in known)
    }
    undamaged, latest = sorted(undamaged_at), by_branch(path, undamaged_at, rules.keep_last or 1)
    old_uploads = [upload for upload in uploads if upload.age_seconds >= rules.min_age_seconds]
    plan = PrunePlan([], [], old_uploads, note, undamaged)
    for one in wanted:
        with contextlib.suppress(FileNotFoundError):  # somebody else has removed it meanwhile
            why = (
                complaints[one.path]
                or _reason(one, undamaged, latest, tracked, rules, others)
                or _link_to(one, linked)
            )
            unnamed = _unnamed(one, why or "", others)
            own_uploads = [upload for upload in uploads if upload.path.parent == one.path]
            why = why or under_way([*unnamed, *own_uploads], rules.min_age_seconds) or _just_made(one, rules)
            if why is None:
                plan.removed.append(one)
                continue
            plan.kept.append((one, why))
            if one.format == BACKEND and one.complete and complaints[one.path] is None:
                plan.left_overs.extend(file for file in unnamed if file.age_seconds >= rules.min_age_seconds)
    return plan


def _seen(one: Iteration, others: OtherFormats) -> Iteration:
    """Returns a checkpoint of another format as incomplete if a removal of it has begun."""
    if one.format not in others or not one.complete:
        return one
    index = one.path / others[one.format].index_name
    is_removed = (one.path / REMOVAL_NAME).exists() and not index.exists()
    return dataclasses.replace(one, complete=not is_removed)


def _unnamed(one: Iteration, why: str, others: OtherFormats) -> list[UnnamedFile]:
    """Returns the files that may be those of a save that is under way.

    Args:
        why: why the directory is kept; of one that cannot be read, nothing is looked at.
    """
    if one.path.is_symlink() or why.startswith(_UNREADABLE):
        return []
    if one.format == BACKEND:
        return unnamed_files(one.path)
    if one.format not in others:
        return []
    return unnamed_files(one.path) + _newer_than_index(one, others[one.format])


def _newer_than_index(one: Iteration, format: OtherFormat) -> list[UnnamedFile]:
    """Returns the data files that were written after the index; where that is missing, all files."""
    status = {}
    with os.scandir(one.path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status[entry.name] = entry.stat(follow_symlinks=False)
    status.pop(REMOVAL_NAME, None)
    published, now = status.get(format.index_name) if one.complete else None, time.time()
    return [
        UnnamedFile(one.path / name, each.st_size, now - each.st_mtime)
        for name, each in sorted(status.items())
        if published is None or (name.endswith(format.data_suffix) and each.st_mtime > published.st_mtime)
    ]


def _just_made(one: Iteration, rules: RetentionRules) -> str | None:
    """Returns why an empty directory is kept: Megatron makes it a moment before the first file of a save."""
    if is_object(one.path):
        return None  # no object, no directory
    age = time.time() - one.path.stat().st_mtime
    if one.complete or age >= rules.min_age_seconds or any(one.path.iterdir()):
        return None
    return f"a save into it may be under way: it is empty, and was last changed {age_text(age)} ago"


def _link_targets(root: Path) -> dict[str, str]:
    """Returns, for all links directly under `root`, their names by what they point to."""
    if is_object(root):
        return {}
    with os.scandir(root) as entries:
        return {os.path.realpath(entry.path): entry.name for entry in entries if entry.is_symlink()}


def _link_to(one: Iteration, linked: dict[str, str]) -> str | None:
    """Returns why a directory is kept if a link points to it, or to something in it."""
    own = os.path.realpath(one.path) if linked else ""
    names = [name for target, name in linked.items() if Path(target).is_relative_to(own)]
    return f"the link {names[0]} points to it" if names else None


def _complaint(one: Iteration, others: OtherFormats) -> str | None:
    """Returns why the rules do not apply to this directory, or None."""
    if one.path.is_symlink():
        return "a link"
    if one.path.name != iteration_name(one.number):
        return "not named as Megatron names iterations"
    try:
        is_empty = not any(one.path.iterdir())
        if not is_object(one.path):
            os.lstat(f"{one.path}/.")  # fails where names can be listed, and nothing can be opened
    except OSError as error:
        return f"{_UNREADABLE}{error.strerror}"
    if one.format != BACKEND and one.format not in others and not is_empty:  # empty: what a kill has left
        return f"its format is {one.format}"
    if not one.complete:
        return None
    try:
        return (_damage if one.format == BACKEND else others[one.format].find_fault)(one.path)
    except (DataStatesError, OSError) as error:
        return f"{_UNREADABLE}{error}" if is_denied(error) else "damaged: see datastates verify"


def _damage(path: Path) -> str | None:
    """Returns what is damaged, as far as it shows without reading data; files of Megatron's are read."""
    checkpoint = Checkpoint.open(path)
    sizes = {entry.name: entry.bytes for entry in checkpoint.manifest.files}
    if (
        bool(missing_data_files(path, checkpoint.manifest))
        if is_object(path)
        else any((path / name).stat().st_size != size for name, size in sizes.items())
    ):
        return "damaged: see datastates verify"
    for other in checkpoint.manifest.others:
        checkpoint.read_other(other.name)
    return None


def _reason(
    one: Iteration,
    undamaged: list[int],
    latest: list[int],
    tracked: int | None,
    rules: RetentionRules,
    others: OtherFormats,
) -> str | None:
    """Returns why this is kept, or None.

    Args:
        undamaged: iterations, ascending.
        latest: of them, the newest ones, newest first; those of branches that were left come last.
    """
    if one.number == tracked:
        return "the tracker names it"
    if not one.complete:
        if one.format in others and (one.path / others[one.format].index_name).exists():
            return _without_metadata(one, others[one.format])
        is_left_over = undamaged and tracked is not None and one.number < min(undamaged[-1], tracked)
        if not is_left_over:
            return (
                f"{_UNDER_WAY}{_REPAIRABLE if one.format == BACKEND and _may_be_whole(one.path) else _DEAD}"
            )
        if one.format in others:
            return None
        return "its manifest is lost: see datastates repair" if _may_be_whole(one.path) else None
    if latest[:1] == [one.number]:
        return "the newest complete one"
    if rules.keep_last is not None and one.number in latest:
        return f"one of the last {rules.keep_last}"
    if rules.keep_every is not None and one.number % rules.keep_every == 0:
        return f"a multiple of {rules.keep_every}"
    return None


def _without_metadata(one: Iteration, format: OtherFormat) -> str:
    """Returns why a directory with an index, and without metadata.json, is kept."""
    with contextlib.suppress(DataStatesError, OSError):
        if format.find_fault(one.path) is None:
            return (
                "PyTorch's DCP saved it, without metadata.json: prune leaves these alone, delete it by hand"
            )
    return f"only metadata.json is missing, beside {format.index_name}"


def _may_be_whole(path: Path) -> bool:
    """Returns whether there is an index that no earlier call of prune has left."""
    names = names_in(path)
    return REMOVAL_NAME not in names and any(name.startswith("index-") for name in names)
