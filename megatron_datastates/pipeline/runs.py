"""What lies in the directory of a run: its iterations, whatever their format, and its tracker file.

Nothing here imports torch or the native module: Megatron's processes look at other formats' directories, too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

from megatron_datastates.errors import FormatError, StorageError
from megatron_datastates.files import DOCUMENT_BYTES, TRACKER_BYTES, read_regular
from megatron_datastates.format.values import MANIFEST_NAME, METADATA_NAME, is_own_file_name

BACKEND = "datastates"
TRACKER_NAME = "latest_checkpointed_iteration.txt"
_NUMBER = re.compile(rb"[0-9]{1,18}")


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One `iter_*` directory. Links are followed by nobody who removes anything."""

    number: int
    path: Path
    format: str  # as --ckpt-format names it; "unknown" where nothing says
    complete: bool


def find_iterations(root: str | os.PathLike[str]) -> list[Iteration]:
    """All directories right under `root` that are named as Megatron names iterations, ascending.

    Raises:
        OSError: `root` cannot be listed.
    """
    found = []
    with os.scandir(root) as entries:
        for entry in entries:
            match = re.fullmatch(r"iter_(\d+)", entry.name, re.ASCII)
            if match and entry.is_dir():
                found.append(_looked_at(int(match[1]), Path(entry.path)))
    return sorted(found, key=lambda one: (one.number, one.path.name))


def _looked_at(number: int, path: Path) -> Iteration:
    backend = stored_backend(path)
    if backend not in (None, BACKEND):
        return Iteration(number, path, str(backend), complete=True)
    try:
        names = os.listdir(path)
    except OSError:
        return Iteration(number, path, "unknown", complete=False)
    if backend is None and any(name == ".metadata" or name.endswith(".distcp") for name in names):
        return Iteration(number, path, "torch_dist", complete=False)
    if MANIFEST_NAME in names:
        return Iteration(number, path, BACKEND, complete=True)
    is_ours = backend == BACKEND or any(map(is_own_file_name, names))
    return Iteration(number, path, BACKEND if is_ours else "unknown", complete=False)


def stored_backend(directory: str | os.PathLike[str]) -> str | None:
    """The format that a checkpoint's metadata.json names; None if there is none that can be read."""
    try:
        backend = json.loads(read_regular(Path(directory) / METADATA_NAME, DOCUMENT_BYTES))["sharded_backend"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return backend if isinstance(backend, str) else None


def tracked_iteration(tracker: Path) -> int | None:
    """The iteration that a tracker file names; None if there is no such file, or no number in it."""
    try:
        return _named_in(read_regular(tracker, TRACKER_BYTES))
    except OSError:
        return None


def require_tracked(tracker: Path) -> int | None:
    """The same for those who remove what no tracker names: None only without a tracker, or for `release`.

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
        raise StorageError(f"the tracker {tracker} cannot be read: {error.strerror}; {advice}") from error
    named = _named_in(text)
    if named is None and text.strip() != b"release":
        raise FormatError(f"the tracker {tracker} holds neither a number nor 'release': {advice}")
    return named


def _named_in(text: bytes) -> int | None:
    return int(text) if _NUMBER.fullmatch(text.strip()) else None


def stored_bytes(directory: Path) -> int:
    """Of all files below it. What vanishes meanwhile is not counted."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(Path(folder) / name).st_size
            except FileNotFoundError:
                continue
    return total
