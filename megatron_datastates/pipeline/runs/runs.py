"""What lies in the directory of a run: its iterations, and the format of each.

A checkpoint has the format that its metadata.json names. It is also ours if it has our manifest, if
metadata.json is missing or torch_dist's, and if there is no index of torch_dist: then a save was published,
and the process died before metadata.json was written. It is complete. Where there is no metadata.json at all,
as DCP's own saves and ours of programs write none, an index of torch_dist that our manifest has replaced does
not count either.

Nothing here imports torch or the native module: Megatron's processes look at other formats' directories, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_datastates import stores
from megatron_datastates.errors import DataStatesError, FormatError, NotACheckpointError, StorageError
from megatron_datastates.files import (
    DOCUMENT_BYTES,
    MANIFEST_BYTES,
    any_path,
    folders_in,
    is_denied,
    is_object,
    names_in,
    open_regular,
    path_of,
    read_regular,
    sha256_of,
)
from megatron_datastates.format.directory import (
    BACKEND,
    COMMON_FILE,
    LEGACY,
    LEGACY_FILE,
    LEGACY_FOLDER,
    METADATA_NAME,
    TORCH_DIST,
    TORCH_DIST_INDEX,
    is_of_a_format,
    iteration_in_name,
    iteration_name,
)
from megatron_datastates.format.values import MANIFEST_NAME, is_own_file_name

# What is there is no document: a directory, a pipe, or far too large.
_NO_DOCUMENT = (errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG)


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One `iter_*` directory, or a link to one. Code that removes files does not follow links."""

    number: int
    path: Path
    format: str  # as --ckpt-format names it; "unknown" where nothing says
    complete: bool


def find_iterations(root: str | os.PathLike[str]) -> list[Iteration]:
    """Returns all directories right under `root` that are named as Megatron names iterations, ascending.

    Raises:
        OSError: `root` cannot be listed.
    """
    return [
        Iteration(number, path, format_seen(path), is_complete(path)) for number, path in _directories(root)
    ]


def find_answered(root: str | os.PathLike[str]) -> list[Iteration]:
    """Returns the iterations in an object store, for callers that remove: only an answer says what is absent.

    Complete are those that have a manifest of ours.

    Raises:
        OSError: `root` cannot be listed, or the store does not answer a request for an object below it.
    """
    return [
        Iteration(number, path, format_answered(path), has_file(path / MANIFEST_NAME))
        for number, path in _directories(root)
    ]


