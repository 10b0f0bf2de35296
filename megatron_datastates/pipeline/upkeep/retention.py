"""Decides which checkpoints of a run, and which left-over files, are removed; removes nothing (prune.py).

Always kept: the newest complete checkpoint; the one that the tracker names; directories in a format that
the caller does not describe (OtherFormats), damaged ones, links, and what a link points to; and every
directory that a save may be writing to. Those are directories with files of ours that no manifest names and
that are younger than MIN_AGE_SECONDS, empty ones that are younger, and directories without a manifest of any
age, unless both the tracker and a complete checkpoint are newer, and the tracker was written after their
files: then a crash left them. (Files that are old show no crash: a save that has written all of them waits
for a fence and for polls, and training may stand still for hours between these, as in an evaluation. After a
rollback, the tracker goes on naming a later iteration until the first save is published.) Even of these, one
with an index is kept: the index is written after all ranks are durable, so perhaps only the manifest is lost,
which `repair` rebuilds.

A complete checkpoint that is newer than the tracker may be one that it is about to name, and after a rollback
it need not be the newest one. It is kept until it is MIN_AGE_SECONDS old; and at any age if it is known to be
of another branch than the tracked one, as Megatron may write the tracker at a poll, hours later.

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
from megatron_datastates.files import Status, is_denied, is_object, names_in, path_of, status_of
from megatron_datastates.format.directory import (
    BACKEND,
    METADATA_NAME,
    REMOVAL_NAME,
    TORCH_DIST_INDEX,
    iteration_name,
)
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publishing.presence import missing_data_files
from megatron_datastates.pipeline.runs.branches import known_point
from megatron_datastates.pipeline.runs.history import by_branch
from megatron_datastates.pipeline.runs.jobs import JOBS_NAME
from megatron_datastates.pipeline.runs.run_folders import why_no_run
from megatron_datastates.pipeline.runs.runs import (
    Iteration,
    find_answered,
    find_iterations,
    format_seen,
    is_complete,
    is_named_by_megatron,
)
from megatron_datastates.pipeline.runs.tracker import Tracker, read_tracker
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
_SINCE = "incomplete: its save may be under way, as it has written files since the tracker was written. "
TRACKED_NEXT = "it was published after the tracker was written, which may name it next"
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
        """Returns the rules with a least age that is longer by what this machine's clock is ahead there."""
        return dataclasses.replace(self, min_age_seconds=self.min_age_seconds + clock_ahead(directory))


# Of torch_dist, or of none: returns what is damaged in a checkpoint; raises errors of what cannot be read.
OtherFormats = Mapping[str, Callable[[Path], str | None]]
NO_OTHERS: OtherFormats = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class PrunePlan:
    """What is removed, and why the rest is kept; oldest first."""

    removed: list[Iteration]
    kept: list[tuple[Iteration, str]]
    left_overs: list[UnnamedFile]  # removed from directories that are kept; and uploads that have not ended
    note: str  # what could not be looked for
    basis: _Basis  # for a second decision


def plan_prune(
    root: str | os.PathLike[str],
    rules: RetentionRules,
    others: OtherFormats = NO_OTHERS,
    again: tuple[Iteration, PrunePlan] | None = None,
) -> PrunePlan:
    """Decides about all iterations directly under `root`.

    Args:
        others: given for torch_dist if the rules apply to its checkpoints, too.
        again: one of a plan's, to decide about it alone, and the last plan or decision. The others are looked
            at again only if something has changed since that which may keep it, and not for damage.

    Raises:
        StorageError: `root` cannot be listed, or its tracker cannot be read.
        FormatError: the tracker is damaged, so any checkpoint may be the one that it should name.
        NotACheckpointError: there is no iteration.
    """
    path = path_of(root)
    basis = None if again is None else _unchanged(path, rules, others, *again)
    basis = basis or _look(path, rules, others, again)
    plan = PrunePlan([], [], _old_enough(basis.uploads, rules), basis.note, basis)
    for iteration in basis.iterations:
        with contextlib.suppress(FileNotFoundError):  # somebody else has removed it meanwhile
            unnamed = _unnamed(iteration, basis)
            why = _reason(iteration, basis) or _save_under_way(iteration, unnamed, basis)
            if why is None:
                plan.removed.append(iteration)
                continue
            plan.kept.append((iteration, why))
            if (
                iteration.format == BACKEND
                and iteration.complete
                and basis.complaints[iteration.path] is None
            ):
                plan.left_overs.extend(_old_enough(unnamed, rules))
    return plan


