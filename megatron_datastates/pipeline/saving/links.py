"""Data files that later checkpoints of a run may share, and the hard links that share them.

Belongs here: which file a rank may link, and linking it. Does not belong here: whether its bytes are those
of the state (stable.py).

A link is made only if the file is still the one that was published: the same inode, the same size. A link
never replaces a file. Whatever prevents it (another file system, no support, a limit, a file that is gone) is
no failure: the save writes the file anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import stat
from pathlib import Path

from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.engine.faults import Faults
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.saving.records import DurableFile

logger = logging.getLogger(__name__)
_MOST_FILES = 8  # a few layouts may alternate; more than that means that they keep changing
_MOST_CHANGES = 6  # that are counted: at least every 63rd save compares
_NEVER = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # recur at every attempt
Identity = tuple[int, int, int]  # of a file, whatever it is called: device, inode and bytes


def identity_of(path: Path) -> Identity:
    """Returns the identity of a regular file. Raises OSError."""
    facts = os.lstat(path)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return facts.st_dev, facts.st_ino, facts.st_size


@dataclasses.dataclass(frozen=True)
class LinkableFile:
    """A durable data file that is, or will be, part of a published checkpoint."""

    path: Path
    save_id: SaveId  # of the save that wrote it
    durable: DurableFile
    content_sha256: bytes
    identity: Identity


@dataclasses.dataclass
class _Last:
    """The file of one layout in the last checkpoint."""

    file: LinkableFile
    changes: int = 0  # saves, one after the other, whose tensors were compared and had changed
    skipped: int = 0  # saves since then that did not compare


class Links:
    """What a rank may link, by run directory and layout. Used by the trainer's thread only.

    What changes although it is not trained (a teacher that is an average, say) is compared ever more rarely:
    a comparison reads everything before the trainer may go on, and then everything is written all the same.
    """

    def __init__(self) -> None:
        self._files: dict[tuple[Path, bytes], _Last] = {}
        self._refused_in: set[Path] = set()  # run directories

    def find(self, directory: Path, layout_digest: bytes) -> LinkableFile | None:
        """Returns the file of this layout in the last checkpoint there, if it is to be compared."""
        last = self._files.get((directory.parent, layout_digest))
        if directory.parent in self._refused_in or last is None:
            return None
        if last.changes and last.skipped < 2**last.changes - 2:
            last.skipped += 1
            return None
        return last.file

    def keep(self, file: LinkableFile, layout_digest: bytes, has_changed: bool | None) -> None:
        """Notes that a checkpoint with this file was published.

        Args:
            has_changed: since the last one; None if that was not compared.
        """
        key = (file.path.parent.parent, layout_digest)
        last = self._files.pop(key, None)
        if last is None or has_changed is not None:
            changes = min(last.changes + 1, _MOST_CHANGES) if last is not None and has_changed else 0
            last = _Last(file, changes)
        last.file = file
        self._files[key] = last
        while len(self._files) > _MOST_FILES:
            del self._files[next(iter(self._files))]

    def note_refusal(self, directory: Path, error: OSError) -> None:
        """Stops linking in this run directory if the error will recur; logs that once."""
        if error.errno in _NEVER and directory.parent not in self._refused_in:
            self._refused_in.add(directory.parent)
            logger.warning(
                "unchanged tensors cannot be shared between the checkpoints in %s, and every save writes "
                "them: a hard link was refused (%s)",
                directory.parent,
                error.strerror,
            )


class Link:
    """The name of a shared file in the directory of one save."""

    def __init__(self, file: LinkableFile, directory: Path, faults: Faults) -> None:
        self.file = dataclasses.replace(file, path=directory / file.path.name)
        self._target, self._faults = file.path, faults
        self._made = False
        self._pid = os.getpid()
        self._directories: list[Path] = []

    def make(self) -> None:
        """Makes the name, unless the directory has that file already. Raises OSError."""
        self._directories = _make_directories(self.file.path.parent)
        self._faults.point("link")
        try:
            os.link(self._target, self.file.path, follow_symlinks=False)
            self._made = True
        except FileExistsError:
            pass  # of an earlier checkpoint in the same directory
        if identity_of(self.file.path) != self.file.identity:
            self.remove()
            raise OSError(errno.ESTALE, "another file than the one that was published", str(self.file.path))

    def sync(self) -> None:
        """Makes the name durable. Raises OSError."""
        self._faults.point("sync link")
        for directory in self._directories:
            sync_directory(directory)

    def remove(self) -> None:
        """Removes the name if this save made it; in a forked child the parent's save goes on.

        Never raises, as removing a written file does not: it may be called in a poll, on this rank alone.
        What is left is a file that no manifest names.
        """
        if self._made and self._pid == os.getpid():
            self._made = False
            with contextlib.suppress(OSError):
                self.file.path.unlink()


def _make_directories(directory: Path) -> list[Path]:
    """Makes a directory; returns those to be synced: it, and the parents of all that were made."""
    found = [directory]
    while not found[-1].exists():
        found.append(found[-1].parent)
    directory.mkdir(parents=True, exist_ok=True)
    return found
