"""The point of publication: how one file appears whole or not at all.

Protocol, for every small file that others rely on (index, manifest, metadata.json):
  1. write all bytes to a temporary name in the same directory, sync it;
  2. rename it to its name (atomic);
  3. sync the directory, so that the name survives a crash.
The manifest is published last, and what it names is durable before. What it replaces is removed after step 3
of the manifest.

Two jobs may save into one directory at once: one that was requeued, and its predecessor that has not ended.
So every name but those of the manifest and metadata.json belongs to one save, and a save removes only what
earlier saves of its own job have left, and of other jobs that were silent there for long what they have left
and what the manifest that it has replaced named. One of those may still look for its files, and name them
then: so right before each removal, a save checks whether the manifest is still the one that it has read.
In an object store an object appears whole by itself: one request takes the place of steps 1 to 3. Nothing is
removed there but what the manifest named before, because listings are not relied on.
(Protocol as in TensorStore's kvstore/file/file_key_value_store.cc and LevelDB's SetCurrentFile.)
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from megatron_datastates import stores
from megatron_datastates.engine import native
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import DataStatesError
from megatron_datastates.files import (
    OBJECT_BYTES,
    Status,
    changed_at,
    is_object,
    open_regular,
    read_regular,
    size_of,
    status_when_opened,
)
from megatron_datastates.format.directory import METADATA_NAME, TORCH_DIST_INDEX
from megatron_datastates.format.values import MANIFEST_NAME, SaveId, save_id_in_name

MIN_AGE_SECONDS = 3600.0  # of files that no manifest names, before they count as left by a save that is dead
_MIN_AGE_CONTINUED_SECONDS = 600.0  # likewise, of a run that is continued: its job should be over


def write_whole(
    path: Path,
    data: bytes,
    faults: Faults,
    save_id: SaveId,
    on_renamed: Callable[[], None] = lambda: None,
    before_rename: Callable[[], None] = lambda: None,
) -> None:
    """Makes `path` hold exactly `data`, durably.

    Args:
        before_rename: called right before `path` names `data`, unless it raises.
        on_renamed: called as soon as `path` names `data`, which a failure after that does not undo.

    Raises:
        OSError: with the name of the file. `path` holds what it held before, or (if its directory could not
            be synced) `data`.
    """
    if is_object(path):
        before_rename()
        faults.point(f"write {_kind(path)}")  # of the request: what has failed may still be carried out
        stores.write(path, data)
        on_renamed()
        faults.point(f"durable {_kind(path)}")
        return
    temporary = temporary_beside(path, save_id)
    try:
        _write_whole(path, data, faults, temporary, on_renamed, before_rename)
    except (OSError, DataStatesError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError) or error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def replace_file(path: Path, data: bytes) -> None:
    """Makes a file that belongs to no save, such as a tracker, hold `data`, durably.

    Raises:
        OSError: with the name of the file. `path` holds what it held before, or `data`.
    """
    if is_object(path):
        stores.write(path, data)
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # of this call alone
    try:
        _write_whole(path, data, Faults(""), temporary, lambda: None, lambda: None)
    except BaseException as error:  # including an interrupt
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError) or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def temporary_beside(path: Path, save_id: SaveId) -> Path:
    """Returns the path of a file that is to be renamed to `path`.

    Different at each call: another process may write the same file of the same save, as a job that has not
    ended yet does with a checkpoint that the next job copies to --save.
    """
    return path.parent / f".datastates-{path.name}-{secrets.token_hex(4)}-{save_id}.tmp"


@contextlib.contextmanager
def appearing(path: Path, save_id: SaveId) -> Iterator[Path]:
    """Yields where to write a file that is to be at `path`, durably, once the block ends without an error."""
    temporary = temporary_beside(path, save_id)
    try:
        yield temporary
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _write_whole(
    path: Path,
    data: bytes,
    faults: Faults,
    temporary: Path,
    on_renamed: Callable[[], None],
    before_rename: Callable[[], None],
) -> None:
    faults.point(f"write {_kind(path)}")
    with opened(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY) as descriptor:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    faults.point(f"rename {_kind(path)}")
    before_rename()
    os.replace(temporary, path)
    on_renamed()
    faults.point(f"sync directory of {_kind(path)}")
    sync_directory(path.parent)
    faults.point(f"durable {_kind(path)}")


def _kind(path: Path) -> str:
    kinds = {MANIFEST_NAME: "manifest", METADATA_NAME: "metadata"}
    return kinds.get(path.name, "index")


def sync_directory(directory: Path) -> None:
    """Makes names created, renamed or removed in `directory` durable.

    Some network file systems cannot sync a directory and say so; their metadata is synchronous.
    """
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF):
                raise


def sync_file(path: Path) -> bytes:
    """Makes a file of somebody else's durable; returns its bytes."""
    if is_object(path):
        return read_regular(path, OBJECT_BYTES)
    with open_regular(path, OBJECT_BYTES) as file:
        native.close_in_forked_child(file.fileno())
        try:
            os.fsync(file.fileno())
            return file.read(size_of(file))
        finally:
            native.forget_descriptor(file.fileno())


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Opens a descriptor that no forked child keeps: a sync may take long, and data loaders live on."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    native.close_in_forked_child(descriptor)
    try:
        yield descriptor
    finally:
        native.forget_descriptor(descriptor)
        os.close(descriptor)


