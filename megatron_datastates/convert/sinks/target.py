"""How what a command writes appears: whole or not at all.

Protocol:
  1. a target that exists is refused before anything is written;
  2. everything is written under a temporary name beside it, and synced;
  3. the temporary name is renamed to the target's, and the directory around it is synced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.errors import StorageError


def refuse_target(target: Path, needed_bytes: int = 0, *, makes_parents: bool = False) -> None:
    """Whether `target` can be made at all.

    Args:
        makes_parents: the caller makes the directories around it that are not there.

    Raises:
        StorageError: it exists, there is no directory for it that can be written to, or less than
            `needed_bytes` are free there.
    """
    if target.exists() or target.is_symlink():
        raise StorageError(f"{target} exists: give another target, or remove it first")
    if not makes_parents and not target.parent.is_dir():
        raise StorageError(f"{target.parent} is not a directory: make it, or give another target")
    around = next(parent for parent in target.absolute().parents if parent.exists())
    if not around.is_dir() or not os.access(around, os.W_OK | os.X_OK):
        raise StorageError(f"{around} is not a directory that can be written to: give another target")
    free = shutil.disk_usage(around).free
    if free < needed_bytes:
        raise StorageError(
            f"{around} has {free / 1e6:.1f} MB free, and {needed_bytes / 1e6:.1f} MB are needed: free some, "
            "or give another target"
        )


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A free name beside `target`. The file or directory made there becomes `target`, unless the body raises.

    Raises:
        StorageError: as `refuse_target`.
    """
    refuse_target(target)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    try:
        yield temporary
        sync_tree(temporary)
        refuse_target(target)
        temporary.rename(target)
    except BaseException:  # Ctrl-C, too
        _remove(temporary)
        raise
    sync_directory(target.parent)


def sync_tree(root: Path) -> None:
    """A file, or a directory and all that is in it."""
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
