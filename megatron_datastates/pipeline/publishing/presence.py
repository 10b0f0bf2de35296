"""Rank 0's checks before and after it publishes: are all files in the checkpoint's directory?"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from megatron_datastates import stores
from megatron_datastates.engine.atomic_files import sync_directory, sync_file
from megatron_datastates.errors import DataStatesError, FormatError, some_of
from megatron_datastates.files import MANIFEST_BYTES, is_object, read_regular
from megatron_datastates.format.directory import COMMON_FILE
from megatron_datastates.format.manifest import IndexEntry, Manifest, OtherFile
from megatron_datastates.format.values import MANIFEST_NAME, SaveId, is_own_file_name
from megatron_datastates.threads import ThreadPool

T = TypeVar("T")
VISIBLE_SECONDS = 3.0  # for other nodes' files to appear on rank 0, and for errors to pass
# Errors that say what a path does not hold: a regular file of at most so many bytes.
_HOLDS_NOTHING_LIKE_IT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EFBIG)
_THREADS = 16  # each waits for one answer of the storage at a time
_FEW_FILES = 64  # are asked for by the caller itself: threads would take Python's lock from the trainer


def named_after_save(entry: IndexEntry, save_id: SaveId) -> IndexEntry:
    """Returns the entry of an index whose file is that save's own."""
    return msgspec.structs.replace(entry, name=save_id.index_file_name(entry.sha256))


def require_files(directory: Path, manifest: Manifest) -> None:
    """Checks that every file that `manifest` names is in `directory` with the expected size.

    Another run or a deletion may have taken files away that ranks know to be durable, or each node has a
    directory of its own. Where the file system is slow to show other nodes' files, this waits for a while.

    Raises:
        DataStatesError: a file is missing, or has another size.
    """
    patience = _Patience()
    while wrong := _persistently(lambda: missing_files(directory, manifest)):
        if not patience.wait():
            raise DataStatesError(
                f"files that ranks have written were not found in {directory}: {some_of(wrong, 3)} "
                "(is --save on storage that all ranks share? does another job save or prune there?)"
            )


def require_published(directory: Path, manifest: Manifest, encoded: bytes) -> None:
    """Looks once more, after the rename: `datastates prune` may have removed something since `require_files`.

    A manifest of another save has replaced this one, and may have had its files removed: that is no failure.

    Raises:
        DataStatesError: there is no manifest, or this one, and not all that it names.
    """
    wrong = _persistently(lambda: missing_files(directory, manifest))
    try:
        found = _persistently(lambda: read_regular(directory / MANIFEST_NAME, MANIFEST_BYTES))
    except FileNotFoundError:
        raise DataStatesError(
            f"the manifest of {directory} was removed right after it was written: does `datastates prune` or "
            "another job remove this checkpoint?"
        ) from None
    if wrong and found == encoded:
        raise DataStatesError(
            f"{directory} was published, but some of its files are missing now: {', '.join(wrong[:3])}: save "
            "again (does `datastates prune` or another job remove files there?)"
        )


