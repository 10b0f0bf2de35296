"""Where things are in the near tier of a node.

    NEAR/                                     --datastates-near
      gpt-5f0c6e19a2b3c4d5/                   one run: the name and a hash of the path of its directory
        datastates.jobs                       which jobs have saved the run (pipeline/runs/jobs.py)
        iter_0000100/                         the node's data files, copies of other nodes' (replicas.py),
                                              manifest, index, metadata.json, and nodes.json: whose they are

Two ranks share a near tier, and are of one node, if they see the same directory: kernel, device, inode.
Nothing here imports torch or the native module.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from megatron_datastates.errors import DataStatesError, OptionError
from megatron_datastates.files import (
    MANIFEST_BYTES,
    is_object,
    names_in,
    path_of,
    read_regular,
    real_path,
)
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId, save_id_in_name

logger = logging.getLogger(__name__)
_HASH_DIGITS = 16
SPARE_BYTES = 64 << 20  # of a near tier that are left free
_BLOCK_BYTES = 512  # in which the system counts what a file occupies
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_resolved: dict[Path, Path] = {}  # directories of runs without links in their paths, as seen last


def near_root(option: str | os.PathLike[str]) -> Path:
    """Returns the directory that `--datastates-near` names, with `~` and environment variables filled in.

    Each node has its own environment: launchers say there where its disk is mounted.

    Raises:
        OptionError: with these it is empty, or a URL.
    """
    text = os.path.expanduser(os.path.expandvars(option))  # noqa: PTH111  (Path's raises RuntimeError)
    if not text:
        raise OptionError(
            f"the near tier {option} (--datastates-near) is an empty path with this node's environment: "
            "expected a directory; set the variable on each node"
        )
    root = path_of(text)
    if is_object(root):
        raise OptionError(f"the near tier {root} is in an object store: expected a directory of each node")
    return root.absolute()


def resolve_run(run: Path) -> Path:
    """Returns the path of a run's directory without links; `near_run` finds it by that while it hangs."""
    path = run.absolute()
    resolved = _resolved[path] = real_path(path)
    return resolved


def near_run(root: Path, run: Path, *, follows_links: bool = True) -> Path:
    """Returns the folder of a run in a near tier, by the directory that holds its checkpoints.

    Args:
        follows_links: in the path of that directory, which is looked at for them. Else they are as this
            process has seen them last.
    """
    real = run
    if not is_object(run):
        real = resolve_run(run) if follows_links else _resolved.get(run.absolute(), run)
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:_HASH_DIGITS]
    return root / f"{real.name}-{digest}"


def near_folder(root: Path, checkpoint: Path) -> Path:
    """Returns the folder of a checkpoint in a near tier."""
    absolute = checkpoint.absolute()
    return near_run(root, absolute.parent) / absolute.name


def node_of(root: Path) -> int:
    """Returns a number that the ranks of one node share. Raises OSError if the directory is not there."""
    seen = root.stat()
    name = f"{kernel_id()} {seen.st_dev} {seen.st_ino}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") or 1


def kernel_id() -> str:
    """Returns an identifier of this node's kernel: its containers may have several host names."""
    try:
        return _BOOT_ID.read_text()
    except OSError:
        return socket.gethostname()


def warn_if_shared(root: Path) -> None:
    """Warns if others own a near tier, or any user may write to it. Raises OSError."""
    status = root.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & stat.S_IWOTH:
        logger.warning(
            "the near tier %s may not be this user's alone: expected a directory of user %s to which not all "
            "users may write, found %s of user %s: a checkpoint that somebody puts there is resumed from; "
            "remove it, or name another one",
            root,
            os.getuid(),
            stat.filemode(status.st_mode),
            status.st_uid,
        )


def free_bytes(root: Path) -> int:
    """Returns how many bytes may be written to a near tier. Raises OSError."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def occupied_bytes(folder: Path, save_id: SaveId) -> int:
    """Returns how many bytes the files of a save occupy in a folder, or have reserved. Raises OSError."""
    try:
        return sum(file.st_blocks * _BLOCK_BYTES for file in _files_of(folder, save_id))
    except FileNotFoundError:
        return 0


def arrived_bytes(folder: Path, save_id: SaveId, known: Collection[str]) -> int:
    """Returns the sizes of a save's files in a folder, also of unfinished copies, but for `known` names.

    Raises OSError.
    """
    if is_object(folder) or not folder.is_dir():  # an object shows nothing of what has arrived
        return 0
    return sum(file.st_size for file in _files_of(folder, save_id, known))


def _files_of(folder: Path, save_id: SaveId, known: Collection[str] = ()) -> Iterator[os.stat_result]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name not in known and save_id_in_name(entry.name) == save_id:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False)


def manifest_in(folder: Path) -> Manifest | None:
    """Returns the manifest in a folder; None if there is none that can be read."""
    try:
        return Manifest.decode(read_regular(folder / MANIFEST_NAME, MANIFEST_BYTES), str(folder))
    except (OSError, DataStatesError):  # also of a later release
        return None


def published_in(folder: Path) -> SaveId | None:
    """Returns the save that is published in a folder; None if there is none, or its manifest cannot be read.

    Looks at nothing else of the manifest, which takes long where a run has many ranks.
    """
    with contextlib.suppress(OSError):
        return read_published(folder)
    return None


def read_published(folder: Path) -> SaveId | None:
    """Returns the save that is published in a folder; None if there is none, or its manifest is damaged.

    Raises:
        OSError: the manifest is there and cannot be read.
    """
    try:
        return Manifest.decode_save_id(read_regular(folder / MANIFEST_NAME, MANIFEST_BYTES), str(folder))
    except (FileNotFoundError, NotADirectoryError, DataStatesError):  # also of a later release
        return None


def run_ids_in(run: Path) -> frozenset[int]:
    """Returns the run ids of the jobs that have files in a run's folder of a near tier."""
    with contextlib.suppress(OSError):
        return frozenset(save_id.run_id for folder in folders_of_run(run) for save_id in save_ids_in(folder))
    return frozenset()


def folders_of_run(run: Path) -> list[Path]:
    """Returns the folders of a run's checkpoints in a near tier, by name. Raises OSError."""
    return [folder for folder in sorted(run.iterdir()) if folder.is_dir() and not folder.is_symlink()]


def save_ids_in(folder: Path) -> set[SaveId]:
    """Returns the saves that have files in a folder, or objects below a name; none if it is gone."""
    try:
        return {save_id for name in names_in(folder) if (save_id := save_id_in_name(name))}
    except FileNotFoundError:
        return set()
