"""Where things are in the near tier of a node.

    NEAR/                                     --datastates-near
      gpt-5f0c6e19a2b3c4d5/                   one run: the name and a hash of the path of its directory
        latest_checkpointed_iteration.txt     what the node of rank 0 has published last
        iter_0000100/                         the node's data files, and manifest, index, metadata.json

Two ranks share a near tier, and are of one node, if they see the same directory: same host, device and inode.
Nothing here imports torch or the native module.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
from pathlib import Path

from megatron_datastates.errors import FormatError
from megatron_datastates.files import MANIFEST_BYTES, read_regular
from megatron_datastates.format.directory import iteration_in_name
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, is_data_file_name, save_id_in_name
from megatron_datastates.pipeline.runs import is_published

_HASH_DIGITS = 16


def near_root(option: str) -> Path:
    """Returns the directory that `--datastates-near` names, with the environment's variables filled in.

    Each node has its own environment: launchers say there where its disk is mounted.
    """
    return Path(os.path.expandvars(option)).absolute()


def near_run(root: Path, run: Path) -> Path:
    """Returns the folder of a run in a near tier, by the directory that holds its checkpoints."""
    real = os.path.realpath(run)
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:_HASH_DIGITS]
    return root / f"{Path(real).name}-{digest}"


def near_folder(root: Path, checkpoint: Path) -> Path:
    """Returns the folder of a checkpoint in a near tier."""
    absolute = checkpoint.absolute()
    return near_run(root, absolute.parent) / absolute.name


def node_of(root: Path) -> int:
    """Returns a number that the ranks of one node share. Raises OSError if the directory is not there."""
    seen = root.stat()
    name = f"{socket.gethostname()} {seen.st_dev} {seen.st_ino}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") or 1


def free_bytes(root: Path) -> int:
    """Returns how many bytes may be written to a near tier. Raises OSError."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def manifest_in(folder: Path) -> Manifest | None:
    """Returns the manifest in a folder; None if there is none that can be read."""
    try:
        return Manifest.decode(read_regular(folder / MANIFEST_NAME, MANIFEST_BYTES), str(folder))
    except (OSError, FormatError):
        return None


def near_iterations(run: Path) -> dict[int, int]:
    """Returns the iterations that a run's folder in a near tier holds, each with its number of data files."""
    found = {}
    with contextlib.suppress(OSError):
        for folder in run.iterdir():
            number = iteration_in_name(folder.name)
            if number is not None and is_published(folder):
                found[number] = sum(map(is_data_file_name, os.listdir(folder)))
    return dict(sorted(found.items()))


def remove_folder(folder: Path) -> None:
    """Removes a checkpoint from a near tier, its manifest first. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        (folder / MANIFEST_NAME).unlink()
    shutil.rmtree(folder)


def leftovers(run: Path, own_run_id: int) -> tuple[list[Path], list[Path]]:
    """Returns the folders that earlier jobs left in a near tier: published ones, oldest first, and others.

    Folders with any file of this job are not among them.
    """
    published: list[Path] = []
    others: list[Path] = []
    with contextlib.suppress(OSError):
        for folder in sorted(run.iterdir()):
            if not folder.is_dir() or folder.is_symlink():
                continue
            ids = [save_id for name in os.listdir(folder) if (save_id := save_id_in_name(name))]
            if not ids or any(save_id.run_id == own_run_id for save_id in ids):
                continue  # one without files may belong to a save that has just begun
            (published if is_published(folder) else others).append(folder)
    return sorted(published, key=_published_at), others


def _published_at(folder: Path) -> float:
    try:
        return (folder / MANIFEST_NAME).stat().st_mtime
    except OSError:
        return 0.0
