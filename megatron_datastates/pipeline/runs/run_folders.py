"""Which checkpoint of a run is meant: the one that its tracker names, or that of an iteration.

Nothing here imports torch or the native module.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from pathlib import Path

from megatron_datastates.errors import NotACheckpointError, OptionError, StorageError, some_of
from megatron_datastates.files import folders_in, is_object, names_in
from megatron_datastates.format.directory import (
    NON_PERSISTENT_NAME,
    RELEASE_NAME,
    TORCH_DIST_INDEX,
    TRACKER_NAME,
    iteration_in_name,
    iteration_name,
)
from megatron_datastates.format.values import MANIFEST_NAME, is_of_a_checkpoint
from megatron_datastates.pipeline.runs.runs import stored_backend
from megatron_datastates.pipeline.runs.tracker import read_tracked, tracked_iteration, tracked_name

_MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The directory of a checkpoint, and how it was found in a run; empty if it was given itself."""

    directory: Path
    how: str = ""


def choose_checkpoint(directory: Path, iteration: int | None = None) -> Chosen:
    """Returns the checkpoint that a directory stands for: itself, or one of the run that it holds.

    Args:
        iteration: of the run; by default the one that its tracker names.

    Raises:
        OptionError: an iteration is given for what is no run.
        NotACheckpointError: the run has no such iteration, or no tracker that names one.
        StorageError: the directory cannot be listed, or its tracker cannot be read.
    """
    if not is_run(directory):
        if iteration is not None and directory.is_dir():
            raise OptionError(f"--iteration {iteration}: {why_no_run(directory, 'leave --iteration out')}")
        return Chosen(directory)
    if iteration is not None:
        found = directory / iteration_name(iteration)
        if not has_folder(directory, found.name):
            raise NotACheckpointError(
                f"{directory} has no iteration {iteration}: {_what_there_is(directory)}"
            )
        return Chosen(found, f"iteration {iteration} of {directory}")
    name = tracked_name(directory)
    if name is None:
        raise NotACheckpointError(
            f"{directory} is a run whose {TRACKER_NAME} is missing or names no checkpoint: choose one by "
            f"--iteration; {_what_there_is(directory)}"
        )
    if not has_folder(directory, name):
        raise NotACheckpointError(
            f"{directory / TRACKER_NAME} names {name}, which is missing: choose another by --iteration; "
            f"{_what_there_is(directory)}"
        )
    return Chosen(directory / name, f"{directory / name}, which the tracker of the run names")


def is_run(directory: Path) -> bool:
    """Returns whether a directory holds checkpoints, or a tracker, and is no checkpoint itself.

    Raises:
        StorageError: it cannot be listed.
    """
    try:
        names = names_in(directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _not_listed(directory, error) from error
    if _is_checkpoint(directory, names):
        return False
    return TRACKER_NAME in names or any(is_checkpoint_name(name) for name in names)


def _is_checkpoint(directory: Path, names: Collection[str]) -> bool:
    return bool(TORCH_DIST_INDEX in names or any(map(is_of_a_checkpoint, names)) or stored_backend(directory))


def has_folder(run: Path, name: str) -> bool:
    """Returns whether there is a directory of this name in a run's.

    Raises:
        StorageError: that cannot be seen, as while a store does not answer.
    """
    try:
        return bool(folders_in(run, lambda one: one == name))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _not_listed(run, error) from error


def _not_listed(directory: Path, error: OSError) -> StorageError:
    return StorageError.of(error, directory, f"{directory} cannot be listed: {error.strerror}")


def why_no_run(directory: Path, or_else: str = "use `datastates show`") -> str:
    """Says, for commands that need a run, what a directory without iterations is, or has, instead.

    Args:
        or_else: what can be done with a checkpoint; may be empty.
    """
    with contextlib.suppress(OSError):
        if _is_checkpoint(directory, names_in(directory)):
            above = (directory if is_object(directory) else directory.absolute()).parent
            advice = f"give {above} if that is one{or_else and f', or {or_else}'}"
            return f"{directory} is a checkpoint, not the directory of a run: {advice}"
    return f"{directory} is not the directory of a run: it has no directory iter_*{what_is_below(directory)}"


def what_is_below(directory: Path) -> str:
    """Returns, for messages, which runs a directory has, or checkpoints of other names; or nothing."""
    try:
        names = sorted(name for name in folders_in(directory) if not is_checkpoint_name(name))
        checkpoints = [name for name in names if (directory / name / MANIFEST_NAME).is_file()]
    except OSError:
        return ""
    if checkpoints:
        return f". It has checkpoints of other names: {some_of(checkpoints, _MOST_NAMED)}"
    runs = [] if is_object(directory) else [directory / name for name in names]  # each costs requests
    runs = [path for path in runs if _is_seen_as_run(path)]
    return f". It has runs: {some_of([str(path) for path in runs], _MOST_NAMED)}" if runs else ""


def _is_seen_as_run(path: Path) -> bool:
    try:
        return is_run(path)
    except StorageError:
        return False


def is_checkpoint_name(name: str) -> bool:
    """Returns whether Megatron gives this name to a checkpoint of a run: `iter_0000100`, or `release`."""
    return name == RELEASE_NAME or iteration_in_name(name) is not None


def checkpoint_directories(run: Path) -> list[Path]:
    """Returns the directories of all checkpoints of a run, in order: `release`, then iterations.

    Raises:
        OSError: the run cannot be listed.
    """
    names = folders_in(run, is_checkpoint_name)
    names.sort(key=lambda name: (iteration_in_name(name) or 0, name != RELEASE_NAME, name))
    return [run / name for name in names]


@dataclasses.dataclass(frozen=True)
class NonPersistent:
    """A run's non-persistent checkpoints, where Megatron saves them by default."""

    directory: Path
    iteration: int  # that their own tracker names, the newest
    is_resumed: bool  # with --non-persistent-ckpt-type global, in place of what the run's tracker names


def non_persistent_in(run: Path) -> NonPersistent | None:
    """Returns a run's non-persistent checkpoints; None if Megatron would resume from none of them.

    They are in no object store.

    Raises:
        StorageError: their tracker may be there and cannot be read.
    """
    directory = run / NON_PERSISTENT_NAME
    tracker = directory / TRACKER_NAME
    try:
        newest = None if is_object(run) else read_tracked(tracker)
    except NotADirectoryError:
        return None
    except OSError as error:
        text = f"the non-persistent checkpoints: {tracker} cannot be read: {error.strerror}"
        raise StorageError.of(error, tracker, text) from error
    if newest is None:
        return None
    return NonPersistent(directory, newest, newest >= (tracked_iteration(run / TRACKER_NAME) or 0))


def _what_there_is(run: Path) -> str:
    try:
        names = [path.name for path in checkpoint_directories(run)]
    except OSError:
        names = []
    numbers = {name: number for name in names if (number := iteration_in_name(name)) is not None}
    # By name if it is not as Megatron writes it: no command finds it by its number.
    found = [str(number) if name == iteration_name(number) else name for name, number in numbers.items()]
    few = found if len(found) <= _MOST_NAMED else [found[0], "...", *found[2 - _MOST_NAMED :]]
    return f"it has {', '.join(few)}" if found else "it has none"
