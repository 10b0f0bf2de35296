"""Publishes what a command writes: complete or not at all.

Protocol:
  1. a target that exists, or lies inside a checkpoint, is refused before anything is written;
  2. everything is written under a temporary name in the same directory, and synced;
  3. the temporary name is renamed to the target's, and the parent directory is synced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.errors import DataStatesError, StorageError
from megatron_datastates.pipeline.runs import format_of


def refuse_target(target: Path, needed_bytes: int = 0, *, makes_parents: bool = False) -> None:
    """Checks that `target` can be created.

    Args:
        makes_parents: the caller creates missing parent directories.

    Raises:
        StorageError: it exists, it lies inside a checkpoint, its parent directory is missing or not writable,
            or fewer than `needed_bytes` are free there.
    """
    refuse_inside_checkpoint(target)
    if target.exists() or target.is_symlink():
        raise StorageError(f"{target} exists: choose another target, or remove it first")
    if not makes_parents and not target.parent.is_dir():
        raise StorageError(f"{target.parent} is not a directory: create it, or choose another target")
    around = next(parent for parent in target.absolute().parents if parent.exists())
    if not around.is_dir() or not os.access(around, os.W_OK | os.X_OK):
        raise StorageError(f"{around} is not a writable directory: choose another target")
    free = shutil.disk_usage(around).free
    if free < needed_bytes:
        raise StorageError(
            f"{around} has {free / 1e6:.1f} MB free, and {needed_bytes / 1e6:.1f} MB are needed: free some "
            "space, or choose another target"
        )


def refuse_inside_checkpoint(target: Path) -> None:
    """Raises StorageError if `target` would become a part of a checkpoint, such as the one that is read."""
    for parent in target.resolve().parents:
        if format_of(parent) is not None:
            raise StorageError(f"{target} lies inside the checkpoint {parent}: choose another target")


@contextlib.contextmanager
def publish_on_exit(target: Path, *, makes_parents: bool = False) -> Iterator[Path]:
    """Yields a temporary path; the file or directory created there becomes `target` if the body succeeds.

    Args:
        makes_parents: create missing parent directories.

    Raises:
        StorageError: `target` exists or cannot be created; see refuse_target.
    """
    refuse_target(target, makes_parents=makes_parents)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    with made_parents(target), named_as(temporary, target):
        try:
            yield temporary
            sync_tree(temporary)
            refuse_target(target)
            temporary.rename(target)
        except BaseException:  # including an interrupt
            _remove(temporary)
            raise
    sync_directory(target.parent)


@contextlib.contextmanager
def made_parents(target: Path) -> Iterator[None]:
    """Creates missing parent directories, and removes those that it made if the body fails."""
    missing = [parent for parent in target.absolute().parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for parent in missing:
            with contextlib.suppress(OSError):  # somebody else uses it
                parent.rmdir()
        raise


@contextlib.contextmanager
def named_as(temporary: Path, target: Path) -> Iterator[None]:
    """Replaces a temporary name in errors by the name of what is being made, which is all that users know."""

    def renamed(value: Any) -> Any:
        if isinstance(value, list | tuple):  # shutil's errors have lists of tuples
            return type(value)(map(renamed, value))
        return value.replace(str(temporary), str(target)) if isinstance(value, str) else value

    try:
        yield
    except (DataStatesError, OSError) as error:
        if isinstance(error, OSError) and isinstance(error.filename, str | Path):
            error.filename = renamed(str(error.filename))
        else:
            error.args = renamed(error.args)
        raise


def sync_tree(root: Path) -> None:
    """Syncs a file, or a directory with all its contents."""
    for path in [*root.rglob("*"), root]:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
