"""Taking keys out of a published checkpoint."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import NotACheckpointError, StorageError
from megatron_datastates.format.index import Index, index_entry
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import FORMAT_VERSION, MANIFEST_NAME
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.runs.opening import is_another, read_manifest


def remove_keys(directory: str | os.PathLike[str], prefix: str) -> list[str]:
    """Removes every tensor, object and stream whose key begins with `prefix`; returns their keys.

    Atomic: publishes a new index and then a new manifest. The data files stay as they are, so that no
    space is freed. The manifest is read again right before that: a save that had published by then stays.

    Raises:
        DataStatesError: the directory is no readable checkpoint, cannot be written, or a save has published
            into it meanwhile.
    """
    checkpoint = Checkpoint.open(directory)
    index, manifest, path = checkpoint.index, checkpoint.manifest, checkpoint.directory
    removed = [key for key in (*index.tensors, *index.objects, *index.streams) if key.startswith(prefix)]
    if not removed:
        return []
    gone = set(removed)
    index.preload(key for key in index.tensors if key not in gone)
    encoded = Index(
        {key: index.tensors[key] for key in index.tensors if key not in gone},
        {key: file for key, file in index.objects.items() if key not in gone},
        {key: file for key, file in index.streams.items() if key not in gone},
    ).encode(packed=True)
    try:
        _publish(path, manifest, encoded)
    except OSError as error:
        raise StorageError(f"keys were not removed from {path}: {error}") from error
    return removed


def _publish(path: Path, manifest: Manifest, encoded: bytes) -> None:
    """Replaces the index, then the manifest that was read. Raises DataStatesError, OSError."""
    entry = index_entry(encoded)
    changed = msgspec.structs.replace(manifest, index=entry, format_version=FORMAT_VERSION)
    write_whole(path / entry.name, encoded, Faults(""), manifest.save_id)

    def require_unchanged() -> None:
        found = None
        with contextlib.suppress(NotACheckpointError):  # it was removed meanwhile
            found = read_manifest(path)
        if found is None or is_another(found, manifest):
            if found is None or found.index.name != entry.name:
                (path / entry.name).unlink(missing_ok=True)
            raise StorageError(
                f"no keys were removed from {path}: a save, or another removal of keys, has published into "
                "it meanwhile; remove them again if they are still to go"
            )

    manifest_path, content = path / MANIFEST_NAME, changed.encode()
    write_whole(manifest_path, content, Faults(""), manifest.save_id, before_rename=require_unchanged)
    (path / manifest.index.name).unlink(missing_ok=True)  # not the new one: keys are gone from that
