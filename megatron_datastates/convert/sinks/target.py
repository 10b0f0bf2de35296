"""Publishes what a command writes: complete or not at all.

Protocol:
  1. a target that exists, or lies inside a checkpoint, is refused before anything is written;
  2. everything is written under a temporary name in the same directory, and synced;
  3. the temporary name is renamed to the target's, and the parent directory is synced.
A target in an object store is made in the directory for temporary files, and uploaded:
  1. a target that has come to exist meanwhile is refused again;
  2. a directory is claimed: an object of this call's own, `.datastates-claim-ID`, is written, and if a
     listing then shows any other, the call fails. Of two calls at once, one at most goes on, and perhaps
     neither: the files of both have the same names, so a mixture would load;
  3. the files are uploaded; what says which files there are (*.json) comes last, and config.json, without
     which nothing loads a model, as the very last;
  4. the claim is removed, and after a failure also what was uploaded.
What a kill leaves there includes the claim. Such a target exists: nothing writes to it, or removes it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_datastates import stores
from megatron_datastates.engine.atomic_files import opened, sync_directory
from megatron_datastates.errors import DataStatesError, StorageError
from megatron_datastates.files import is_object, open_regular, real_path
from megatron_datastates.pipeline.runs.runs import format_of
from megatron_datastates.units import size_text

logger = logging.getLogger(__name__)
CLAIM = ".datastates-claim-"
_LAST = "config.json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def refuse_target(target: Path, needed_bytes: int = 0, *, makes_parents: bool = False) -> None:
    """Checks that `target` can be created.

    Args:
        makes_parents: the caller creates missing parent directories.

    Raises:
        StorageError: it exists, it lies inside a checkpoint, its parent directory is missing or not writable,
            or fewer than `needed_bytes` are free there.
        OSError: an object store cannot be asked.
    """
    refuse_inside_checkpoint(target)
    if is_object(target):
        if _is_in_store(target):
            raise StorageError(f"{target} exists: choose another target, or remove it first")
        require_scratch(needed_bytes)
        return
    if target.exists() or target.is_symlink():
        raise StorageError(f"{target} exists: choose another target, or remove it first")
    if not makes_parents and not target.parent.is_dir():
        raise StorageError(f"{target.parent} is not a directory: create it, or choose another target")
    around = next(parent for parent in target.absolute().parents if os.path.lexists(parent))
    if not around.is_dir() or not os.access(around, os.W_OK | os.X_OK):
        raise StorageError(f"{around} is not a writable directory: choose another target")
    free = shutil.disk_usage(around).free
    if free < needed_bytes:
        raise StorageError(
            f"{around} has {size_text(free)} free, and {size_text(needed_bytes)} are needed: free some "
            "space, or choose another target"
        )


def _is_in_store(target: Path) -> bool:
    """Returns whether there is an object of this name, or some below it, as a listing shows them."""
    try:
        stores.size_of_object(target)
    except FileNotFoundError:
        return bool(stores.all_below(target))
    return True


def require_scratch(needed_bytes: int) -> None:
    """Checks the directory for temporary files, where what is uploaded is made first. Raises StorageError."""
    folder = Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StorageError(
            f"{folder} has {size_text(free)} free, and {size_text(needed_bytes)} are needed there before "
            "they are uploaded: free some space, or set TMPDIR to another directory"
        )


def refuse_inside_checkpoint(target: Path) -> None:
    """Raises StorageError if `target` would become a part of a checkpoint, such as the one that is read."""
    parents = list(real_path(target).parents)
    # In a store, the last two are the name of the profile and what all paths of stores begin with.
    for parent in parents[:-2] if is_object(target) else parents:
        if format_of(parent) is not None:
            raise StorageError(f"{target} lies inside the checkpoint {parent}: choose another target")


@contextlib.contextmanager
def publish_on_exit(target: Path, *, makes_parents: bool = False) -> Iterator[Path]:
    """Yields a temporary path; the file or directory created there becomes `target` if the body succeeds.

    Args:
        makes_parents: create missing parent directories.

    Raises:
        StorageError: `target` exists or cannot be created; see refuse_target.
        OSError: it cannot be uploaded. What was uploaded is removed, as far as the store lets it be.
    """
    refuse_target(target, makes_parents=makes_parents)
    if is_object(target):
        with tempfile.TemporaryDirectory(prefix="datastates-") as scratch:
            temporary = Path(scratch) / target.name
            with named_as(temporary, target):
                yield temporary
                refuse_target(target)
                _upload(temporary, target)
        return

    def move(temporary: Path) -> None:
        refuse_target(target)
        temporary.rename(target)

    with made_parents(target), _moved_on_exit(target, target, move) as temporary:
        yield temporary


@contextlib.contextmanager
def replace_on_exit(target: Path) -> Iterator[Path]:
    """Yields a temporary path; the file created there takes the place of `target` if the body succeeds.

    Yields `target` itself if it is there and no regular file, such as a pipe.

    Raises:
        OSError: it cannot be written; what was there has stayed.
    """
    file = target.resolve()  # a link stays one
    if file.exists() and not file.is_file():
        yield target
        return
    with _moved_on_exit(file, target, lambda temporary: temporary.replace(file)) as temporary:
        yield temporary


@contextlib.contextmanager
def _moved_on_exit(place: Path, target: Path, move: Callable[[Path], object]) -> Iterator[Path]:
    """Yields a temporary path beside `place`. If the body succeeds, what is there is synced and moved.

    Args:
        target: how errors name it.
    """
    # Unique also across machines and containers, which share directories and repeat process numbers: what a
    # failed call removes must be its own.
    temporary = place.parent / f".{place.name}.{secrets.token_hex(8)}.tmp"
    with named_as(temporary, target):
        try:
            yield temporary
            sync_tree(temporary)
            move(temporary)
        except BaseException:  # including an interrupt
            _remove(temporary)
            raise
    sync_directory(place.parent)


def _upload(written: Path, target: Path) -> None:
    if not written.is_dir():
        with open_regular(written) as file:
            stores.upload(target, file)
        return
    files = [path for path in written.rglob("*") if path.is_file()]
    files.sort(key=lambda path: (path.suffix == ".json", path.name == _LAST, path))
    names = [str(path.relative_to(written)) for path in files]
    with claimed(target):
        try:
            for name in names:
                with open_regular(written / name) as file:
                    stores.upload(target / name, file)
        except BaseException:  # including an interrupt
            with contextlib.suppress(OSError):
                stores.remove_all(target, names)
            raise


@contextlib.contextmanager
def claimed(target: Path, may_be_there: Callable[[str], bool] = lambda name: False) -> Iterator[None]:
    """Makes sure that no other call uploads to the names below `target`.

    Args:
        may_be_there: says of the name of an object below it whether it does not matter.

    Raises:
        StorageError: another call does, or there is something already.
    """
    claim = target / f"{CLAIM}{secrets.token_hex(8)}"
    try:
        stores.write(claim, b"")
        names = {one.name for one in stores.all_below(target)}
        if claim.name not in names or not all(map(may_be_there, names - {claim.name})):
            raise StorageError(
                f"{target} exists, or another call is writing it: choose another target, or call again "
                "once no other call writes it"
            )
        yield
    finally:
        try:
            stores.remove(claim)
        except OSError as error:
            logger.warning("%s is no longer needed and was not removed: %s; delete it by hand", claim, error)


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
    """Replaces a temporary name in errors by the name of what is being made, which is all that users know.

    Adds the name where a disk is full: writing to an open file names none.
    """

    def renamed(value: Any) -> Any:
        return value.replace(str(temporary), str(target)) if isinstance(value, str) else value

    try:
        yield
    except (DataStatesError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
            error.filename = str(temporary.parent if is_object(target) else target)
        elif isinstance(error, OSError) and isinstance(error.filename, str | Path):
            error.filename = renamed(str(error.filename))
        else:
            error.args = tuple(map(renamed, error.args))
        raise


def sync_tree(root: Path) -> None:
    """Syncs a file, or a directory with all its contents."""
    for path in [*root.rglob("*"), root]:
        with opened(path, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