@dataclasses.dataclass(frozen=True)
class _Basis:
    """What the decisions about all directories of a run depend on."""

    rules: RetentionRules
    others: OtherFormats
    iterations: list[Iteration]  # that are decided about
    complaints: dict[Path, str | None]  # why the rules do not apply to one of these
    tracker: Tracker
    links: dict[str, str]  # in the run's directory, their names, by what they point to
    uploads: list[UnnamedFile]  # to an object store, that have not ended
    note: str  # what could not be looked for
    undamaged: list[int]  # iterations, ascending
    latest: list[int]  # of them, the newest ones, newest first; those of branches that were left come last
    relied_on: dict[Path, Status | None]  # what lets others be removed, as it was before the look


def _look(
    path: Path, rules: RetentionRules, others: OtherFormats, again: tuple[Iteration, PrunePlan] | None
) -> _Basis:
    """Looks at all iterations of a run; for damage only at those that are decided about."""
    seen = {} if is_object(path) else _statuses(path)
    try:
        if is_object(path):
            found, links, (uploads, note) = find_answered(path), {}, unfinished_uploads(path)
        else:
            found = [_seen(one, others) for one in find_iterations(path)]
            links, uploads, note = _links(path), [], ""
    except OSError as error:
        where = str(error.filename or path)
        verb = "listed" if where == str(path) else "read"
        raise StorageError(f"{where} cannot be {verb}: {error.strerror}") from error
    if not found and not uploads:
        raise NotACheckpointError(why_no_run(path, or_else=""))
    tracker = read_tracker(path)
    wanted = [one for one in found if again is None or one.path == again[0].path]
    complaints = {one.path: _complaint(one, others) for one in wanted}
    known = [] if again is None else again[1].basis.undamaged
    undamaged = {
        one.number: one.path
        for one in found
        if one.complete and (complaints[one.path] is None if one.path in complaints else one.number in known)
    }
    latest = by_branch(path, undamaged, rules.keep_last or 1)
    numbers = sorted(undamaged)
    # Which are the latest ones depends on the tracked one, too, and on the list of jobs: a job may have gone
    # back to an older one.
    needed = [undamaged[number] for number in {*latest, *numbers[-1:]}]
    tracked = path / iteration_name(tracker.iteration or 0)
    relied_on = {where: seen.get(where) for where in (path / JOBS_NAME, tracked, *needed)}
    return _Basis(
        rules, others, wanted, complaints, tracker, links, uploads, note, numbers, latest, relied_on
    )


def _statuses(run: Path) -> dict[Path, Status | None]:
    try:
        return {run / name: status_of(run / name) for name in os.listdir(run)}
    except OSError:
        return {}  # the listing raises it


def _unchanged(
    path: Path, rules: RetentionRules, others: OtherFormats, one: Iteration, last: PrunePlan
) -> _Basis | None:
    """Returns what a second decision about one directory depends on; None if all have to be looked at again.

    A run may have thousands: to look at all of them before each removal would take longer than the removals.
    What may keep a directory that was to be removed is in itself, a link to it, another tracker, another job
    that has begun to save, or a change of what is kept in its place. Newer checkpoints, which a job saves
    meanwhile, do not.
    """
    basis = last.basis
    if is_object(path):
        return None
    try:
        tracker, links = read_tracker(path), _links(path)
        if tracker != basis.tracker:
            return None
        if any(status_of(where) != status for where, status in basis.relied_on.items()):
            return None
        is_there = status_of(one.path) is not None
    except (OSError, DataStatesError):  # a look at all of them says more
        return None
    found = Iteration(one.number, one.path, format_seen(one.path), is_complete(one.path))
    iterations = [_seen(found, others)] if is_there else []
    complaints = {each.path: _complaint(each, others) for each in iterations}
    return dataclasses.replace(
        basis, rules=rules, others=others, iterations=iterations, complaints=complaints, links=links
    )


