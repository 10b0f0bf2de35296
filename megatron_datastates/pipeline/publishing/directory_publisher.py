"""Publishes a checkpoint: writes index, manifest and metadata.json beside data files that are durable.

In the order that makes the manifest the last thing that a checkpoint needs; see engine/atomic_files.py. A
save that writes no metadata.json removes one that names another format: until then, that checkpoint is whole
and counts, and afterwards what the manifest says that it replaced does not.
In an object store it is also the last object that is written: metadata.json precedes it. Nothing is removed
there after a failure: what no manifest names, `datastates prune` removes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from megatron_datastates.engine.atomic_files import remove_replaced, sync_directory, write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import DataStatesError
from megatron_datastates.files import INDEX_BYTES, MANIFEST_BYTES, is_object, sha256_of, status_when_opened
from megatron_datastates.format.directory import BACKEND, METADATA_NAME, TORCH_DIST_INDEX
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.publishing.presence import (
    files_in_manifest,
    holds_exactly,
    require_files,
    require_published,
    sync_above,
)
from megatron_datastates.pipeline.runs.runs import stored_backend

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SmallFiles:
    """All that a checkpoint has beside its data files."""

    manifest: Manifest
    index: bytes
    metadata: bytes  # of metadata.json; if empty, none is written, and one of another format is removed
    # By name: what the manifest names under `others`, as far as it is not in the directory yet.
    others: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


def encoded_manifest(manifest: Manifest, index: bytes) -> bytes:
    """Returns the bytes of a manifest. Raises DataStatesError: no load would read it, or the index."""
    encoded = manifest.encode()
    for what, data, most in (("manifest", encoded, MANIFEST_BYTES), ("index", index, INDEX_BYTES)):
        if len(data) > most:
            raise DataStatesError(
                f"the {what} of this checkpoint has {len(data)} bytes, and no load reads more than {most}: "
                "save fewer and larger tensors, and shorter notes of state providers"
            )
    return encoded


class DirectoryPublisher:
    """Publishes one save in one directory. Used by one thread.

    Attributes:
        is_in_place: whether the manifest is in its place, or may be; also after a failure.
    """

    def __init__(
        self,
        directory: Path,
        save_id: SaveId,
        files: SmallFiles,
        faults: Faults,
        superseded: tuple[str, ...] = (),
    ) -> None:
        self.is_in_place = False
        self._is_renamed = False
        self.directory = directory
        self._save_id = save_id
        self._files = files
        self._faults = faults
        self._superseded = superseded

    def publish(self) -> None:
        """Makes the directory this save's checkpoint, then removes what it replaces.

        Raises:
            DataStatesError: data files, or the directory, are not there.
            OSError: a file could not be written. Unless `is_in_place`, nothing was changed; in an object
                store, a manifest that was sent may yet appear.
        """
        directory, manifest = self.directory, self._manifest()
        encoded, path = encoded_manifest(manifest, self._files.index), directory / MANIFEST_NAME
        own = {manifest.index.name: self._files.index, **self._files.others}
        try:
            if not manifest.files:
                directory.mkdir(parents=True, exist_ok=True)  # no rank had anything to write
            elif not is_object(directory) and not directory.is_dir():
                raise DataStatesError(
                    f"{directory} is gone, with all files that the ranks wrote: did something remove it?"
                )
            for name, content in own.items():
                write_whole(directory / name, content, self._faults, self._save_id)
            require_files(directory, manifest)
            if is_object(directory):
                self._write_metadata(directory / METADATA_NAME)
            replaced: set[str] = set()
            with contextlib.suppress(OSError):  # then what other jobs have written stays
                replaced = files_in_manifest(path)
            sync_above(directory)
            write_whole(path, encoded, self._faults, self._save_id, self._note_renamed, self._note_sent)
            require_published(directory, manifest, encoded)
            if not is_object(directory):
                self._write_metadata(directory / METADATA_NAME)
        except Exception:
            if not self._is_renamed:  # but perhaps it is: the server's answer may have been lost
                self.is_in_place = holds_exactly(path, encoded, if_unknown=self.is_in_place)
            # A store may yet carry out what has failed: a manifest without its index is a lost checkpoint.
            if not self.is_in_place and not is_object(directory):
                for name in own:
                    with contextlib.suppress(OSError):
                        (directory / name).unlink()
            raise
        try:
            # What is in place by now may be another job's manifest, which shares a file of unchanged tensors
            # with the one that was replaced. If that cannot be read, nothing is removed.
            in_place = None if is_object(path) else status_when_opened(path)
            keep = manifest.names | files_in_manifest(path, encoded)
            remove_replaced(
                directory, keep, self._save_id, replaced, self._superseded, manifest.continued, in_place
            )
        except OSError as error:
            logger.warning("files of earlier saves were not removed from %s: %s", directory, error)

    def _manifest(self) -> Manifest:
        """Returns the manifest, with what it replaces unless metadata.json says what counts."""
        found = self._files.manifest
        path = self.directory / TORCH_DIST_INDEX
        if self._files.metadata or is_object(path) or not path.is_file():
            return found
        return msgspec.structs.replace(found, replaced=sha256_of(path))

    def _note_sent(self) -> None:
        self.is_in_place = True

    def _note_renamed(self) -> None:
        self._is_renamed = True

    def _write_metadata(self, path: Path) -> None:
        content = self._files.metadata
        if content and not holds_exactly(path, content):
            write_whole(path, content, self._faults, self._save_id)
        elif not content and not is_object(path) and stored_backend(path.parent) not in (None, BACKEND):
            path.unlink()
            sync_directory(path.parent)  # before anything that it describes is removed
