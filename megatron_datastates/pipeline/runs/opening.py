"""Opening a checkpoint's small files: its manifest and index, and what proves that they belong together."""

from __future__ import annotations

import errno
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_datastates.engine.reader import read_ranges, read_small
from megatron_datastates.errors import DataStatesError, FormatError, NotACheckpointError, StorageError
from megatron_datastates.files import MANIFEST_BYTES, is_object
from megatron_datastates.format.footer import Footer
from megatron_datastates.format.index import Index
from megatron_datastates.format.manifest import FileEntry, Manifest
from megatron_datastates.format.stored_entries import DecodedEntries
from megatron_datastates.format.tables import Directory
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.runs.damage import why_no_checkpoint
from megatron_datastates.pipeline.runs.runs import is_published

# Decoded entries of open indexes, by SHA-256: most checkpoints of a run have the same index.
_decoded: weakref.WeakValueDictionary[str, DecodedEntries] = weakref.WeakValueDictionary()


def check_identity(manifest: Manifest, entry: FileEntry, footer: Footer, path: Path) -> None:
    """Raises StorageError if a data file is not the one that its manifest names."""
    found = (footer.save_id, footer.rank, footer.group, footer.data_bytes)
    save_id = manifest.file_save_id(entry)
    if found != (save_id, entry.rank, entry.group, entry.footer_offset):
        raise StorageError(
            f"{path} belongs to save {footer.save_id}, rank {footer.rank}, group {footer.group}; "
            f"its manifest names it as rank {entry.rank}'s, group {entry.group}, of save {save_id}, with "
            f"{entry.footer_offset} bytes of data (found {footer.data_bytes})"
        )
    if footer.crc != entry.footer_crc:
        raise StorageError(
            f"{path} has a footer of checksum {footer.crc:08x}, its manifest says {entry.footer_crc:08x}: "
            "it was replaced"
        )


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint's directory.

    Raises:
        NotACheckpointError: there is none.
        FormatError, UnsupportedFormatError, StorageError: it cannot be read.
    """
    if is_object(path):
        return _read_manifest_object(path)
    if not is_published(path):
        reason = why_no_checkpoint(path)
        if not is_published(path):  # a save may have published it just now
            raise NotACheckpointError(reason)
    data = read_small(path / MANIFEST_NAME, MANIFEST_BYTES)
    return Manifest.decode(data, str(path / MANIFEST_NAME))


def _read_manifest_object(path: Path) -> Manifest:
    """Asks once: if an object store refuses, that does not show whether there is a manifest."""
    manifest = path / MANIFEST_NAME
    try:
        data = read_small(manifest, MANIFEST_BYTES)
    except StorageError as error:
        if error.code != errno.ENOENT:
            raise
        raise NotACheckpointError(
            f"{path} holds no published datastates checkpoint: there is no object {manifest}"
        ) from error
    return Manifest.decode(data, str(manifest))


def open_index(path: Path, manifest: Manifest, reuse: bool) -> Index:
    """Opens the index that a manifest names; reads its directory, and entries when they are used.

    Args:
        reuse: share decoded entries with other open indexes of the same bytes.

    Raises:
        FormatError, StorageError: it is damaged, or cannot be read.
    """
    entry = manifest.index
    (data,) = read_ranges(path, entry.bytes, [(0, entry.directory_bytes)])
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise FormatError(f"{path} is damaged: its SHA-256 differs")
    directory = Directory(data, str(path), entry.bytes)
    if directory.bytes != entry.directory_bytes:
        raise FormatError(
            f"{path} is damaged: its directory has {directory.bytes} bytes, "
            f"its manifest says {entry.directory_bytes}"
        )
    known = _decoded.setdefault(entry.sha256, DecodedEntries()) if reuse else DecodedEntries()

    def read_sections(ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        try:
            yield from read_ranges(path, entry.bytes, ranges)
        except StorageError as error:
            refuse_replaced(path.parent, manifest, error)
            raise

    return Index.from_directory(directory, len(manifest.files), read_sections, known)


def refuse_replaced(path: Path, opened: Manifest, error: Exception) -> None:
    """Raises StorageError if a save or a removal of keys has published there after this manifest was read."""
    try:
        found = read_manifest(path)
    except DataStatesError:
        return
    if found.save_id != opened.save_id:
        raise StorageError(f"{path} was replaced by another save while it was read: load again") from error
    if is_another(found, opened):
        raise StorageError(f"{path} lost keys to a removal while it was read: load again") from error


def is_another(one: Manifest, other: Manifest) -> bool:
    """Returns whether a save, or a removal of keys, lies between two readings of a directory's manifest."""
    return (one.save_id, one.index) != (other.save_id, other.index)