def remove_replaced(
    directory: Path,
    keep: set[str],
    published: SaveId,
    replaced: Collection[str],
    superseded: Sequence[str] = (),
    continued: Collection[int] = (),
    in_place: Status | None = None,
) -> list[str]:
    """Removes what a published save replaces, but nothing that `keep` names; returns the names.

    Files that killed saves have left, too, but nothing of a job that may be saving at this moment. Ends where
    another job publishes meanwhile: its manifest may name what is next.

    Args:
        keep: what the save's manifest names, and that in place, which may be another job's.
        replaced: data files that the manifest named in whose place the save's own is now.
        superseded: patterns of files of a checkpoint in another format.
        continued: ids of the runs that this one resumes from: their jobs are over, or about to end.
        in_place: the status of the manifest, before it was read for `keep`; None in an object store.
    """
    removed = []
    # Those of the checkpoint are set aside first: to find out whose a name is takes long at many ranks.
    names = set(replaced if is_object(directory) else os.listdir(directory)) - keep
    saving = set[int]()
    if not is_object(directory):
        saving = _runs_under_way(directory, names.difference(replaced), published, continued)

    def goes(name: str) -> bool:
        save = save_id_in_name(name)
        if save is not None and save.run_id != published.run_id:
            return save.run_id not in saving
        is_superseded = any(fnmatch.fnmatchcase(name, pattern) for pattern in superseded)
        return is_superseded or name in replaced or published.follows(name)

    going = sorted(filter(goes, names))
    if any(save_id_in_name(name) and not published.follows(name) for name in going if name not in replaced):
        sync_directory(directory)  # a crash must not bring back an older manifest, which may name them
    for name in sorted(going, key=lambda name: name != TORCH_DIST_INDEX):  # without it, no other file counts
        if in_place is not None and status_when_opened(directory / MANIFEST_NAME) != in_place:
            break
        (directory / name).unlink(missing_ok=True)
        removed.append(name)
    return removed


def _runs_under_way(
    directory: Path, names: Collection[str], published: SaveId, continued: Collection[int]
) -> set[int]:
    """Returns the ids of other runs that may be saving: one of these files of theirs is young.

    By the file system's clock: the manifest has just been written. All files of such a run stay: what it
    saves may share files of its earlier saves, also those that were in the directory already.

    Args:
        names: of files that neither the manifest names nor the one in whose place it is.
    """
    written = (directory / MANIFEST_NAME).stat().st_mtime
    found = set()
    for name in names:
        save = save_id_in_name(name)
        if save is not None and save.run_id != published.run_id:
            seconds = _MIN_AGE_CONTINUED_SECONDS if save.run_id in continued else MIN_AGE_SECONDS
            with contextlib.suppress(FileNotFoundError):
                if written - changed_at((directory / name).lstat()) < seconds:
                    found.add(save.run_id)
    return found
