"""Checkpoints that --ckpt-step or a tracker names and that are not there: the error names those that are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from megatron_datastates.errors import DataStatesError, NotACheckpointError, StorageError
from megatron_datastates.files import names_in
from megatron_datastates.format.directory import (
    RELEASE_NAME,
    TRACKER_NAME,
    iteration_in_name,
    iteration_name,
)
from megatron_datastates.pipeline.runs.run_folders import checkpoint_directories
from megatron_datastates.pipeline.runs.runs import find_iterations, is_named_by_megatron
from megatron_datastates.pipeline.runs.tracker import tracked_name


def problem_of_chosen(run: Path, wanted: int) -> DataStatesError | None:
    """Returns the error if a run has no such iteration; None if it has, or has no tracker.

    None also if the tracker says `release`, which Megatron then loads whatever iteration is chosen.
    """
    name = iteration_name(wanted)
    try:
        is_there = _is_empty(run / name) is False  # a failed save leaves an empty one
        if not (run / TRACKER_NAME).exists() or is_there or tracked_name(run) == RELEASE_NAME:
            return None
        found = [one for one in find_iterations(run) if is_named_by_megatron(one.path)]
        complete = [one.number for one in found if one.complete]
    except (OSError, StorageError) as error:
        return StorageError(
            f"--ckpt-step {wanted}: expected {name} in {run}, which rank 0 cannot read: {error}. Check that "
            "the file system is mounted and that its permissions allow it"
        )
    choice = "Choose one of them, or leave --ckpt-step out to load the newest one"
    return NotACheckpointError(
        f"--ckpt-step {wanted}: expected {name} in {run}, found {_listed(complete, choice)}"
    )


def _listed(iterations: Sequence[int], choice: str) -> str:
    """Returns what was found and what to do about it: with iterations that were found, `choice`."""
    if not iterations:
        return "no iteration. Restore what is missing, or load from another directory (--load)"
    return f"the iterations {', '.join(map(str, iterations))}. {choice}"


def require_there(directory: Path, wanted: int | None) -> None:
    """Checks that what the tracker or --ckpt-step names is there, when Megatron has failed to list it.

    Each rank does so, all at once. So each lists the run, and looks at no checkpoint that it finds: of those
    that the error names, one may be incomplete.

    Raises:
        MegatronLoadFailedError (from a NotACheckpointError): it is not, or has nothing in it.
    """
    from megatron_datastates.mcore.errors import load_errors

    with contextlib.suppress(OSError):  # Megatron's own error says why
        is_empty = _is_empty(directory)
        if is_empty is False:
            return
        run = directory.parent
        named = filter(is_named_by_megatron, checkpoint_directories(run))
        numbers = (iteration_in_name(path.name) for path in named if path.name != directory.name)
        there = [number for number in numbers if number is not None]
        choice = "Choose one with --ckpt-step, or restore what is missing"
        empty = "that directory empty, and " if is_empty else ""
        is_chosen = wanted is not None and directory.name == iteration_name(wanted)
        who = f"--ckpt-step {wanted}" if is_chosen else f"the tracker {run / TRACKER_NAME}"
        with load_errors():
            raise NotACheckpointError(
                f"{who} names a checkpoint that is not there: expected {directory.name} in {run}, found "
                f"{empty}{_listed(there, choice)}."
            )


def _is_empty(directory: Path) -> bool | None:
    """Returns whether a directory is empty, as a deletion leaves it that was ended; None if there is none."""
    try:
        return not names_in(directory)
    except FileNotFoundError:
        return None
    except PermissionError:  # to list it; its files may be read all the same
        return False
