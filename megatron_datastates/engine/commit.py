"""The commit point: how one file appears whole or not at all.

Protocol, for every small file that others rely on (index, manifest):
  1. write all bytes to a temporary name in the same directory, sync it;
  2. rename it to its name (atomic);
  3. sync the directory, so that the name survives a crash.
The manifest is committed last, and what it names is durable before. Removing what it does not name
comes after step 3 of the manifest.
(Protocol as in TensorStore's kvstore/file/file_key_value_store.cc and LevelDB's SetCurrentFile.)
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_datastates.engine import native
from megatron_datastates.engine.faults import Faults
from megatron_datastates.files import OBJECT_BYTES, open_regular, size_of
from megatron_datastates.format.values import SaveId, is_own_file_name


def write_whole(path: Path, data: bytes, faults: Faults) -> None:
    """Makes `path` hold exactly `data`, durably.

    Raises:
        OSError: `path` holds what it held before, or (if its directory could not be synced) `data`.
    """
    temporary = path.parent / f".datastates-{path.name}.tmp"
    faults.point(f"write {_kind(path)}")
    with _opened(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY) as descriptor:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    faults.point(f"rename {_kind(path)}")
    os.replace(temporary, path)
    faults.point(f"sync directory of {_kind(path)}")
    sync_directory(path.parent)
    faults.point(f"committed {_kind(path)}")


def _kind(path: Path) -> str:
    return "index" if path.name.startswith("index-") else "manifest"


def sync_directory(directory: Path) -> None:
    """Makes names created, renamed or removed in `directory` durable."""
    with _opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def sync_file(path: Path) -> bytes:
    """Makes a file of somebody else's durable; returns its bytes."""
    with open_regular(path, OBJECT_BYTES) as file:
        native.close_in_forked_child(file.fileno())
        try:
            os.fsync(file.fileno())
            return file.read(size_of(file))
        finally:
            native.forget_descriptor(file.fileno())


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor that no forked child keeps: a sync may take long, and data loaders live on."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    native.close_in_forked_child(descriptor)
    try:
        yield descriptor
    finally:
        native.forget_descriptor(descriptor)
        os.close(descriptor)


def remove_left_overs(
    directory: Path, keep: set[str], published: SaveId, superseded: Sequence[str] = ()
) -> list[str]:
    """Removes files of ours, and of the patterns `superseded`, that `keep` does not name; gives their names.

    Files of later saves of the same run stay: one may be under way into the same directory.
    """
    removed = []
    for name in os.listdir(directory):
        ours = is_own_file_name(name) and not published.precedes(name)
        if name not in keep and (ours or any(fnmatch.fnmatchcase(name, p) for p in superseded)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(directory / name)
            removed.append(name)
    return removed