def _old_enough(files: list[UnnamedFile], rules: RetentionRules) -> list[UnnamedFile]:
    return [file for file in files if file.age_seconds >= rules.min_age_seconds]


def _seen(iteration: Iteration, others: OtherFormats) -> Iteration:
    """Returns a checkpoint of another format as incomplete if a removal of it has begun."""
    if iteration.format not in others or not iteration.complete:
        return iteration
    is_removed = (iteration.path / REMOVAL_NAME).exists() and not (iteration.path / TORCH_DIST_INDEX).exists()
    return dataclasses.replace(iteration, complete=not is_removed)


def _unnamed(iteration: Iteration, basis: _Basis) -> list[UnnamedFile]:
    """Returns the files that may be those of a save that is under way."""
    if iteration.path.is_symlink() or (basis.complaints[iteration.path] or "").startswith(_UNREADABLE):
        return []
    if iteration.format == BACKEND:
        return unnamed_files(iteration.path)
    if iteration.format not in basis.others:
        return []
    return unnamed_files(iteration.path) + _newer_than_index(iteration.path)


def _newer_than_index(path: Path) -> list[UnnamedFile]:
    """Returns the data files that were written after the index; where that is missing, all files."""
    status = {}
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status[entry.name] = entry.stat(follow_symlinks=False)
    published, now = status.get(TORCH_DIST_INDEX), time.time()
    return [
        UnnamedFile(path / name, each.st_size, now - each.st_mtime)
        for name, each in sorted(status.items())
        if published is None or (name.endswith(".distcp") and each.st_mtime > published.st_mtime)
    ]


def _links(root: Path) -> dict[str, str]:
    """Returns, for all links directly under `root`, their names by what they point to."""
    with os.scandir(root) as entries:
        return {os.path.realpath(entry.path): entry.name for entry in entries if entry.is_symlink()}


def _complaint(iteration: Iteration, others: OtherFormats) -> str | None:
    """Returns why the rules do not apply to this directory, or None."""
    if iteration.path.is_symlink():
        return "a link"
    if not is_named_by_megatron(iteration.path):
        return "not named as Megatron names iterations"
    try:
        is_empty = not any(iteration.path.iterdir())
        if not is_object(iteration.path):
            os.lstat(f"{iteration.path}/.")  # fails where names can be listed, and nothing can be opened
    except OSError as error:
        return f"{_UNREADABLE}{error.strerror}"
    if iteration.format not in (BACKEND, *others) and not is_empty:  # empty: what a kill has left
        return f"its format is {iteration.format}"
    if not iteration.complete:
        return None
    try:
        return (_damage if iteration.format == BACKEND else others[iteration.format])(iteration.path)
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


def _reason(iteration: Iteration, basis: _Basis) -> str | None:
    """Returns why this is kept whatever files are in it, or None."""
    if (complaint := basis.complaints[iteration.path]) is not None:
        return complaint
    if iteration.number == basis.tracker.iteration:
        return "the tracker names it"
    why = (_reason_of_complete if iteration.complete else _reason_of_incomplete)(iteration, basis)
    return why or _link_to(iteration, basis.links)


def _reason_of_complete(iteration: Iteration, basis: _Basis) -> str | None:
    """Returns which rule keeps a complete checkpoint, or None."""
    keep_last, keep_every = basis.rules.keep_last, basis.rules.keep_every
    if basis.latest[:1] == [iteration.number]:
        return "the newest complete one"
    if keep_last is not None and iteration.number in basis.latest:
        return f"one of the last {keep_last}"
    if keep_every is not None and iteration.number % keep_every == 0:
        return f"a multiple of {keep_every}"
    # Of another format not the index, which --drop-optimizer writes anew.
    last = iteration.path / (METADATA_NAME if iteration.format in basis.others else MANIFEST_NAME)
    if may_be_tracked_next(last, iteration.number, basis.tracker, basis.rules.min_age_seconds):
        return TRACKED_NEXT
    return None