class _Patience:
    """How long to look again: from the end of the first look on, which itself may take long at many ranks."""

    def __init__(self) -> None:
        self._deadline: float | None = None

    def wait(self) -> bool:
        """Waits for the next look, after one that was in vain; returns False if there is to be none."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + VISIBLE_SECONDS
        if now > self._deadline:
            return False
        time.sleep(VISIBLE_SECONDS / 10)
        return True


def _persistently(look: Callable[[], T]) -> T:
    """Looks again for a while where a network file system answers with an error that may pass, as ESTALE.

    Raises:
        FileNotFoundError: at once.
        OSError: the last error.
    """
    patience = _Patience()
    while True:
        try:
            return look()
        except FileNotFoundError:
            raise
        except OSError:
            if not patience.wait():
                raise


def missing_files(directory: Path, manifest: Manifest) -> list[str]:
    """Describes the manifest's files that are missing or have another size; all are durable.

    What a client of NFS lists may be a minute old. To open a file, it asks the server.
    """
    wanted = _data_files(manifest) | {manifest.index.name: (manifest.index.bytes, "")}
    wrong = _missing(directory, wanted)
    if wrong and not is_object(directory):
        wrong = _unlike({name: wanted[name] for name in wrong}, _sizes_when_opened(directory, wrong))
    return list(wrong.values())


def missing_data_files(directory: Path, manifest: Manifest, seen: set[str] | None = None) -> list[str]:
    """Describes the manifest's data files that are missing or have another size.

    Args:
        seen: names of files that were there before, which are not looked for again; gets new ones.
    """
    seen = set() if seen is None else seen
    wanted = _data_files(manifest, seen)
    wrong = _missing(directory, wanted)
    seen.update(wanted.keys() - wrong.keys())
    return list(wrong.values())


def _data_files(manifest: Manifest, seen: Collection[str] = ()) -> dict[str, tuple[int, str]]:
    return {
        file.name: (file.bytes, f" of rank {file.rank}") for file in manifest.files if file.name not in seen
    }


def _missing(directory: Path, wanted: dict[str, tuple[int, str]]) -> dict[str, str]:
    """Describes, by name, the files that are missing or have another size."""
    sizes = _object_sizes(directory, wanted) if is_object(directory) else _file_sizes(directory, wanted)
    return _unlike(wanted, sizes)


def _unlike(wanted: dict[str, tuple[int, str]], sizes: dict[str, int]) -> dict[str, str]:
    wrong = {}
    for name, (size, whose) in wanted.items():
        if name not in sizes:
            wrong[name] = f"{name}{whose}"
        elif sizes[name] != size:
            wrong[name] = f"{name}{whose} (has {sizes[name]} bytes, expected {size})"
    return wrong


def _file_sizes(directory: Path, wanted: Collection[str]) -> dict[str, int]:
    def sizes(entries: Iterable[os.DirEntry[str]]) -> dict[str, int]:
        return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}

    try:
        with os.scandir(directory) as entries:
            found = [one for one in entries if one.name in wanted and one.is_file(follow_symlinks=False)]
        if len(found) <= _FEW_FILES:
            return sizes(found)
        with ThreadPool(_THREADS) as threads:
            shares = threads.map(sizes, [found[at::_THREADS] for at in range(_THREADS)])
        return {name: size for share in shares for name, size in share.items()}
    except FileNotFoundError:
        return {}


def _sizes_when_opened(directory: Path, names: Iterable[str]) -> dict[str, int]:
    found = {}
    for name in names:
        try:
            descriptor = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EACCES):
                raise
            continue
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if stat.S_ISREG(status.st_mode):
            found[name] = status.st_size
    return found


def _object_sizes(directory: Path, wanted: Collection[str]) -> dict[str, int]:
    """Asks for each object by its name. Raises OSError if the store does not answer."""

    def size(name: str) -> int | None:
        try:
            return stores.size_of_object(directory / name)
        except FileNotFoundError:
            return None

    with ThreadPool(_THREADS) as threads:
        found = dict(zip(wanted, threads.map(size, wanted), strict=True))
    return {name: size for name, size in found.items() if size is not None}


def files_in_manifest(path: Path, known: bytes = b"") -> set[str]:
    """Returns the files of ours that a manifest names; none if it is missing or damaged. Raises OSError.

    Args:
        known: of a manifest with these bytes, none either: the caller knows what it names.
    """
    try:
        found = read_regular(path, MANIFEST_BYTES)
    except FileNotFoundError:
        return set()
    return set() if found == known else set(filter(is_own_file_name, names_in_manifest(found)))


def names_in_manifest(manifest: bytes | None) -> set[str]:
    """Returns what a manifest of these bytes names; nothing if there is none, or it is damaged."""
    try:
        return Manifest.decode(manifest, MANIFEST_NAME).names if manifest is not None else set()
    except FormatError:
        return set()


def sync_above(directory: Path) -> None:
    """Makes the directory's own name durable, and its parent's, whoever made them."""
    if is_object(directory):
        return
    for above in (directory.parent, directory.parent.parent):
        with contextlib.suppress(PermissionError):  # what cannot be opened, somebody else has made
            sync_directory(above)


def other_file_entry(path: Path, check: Callable[[bytes, str], None]) -> OtherFile:
    """Returns the entry of a file of somebody else's, made durable because the manifest will name it.

    `check` looks at the object in it, if it is the common state: a load is going to want it.
    """
    data = sync_file(path)
    if path.name == COMMON_FILE:
        check(data, path.name)
    return OtherFile.of(path.name, data)


def holds_exactly(path: Path, data: bytes, *, if_unknown: bool = False) -> bool:
    """Returns whether a file holds exactly `data`; `if_unknown` if storage does not say what it holds."""
    try:
        return read_regular(path, len(data)) == data
    except OSError as error:
        return if_unknown and error.errno not in _HOLDS_NOTHING_LIKE_IT
