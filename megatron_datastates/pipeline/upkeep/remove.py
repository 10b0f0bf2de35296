"""Taking keys out of a published checkpoint."""

from __future__ import annotations

import os

import msgspec

from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import StorageError
from megatron_datastates.format.index import Index, index_entry
from megatron_datastates.format.values import FORMAT_VERSION, MANIFEST_NAME
from megatron_datastates.pipeline.loading.load import Checkpoint


def remove_keys(directory: str | os.PathLike[str], prefix: str) -> list[str]:
    """Removes every tensor, object and stream whose key begins with `prefix`; returns their keys.

    Atomic: publishes a new index and then a new manifest. The data files stay as they are, so that no
    space is freed.

    Raises:
        DataStatesError: the directory is no readable checkpoint, or cannot be written.
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
    entry = index_entry(encoded)
    changed = msgspec.structs.replace(manifest, index=entry, format_version=FORMAT_VERSION)
    try:
        write_whole(path / entry.name, encoded, Faults(""), manifest.save_id)
        write_whole(path / MANIFEST_NAME, changed.encode(), Faults(""), manifest.save_id)
        if entry.name != manifest.index.name:
            (path / manifest.index.name).unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"keys were not removed from {path}: {error}") from error
    return removed
