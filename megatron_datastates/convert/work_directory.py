"""The directory that a conversion writes to, beside its target: locked, emptied, and removed on failure.

What no conversion of the same source makes is never deleted. Some network file systems have no locks, or
locks of one node: there, two conversions may empty the directory. So each has a claim in it, a file of its
own; one that does not find its claim alone publishes nothing there, and makes no target. Of two, one at most
does, and perhaps neither.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from megatron_datastates.convert.sinks.target import CLAIM, refuse_target
from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.errors import StorageError
from megatron_datastates.files import lock, open_regular
from megatron_datastates.format.directory import is_of_a_format


@contextlib.contextmanager
def locked_work_directory(path: Path, target: Path, other_names: Collection[str]) -> Iterator[str]:
    """Creates or empties the directory and locks it. Removes it at the end if it still has this name.

    Yields the name of the claim, which a conversion that has emptied it meanwhile has removed.

    Args:
        target: what is made there, for messages.
        other_names: names in the source, besides those of the formats, that a conversion copies.

    Raises:
        StorageError: another conversion holds the lock, or the directory contains something that this
            conversion does not make.
    """
    descriptor = _open(path)
    try:
        # What another conversion had made may have got another name, or be gone, since it was opened.
        if not lock(descriptor) or not _is_at(descriptor, path):
            raise _another_makes(target)
        _empty(path, other_names)
        claim = path / f"{CLAIM}{secrets.token_hex(8)}.tmp"
        try:
            claim.touch()
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            raise
        try:
            yield claim.name
        finally:
            if _is_at(descriptor, path) and claim.exists():  # after a success it has the target's name
                _remove_tree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _another_makes(target: Path) -> StorageError:
    return StorageError(f"another conversion is making {target}: wait until it has finished, or stop it")


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether the open directory has this name."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


def _open(path: Path) -> int:
    try:
        if not path.is_symlink():
            path.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTDIR, errno.ELOOP):
            raise
        raise StorageError(
            f"{path} is not a directory, and the conversion needs a directory of this name: remove it"
        ) from None


def _empty(directory: Path, other_names: Collection[str]) -> None:
    """Removes the directory's contents, or nothing: raises StorageError if some are not a conversion's."""
    paths = list(directory.iterdir())
    foreign = [path for path in paths if not is_of_a_format(path.name) and path.name not in other_names]
    if foreign:
        raise StorageError(
            f"{directory} contains {foreign[0].name!r}, which this conversion does not make, so it was not "
            "emptied: move or remove the directory"
        )
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            _remove_tree(path)
        else:
            path.unlink()


def _remove_tree(directory: Path, *, ignore_errors: bool = False) -> None:
    """Removes a directory, with copies of directories that forbid writing."""
    for folder, _, _ in os.walk(directory):
        with contextlib.suppress(OSError):
            Path(folder).chmod(stat.S_IRWXU)
    shutil.rmtree(directory, ignore_errors=ignore_errors)


def require_claim(work_directory: Path, target: Path, claim: str) -> None:
    """Raises StorageError if another conversion to the target has used the directory meanwhile."""
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError):  # the other one has emptied it, or finished
        # What a client of NFS lists may be a minute old. To open a file, it asks the server.
        open_regular(work_directory / claim).close()
        names = os.listdir(work_directory)
    if [name for name in names if name.startswith(CLAIM)] != [claim]:
        raise _another_makes(target)


def rename_to_target(work_directory: Path, target: Path, claim: str) -> None:
    """Renames the complete directory to the target, durably.

    Raises:
        StorageError: the target exists, or another conversion has used the directory meanwhile.
    """
    refuse_target(target)
    require_claim(work_directory, target, claim)
    work_directory.rename(target)
    (target / claim).unlink()
    sync_directory(target)
    sync_directory(target.parent)
