"""What the tracker of a run names: Megatron's file beside its iterations, which says what to resume from.

`tracked_iteration` takes a tracker that cannot be read for none. The others raise: nothing may be removed or
called absent for want of an answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

from megatron_datastates.errors import FormatError, StorageError
from megatron_datastates.files import TRACKER_BYTES, is_denied, read_regular
from megatron_datastates.format.directory import RELEASE_NAME, TRACKER_NAME, iteration_name

_NAMED = re.compile(rb"(iter_)?([0-9]{1,18})")


@dataclasses.dataclass(frozen=True)
class Tracker:
    """What a tracker says, and when it was written."""

    iteration: int | None
    written_at: float  # by the file system's clock; 0 if there is no tracker


def tracked_iteration(tracker: Path) -> int | None:
    """Returns the iteration that a tracker file names; None if there is no such file, or no number in it."""
    with contextlib.suppress(OSError):
        return read_tracked(tracker)
    return None


def read_tracked(tracker: Path) -> int | None:
    """Returns the iteration that a tracker file names; None if there is no such file, or no number in it.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        return iteration_named(read_regular(tracker, TRACKER_BYTES))
    except FileNotFoundError:
        return None


def tracked_name(run: Path) -> str | None:
    """Returns the name of the directory that a run's tracker names; None without a tracker that names one.

    Raises:
        StorageError: it is there and cannot be read.
    """
    tracker = run / TRACKER_NAME
    try:
        text = read_regular(tracker, TRACKER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError.of(error, tracker, f"{tracker} cannot be read: {error.strerror}") from error
    number = iteration_named(text)
    if number is not None:
        return iteration_name(number)
    return RELEASE_NAME if text.strip() == RELEASE_NAME.encode() else None


def require_tracked(tracker: Path) -> int | None:
    """Returns the iteration that a tracker names, for callers that remove what is not tracked.

    None without a tracker, or if it says `release`.

    Raises:
        StorageError: it is there and cannot be read.
        FormatError: it says something else, or nothing.
    """
    advice = "correct it, or remove it if no checkpoint beside it is to be resumed from"
    try:
        text = read_regular(tracker, TRACKER_BYTES)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not tracker.is_symlink():
            return None
        more = "" if is_denied(error) else f"; {advice}"
        raise StorageError(f"the tracker {tracker} cannot be read: {error.strerror}{more}") from error
    named = iteration_named(text)
    if named is None and text.strip() != RELEASE_NAME.encode():
        raise FormatError(f"the tracker {tracker} holds neither a number nor 'release': {advice}")
    return named


def read_tracker(run: Path) -> Tracker:
    """Reads the tracker of a run. Raises as require_tracked."""
    tracker, written_at = run / TRACKER_NAME, 0.0
    try:
        written_at = tracker.stat().st_mtime  # first: if it is replaced meanwhile, its age protects more
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StorageError(f"the tracker {tracker} cannot be read: {error.strerror}") from error
    return Tracker(require_tracked(tracker), written_at)


def iteration_named(text: bytes) -> int | None:
    """Returns the iteration that a tracker's content names; None if it names none.

    People write the name of its directory, too.
    """
    match = _NAMED.fullmatch(text.strip())
    return int(match[2]) if match else None


def is_read_by_megatron(text: bytes) -> bool:
    """Returns whether Megatron can read a tracker's content: a number, or `release`."""
    match = _NAMED.fullmatch(text.strip())
    return match[1] is None if match else text.strip() == RELEASE_NAME.encode()
