"""Targets in object stores: what a conversion has written here is brought there, as a drain does it.

Protocol: data files first, each block's checksum compared on the way; then what else belongs to the
checkpoint, and the manifest as the last object (pipeline/publishing/directory_publisher.py). Meanwhile the
target is claimed (sinks/target.py), as these names are not a call's own, like those of data files. Of two
calls at once, one at most publishes, and perhaps neither; a call that finds the other removes its own data
files. What a kill leaves has no manifest, so it is no checkpoint, and `datastates prune` removes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path

from megatron_datastates import stores
from megatron_datastates.config import Options
from megatron_datastates.convert.sinks.target import claimed, require_scratch
from megatron_datastates.engine.faults import Faults
from megatron_datastates.engine.reader import read_small
from megatron_datastates.errors import StorageError
from megatron_datastates.files import DOCUMENT_BYTES, INDEX_BYTES, open_regular
from megatron_datastates.format.directory import METADATA_NAME, TORCH_DIST_INDEX
from megatron_datastates.format.manifest import FileEntry, Manifest
from megatron_datastates.format.values import MANIFEST_NAME, is_own_file_name
from megatron_datastates.pipeline.near.copying import Copier, Limit
from megatron_datastates.pipeline.publishing.directory_publisher import DirectoryPublisher, SmallFiles


def refuse_object_target(target: Path, needed_bytes: int, names: Collection[str]) -> None:
    """Checks that a checkpoint can be made in an object store, by way of the directory for temporary files.

    Args:
        names: of the files and directories that it will have beside its data. With data files, they may be
            what a killed call has left.

    Raises:
        StorageError: there is one already, or anything else, or fewer than `needed_bytes` are free in that
            directory.
        OSError: the store cannot be asked, or has no such bucket.
    """
    _refuse_checkpoint(target)
    for name in (one.name for one in stores.all_below(target)):
        if not is_own_file_name(name) and name.partition("/")[0] not in names:
            raise StorageError(f"{target} exists, with {name}: choose another target, or remove it first")
    require_scratch(needed_bytes)


def _refuse_checkpoint(target: Path) -> None:
    for name in (MANIFEST_NAME, TORCH_DIST_INDEX, METADATA_NAME):
        try:
            stores.size_of_object(target / name)
        except FileNotFoundError:
            continue
        raise StorageError(f"{target} exists: choose another target, or remove it first")


def upload_files(folder: Path, target: Path, manifest: Manifest, files: Sequence[FileEntry]) -> None:
    """Uploads data files from a folder, one after the other; the client sends parts of each at once.

    Raises:
        DataStatesError, OSError: one could not be read or uploaded.
    """
    copier = Copier(Options.from_environment(), Faults(""), Limit(0))
    for file in files:
        copier.copy(folder / file.name, target / file.name, manifest, file)


def publish_uploaded(folder: Path, target: Path, manifest: Manifest) -> None:
    """Uploads all that a checkpoint has beside its data files, and publishes it.

    Raises:
        StorageError: another call makes a checkpoint there, or has made one meanwhile. It stays as it is,
            and this call's data files are removed.
        DataStatesError, OSError: as upload_files.
    """
    known = {MANIFEST_NAME, METADATA_NAME, manifest.index.name, *(file.name for file in manifest.files)}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [name for path in files if (name := str(path.relative_to(folder))) not in known]
    looked_at = {MANIFEST_NAME, METADATA_NAME}  # by _refuse_checkpoint
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(
                claimed(target, lambda name: is_own_file_name(name) or name in {*names, *looked_at})
            )
            _refuse_checkpoint(target)
        except BaseException:  # including an interrupt: no manifest that names these files was sent
            with contextlib.suppress(OSError):
                stores.remove_all(target, [file.name for file in manifest.files])
            raise
        for name in names:
            with open_regular(folder / name) as file:
                stores.upload(target / name, file)
        metadata = read_small(folder / METADATA_NAME, DOCUMENT_BYTES)
        index = read_small(folder / manifest.index.name, INDEX_BYTES)
        DirectoryPublisher(
            target, manifest.save_id, SmallFiles(manifest, index, metadata), Faults("")
        ).publish()