def may_be_tracked_next(last: Path, iteration: int, tracker: Tracker, min_age_seconds: float) -> bool:
    """Returns whether a complete checkpoint may have been published so lately that no tracker names it yet.

    Args:
        last: the file that is written last when it is published.
        min_age_seconds: 0 if no job runs, which would write the tracker.
    """
    if not min_age_seconds:
        return False
    try:
        published_at = last.stat().st_mtime
    except FileNotFoundError:
        return False
    if not 0 < tracker.written_at < published_at:
        return False
    point = known_point(last.parent, iteration)
    if point is None or point.is_without_optimizer:  # its manifest was written anew since
        return False
    if time.time() - published_at < min_age_seconds:
        return True
    if tracker.iteration is None:
        return False
    tracked = known_point(last.parent.parent / iteration_name(tracker.iteration), tracker.iteration)
    return tracked is not None and point.is_apart_from(tracked)


def _reason_of_incomplete(iteration: Iteration, basis: _Basis) -> str | None:
    """Returns why an incomplete checkpoint is kept; None if a crash left it, and nothing can repair it."""
    find_fault, tracked = basis.others.get(iteration.format), basis.tracker.iteration
    if find_fault is not None and (iteration.path / TORCH_DIST_INDEX).exists():
        return _without_metadata(iteration.path, find_fault)
    may_be_repaired = find_fault is None and _may_be_whole(iteration.path)
    if not basis.undamaged or tracked is None or iteration.number >= min(basis.undamaged[-1], tracked):
        return f"{_UNDER_WAY}{_REPAIRABLE if may_be_repaired else _DEAD}"
    return "its manifest is lost: see datastates repair" if may_be_repaired else None


def _link_to(iteration: Iteration, links: dict[str, str]) -> str | None:
    """Returns why a directory is kept if a link points to it, or to something in it."""
    own = os.path.realpath(iteration.path) if links else ""
    names = [name for target, name in links.items() if Path(target).is_relative_to(own)]
    return f"the link {names[0]} points to it" if names else None


def _save_under_way(iteration: Iteration, unnamed: list[UnnamedFile], basis: _Basis) -> str | None:
    """Returns why a save may be writing to this directory, or None."""
    own_uploads = [upload for upload in basis.uploads if upload.path.parent == iteration.path]
    if (why := under_way([*unnamed, *own_uploads], basis.rules.min_age_seconds)) is not None:
        return why
    tracker_age = time.time() - basis.tracker.written_at
    may_be_new = not iteration.complete and not (iteration.path / REMOVAL_NAME).exists()
    if may_be_new and any(file.age_seconds < tracker_age for file in unnamed):
        return f"{_SINCE}{_DEAD}"
    if is_object(iteration.path):
        return None  # no object, no directory
    age = time.time() - iteration.path.stat().st_mtime
    if iteration.complete or age >= basis.rules.min_age_seconds or any(iteration.path.iterdir()):
        return None  # a directory is made a moment before the first file of a save
    return f"a save into it may be under way: it is empty, and was last changed {age_text(age)} ago"


def _without_metadata(path: Path, find_fault: Callable[[Path], str | None]) -> str:
    """Returns why a directory with an index, and without metadata.json, is kept."""
    with contextlib.suppress(DataStatesError, OSError):
        if find_fault(path) is None:
            return (
                "PyTorch's DCP saved it, without metadata.json: prune leaves these alone, delete it by hand"
            )
    return f"only metadata.json is missing, beside {TORCH_DIST_INDEX}"


def _may_be_whole(path: Path) -> bool:
    """Returns whether there is an index that no earlier call of prune has left."""
    names = names_in(path)
    return REMOVAL_NAME not in names and any(name.startswith("index-") for name in names)
