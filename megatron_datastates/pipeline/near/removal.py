"""Removes checkpoints and saves from folders, of near tiers and of runs, their manifests first.

Nothing here imports torch or the native module.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

from megatron_datastates.files import MANIFEST_BYTES, is_object, put_back, read_regular
from megatron_datastates.format.directory import iteration_in_name
from megatron_datastates.format.values import MANIFEST_NAME, SaveId, save_id_in_name
from megatron_datastates.pipeline.near.places import folders_of_run, manifest_in, save_ids_in
from megatron_datastates.stores import remove_below


def remove_manifest(folder: Path) -> None:
    """Removes a checkpoint's manifest; a crash does not bring it back without its files. Raises OSError."""
    (folder / MANIFEST_NAME).unlink()
    if not is_object(folder):
        # It imports the native module: not in a run that has only checkpoints of other formats.
        from megatron_datastates.engine.atomic_files import sync_directory

        sync_directory(folder)


def remove_folder(folder: Path) -> None:
    """Removes a checkpoint's directory, its manifest first. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        remove_manifest(folder)
    if is_object(folder):
        remove_below(folder)
    else:
        shutil.rmtree(folder)


def _take_manifest(folder: Path, save_ids: Collection[SaveId]) -> tuple[set[str], set[str]]:
    """Removes the manifest from a folder if it is of one of these saves, or damaged. Raises OSError.

    Returns:
        What it has named; and what another one names, which stays.
    """
    path, nothing = folder / MANIFEST_NAME, set[str]()
    aside = folder / f".datastates-{MANIFEST_NAME}-{secrets.token_hex(4)}.tmp"
    try:
        found, manifest = read_regular(path, MANIFEST_BYTES), manifest_in(folder)
        if manifest is not None and manifest.save_id not in save_ids:
            return nothing, manifest.names
        path.rename(aside)
        if aside.read_bytes() != found:  # a save has published there meanwhile
            put_back(aside, path)
            newer = manifest_in(folder)
            return nothing, newer.names if newer is not None else nothing
        aside.unlink()
    except FileNotFoundError:
        return nothing, nothing
    return manifest.names if manifest is not None else nothing, nothing


def remove_saves(folder: Path, save_ids: Collection[SaveId]) -> None:
    """Removes saves' files from a checkpoint's folder, with what no other save needs there. Raises OSError.

    Another save may be writing there: what comes while this looks is left.
    """
    linked, kept = _take_manifest(folder, save_ids)
    names = {name: save_id_in_name(name) for name in os.listdir(folder)}
    others = {name for name, own in names.items() if own is not None and own not in save_ids} - linked
    is_alone = MANIFEST_NAME not in names and not others
    # Names without a save id first: what a kill leaves has to say whose it is (room.py).
    for name, own in sorted(names.items(), key=lambda item: item[1] is not None):
        if (own in save_ids or is_alone) and name not in kept and not (folder / name).is_dir():
            (folder / name).unlink(missing_ok=True)  # the saves themselves remove some
    if is_alone:
        with contextlib.suppress(OSError):  # it is not empty any more
            folder.rmdir()


def remove_earlier(run: Path, iteration: int, own_run_id: int) -> None:
    """Removes what earlier jobs left of an iteration and of those before it. Ranks may do so at one time."""
    for folder in folders_of_run(run):
        number, ids = iteration_in_name(folder.name), save_ids_in(folder)
        if number is None or number > iteration or any(one.run_id == own_run_id for one in ids):
            continue
        if ids:  # else a save of another rank may have just begun
            with contextlib.suppress(OSError):
                remove_saves(folder, ids)