def _directories(root: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    names = folders_in(root, lambda name: iteration_in_name(name) is not None)
    return sorted((iteration_in_name(name) or 0, path_of(root) / name) for name in names)


def complete_in(root: str | os.PathLike[str]) -> dict[int, Path]:
    """Returns the directories of all complete checkpoints under `root` that Megatron loads, by iteration.

    Raises:
        OSError: `root` cannot be listed, or one of them cannot be looked at: it may be the newest.
    """
    return {
        number: path
        for number, path in _directories(root)
        if is_named_by_megatron(path)
        and (has_file(path / MANIFEST_NAME) or _answered_backend(path) not in (None, BACKEND))
    }


def is_named_by_megatron(path: Path) -> bool:
    """Returns whether an iteration's directory is named as Megatron names it: at least seven digits."""
    return path.name == iteration_name(iteration_in_name(path.name) or 0)


def format_seen(path: Path) -> str:
    """Returns the format of a directory, also where nothing but files of an unfinished save says it."""
    return format_of(path) or _format_by_names(path)


def format_answered(path: Path) -> str:
    """Returns the format of a directory in an object store.

    Raises:
        OSError: the store does not answer what decides.
    """
    backend = _answered_backend(path)
    if backend and backend != TORCH_DIST:
        return backend
    if has_file(path / TORCH_DIST_INDEX):
        return TORCH_DIST
    return BACKEND if has_file(path / MANIFEST_NAME) else backend or _format_by_names(path)


def _format_by_names(path: Path) -> str:
    try:
        names = names_in(path)
    except OSError:
        return "unknown"
    if any(name.endswith(".distcp") for name in names):
        return TORCH_DIST
    if any(map(is_own_file_name, names)):
        return BACKEND
    # Megatron puts states of data loaders into such folders, too, whatever the format.
    folders = [path / name for name in names if name.startswith(LEGACY_FOLDER)]
    try:
        return LEGACY if any(has_file(folder / LEGACY_FILE) for folder in folders) else "unknown"
    except OSError:
        return "unknown"


def format_of(directory: str | os.PathLike[str]) -> str | None:
    """Returns the format that a directory is read in, by the rule above; None if nothing says."""
    backend = stored_backend(directory)
    if backend not in (None, TORCH_DIST):
        return backend
    index = any_path(directory) / TORCH_DIST_INDEX
    if index.is_file() if is_object(index) else os.path.exists(index):  # noqa: PTH110 - which raises nothing
        return BACKEND if backend is None and _has_replaced(directory) else TORCH_DIST
    return BACKEND if is_published(directory) else backend


def _has_replaced(directory: str | os.PathLike[str]) -> bool:
    """Returns whether our manifest names the index of torch_dist beside it as what it replaced."""
    from megatron_datastates.format.manifest import Manifest

    path = any_path(directory)
    if is_object(path) or not is_published(path):
        return False
    name = path / MANIFEST_NAME
    try:
        replaced = Manifest.decode(read_regular(name, MANIFEST_BYTES), str(name)).replaced
        return isinstance(replaced, str) and replaced == sha256_of(path / TORCH_DIST_INDEX)
    except (OSError, DataStatesError):
        return False


def require_counts(directory: Path) -> None:
    """Checks that a published checkpoint is what its directory is read as.

    Raises:
        NotACheckpointError: a checkpoint of another format is there, too, and counts.
    """
    if is_object(directory) or not (directory / TORCH_DIST_INDEX).exists():
        return
    if format_of(directory) == TORCH_DIST:
        is_named = stored_backend(directory) is not None
        which = (
            f"names {TORCH_DIST}, so Megatron loads the former" if is_named else "does not say which counts"
        )
        at = _written(directory / TORCH_DIST_INDEX), _written(directory / MANIFEST_NAME)
        raise NotACheckpointError(
            f"{directory} holds two checkpoints: {TORCH_DIST_INDEX} is of torch_dist or DCP, and no save of "
            f"ours has replaced it. {TORCH_DIST_INDEX} was written {at[0]}, {MANIFEST_NAME} {at[1]}; "
            f"{METADATA_NAME} {which}. Load the former with DCP's FileSystemReader or after `datastates "
            f"convert`. To keep only the former, remove {MANIFEST_NAME}; to keep only the latter, remove "
            f"{f'{METADATA_NAME} and ' if is_named else ''}{TORCH_DIST_INDEX}"
        )


def _written(path: Path) -> str:
    try:
        at = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
    except OSError:
        return "at an unknown time"
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def require_readable(directory: str | os.PathLike[str]) -> None:
    """Checks that permissions let this process read a checkpoint: its directory, and all files of a format.

    Raises:
        StorageError: they do not.
    """
    path = path_of(directory)
    if is_object(path):
        return  # reading it says so
    try:
        for name in os.listdir(path):
            if is_of_a_format(name) or name == COMMON_FILE:
                open_regular(path / name).close()
    except OSError as error:
        if not is_denied(error):
            return
        where = error.filename or path
        raise StorageError.of(error, where, f"{where} cannot be read: {error.strerror}") from error


def is_ours(directory: str | os.PathLike[str]) -> bool:
    """Returns whether the directory is read as a checkpoint of our format."""
    return format_of(directory) == BACKEND


def may_be_ours(directory: str | os.PathLike[str]) -> bool:
    """Returns whether the directory is ours, or would be with files that are damaged or missing.

    That may be so on this rank alone.
    """
    if is_ours(directory):
        return True
    try:
        names = names_in(directory)
    except OSError:
        return False
    return TORCH_DIST_INDEX not in names and any(map(is_own_file_name, names))


def is_published(directory: str | os.PathLike[str]) -> bool:
    """Returns whether the directory has a manifest of ours; False where that cannot be looked at."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: there is a null character in the name
        return has_file(any_path(directory) / MANIFEST_NAME)
    return False


def has_file(path: Path) -> bool:
    """Returns whether there is such a file. Raises OSError if that cannot be looked at."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_complete(directory: str | os.PathLike[str]) -> bool:
    """Returns whether a checkpoint is complete: published by us, or with the file that is written last."""
    return is_published(directory) or stored_backend(directory) not in (None, BACKEND)


def is_there(directory: str | os.PathLike[str]) -> bool:
    """Returns whether the checkpoint that a tracker names is there: complete, or of another format.

    Raises:
        StorageError: it cannot be looked at, which says nothing about it.
    """
    path = path_of(directory)
    try:
        with contextlib.suppress(FileNotFoundError):  # to list names costs more, on each of many ranks
            (path / MANIFEST_NAME).stat()
            return True
        backend = metadata_members(path).get("sharded_backend")
        if backend not in (None, BACKEND):
            return True
        names = names_in(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except FormatError:
        return True  # not ours, as it has no manifest; Megatron says what is wrong with it
    except OSError as error:
        raise StorageError.of(error, path, f"{path} cannot be looked at: {error.strerror}") from error
    # Megatron's formats `torch` and `torch_dcp` have no metadata.json.
    if any(name == TORCH_DIST_INDEX or name.startswith(LEGACY_FOLDER) for name in names):
        return True
    is_unfinished = any(map(is_own_file_name, names))  # of ours
    return not is_unfinished and not set(names) <= {METADATA_NAME, COMMON_FILE}


def stored_backend(directory: str | os.PathLike[str]) -> str | None:
    """Returns the format that a checkpoint's metadata.json names; None if there is none that can be read."""
    with contextlib.suppress(OSError):
        return _answered_backend(directory)
    return None


def _answered_backend(directory: str | os.PathLike[str]) -> str | None:
    """Returns the format that metadata.json names, or None. Raises OSError if it cannot be looked at."""
    try:
        backend = metadata_members(directory).get("sharded_backend")
    except FormatError:
        return None
    except OSError as error:
        if error.errno in _NO_DOCUMENT:
            return None
        raise
    return backend if isinstance(backend, str) else None


def metadata_members(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the members of metadata.json; none if there is no such file, or if a kill has left it empty.

    Raises:
        FormatError: it is damaged.
        OSError: it cannot be read.
    """
    try:
        return json_members(any_path(directory) / METADATA_NAME, DOCUMENT_BYTES, if_empty=b"{}")
    except FileNotFoundError:
        return {}


def json_members(path: Path, most_bytes: int, if_empty: bytes = b"") -> dict[str, Any]:
    """Returns the members of the object in a JSON file. Raises as `metadata_members`."""
    try:
        members = json.loads(read_regular(path, most_bytes) or if_empty)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is damaged: {error}") from error
    if not isinstance(members, dict):
        raise FormatError(f"{path} is damaged: it holds no JSON object")
    return members


def stored_bytes(directory: Path) -> int:
    """Returns the bytes of all files below a directory, without those that vanish or cannot be looked at."""
    if is_object(directory):
        return sum(one.bytes for one in stores.all_below(directory))
    return sum(one.st_size for one in file_stats(directory))


def file_stats(directory: Path) -> Iterator[os.stat_result]:
    """Yields what is known of each file below a directory, but those that vanish or cannot be looked at."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                yield os.lstat(Path(folder) / name)
