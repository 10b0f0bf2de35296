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
import dataclasses
import hashlib
import logging
import os
import secrets
import shutil
import socket
import stat
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from megatron_datastates.errors import DataStatesError, OptionError
from megatron_datastates.files import (
    MANIFEST_BYTES,
    Status,
    is_object,
    names_in,
    open_regular,
    path_of,
    put_back,
    read_regular,
    real_path,
    status_of_open,
)
from megatron_datastates.format.directory import iteration_in_name
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId, is_data_file_name, save_id_in_name
from megatron_datastates.pipeline.runs.runs import is_published
from megatron_datastates.stores import remove_below

logger = logging.getLogger(__name__)
_HASH_DIGITS = 16
SPARE_BYTES = 64 << 20  # of a near tier that are left free
_BLOCK_BYTES = 512  # in which the system counts what a file occupies
NODES_NAME = "nodes.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_resolved: dict[Path, Path] = {}  # directories of runs without links in their paths, as seen last


class NodeEntry(msgspec.Struct):
    """One node that has files of a save in its near tier."""

    name: str
    ranks: list[int]  # whose files they are


class Nodes(msgspec.Struct):
    """Which nodes wrote a save to near tiers; stored with it on each."""

    own: int  # which of them this node is
    nodes: list[NodeEntry]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


_NODES = msgspec.json.Decoder(Nodes)  # made at import, as in manifest.py


def nodes_in(folder: Path) -> Nodes | None:
    """Returns which nodes wrote the save in a folder of a near tier; None if it does not say so."""
    try:
        nodes = _NODES.decode(read_regular(folder / NODES_NAME, MANIFEST_BYTES))
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
        return None
    return nodes if 0 <= nodes.own < len(nodes.nodes) else None


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
    name = f"{_kernel()} {seen.st_dev} {seen.st_ino}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") or 1


def _kernel() -> str:
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


class Published:
    """The save that is published in a folder, for who looks often: a manifest is read once.

    With many ranks it has megabytes, and each node looks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: tuple[Status, SaveId] | None = None  # of the last manifest that was read

    def now(self) -> SaveId | None:
        """Returns what `published_in` does. Each time, a client of NFS asks the server for the file."""
        if is_object(self._folder):
            return published_in(self._folder)
        path = self._folder / MANIFEST_NAME
        with contextlib.suppress(OSError, DataStatesError):
            with open_regular(path, MANIFEST_BYTES) as file:
                status = status_of_open(file)
                if self._read is None or self._read[0] != status:
                    self._read = status, Manifest.decode_save_id(file.read(status[1]), str(self._folder))
            return self._read[1]
        return None


@dataclasses.dataclass(frozen=True)
class Holding:
    """What a node's near tier has of one checkpoint."""

    files: int  # data files
    copies: dict[str, int]  # those of them that are copies, by the name of the node that wrote them
    own: str  # this node's name, as of the save; empty if that is not known
    elsewhere: list[str]  # the names of the other nodes that wrote files of it near
    has_manifest: bool = True  # one that can be read


def near_iterations(run: Path) -> dict[int, Holding]:
    """Returns what a run's folder in a near tier holds, by iteration."""
    holdings, folders = {}, list[Path]()
    with contextlib.suppress(OSError):
        folders = list(run.iterdir())
    for folder in folders:
        number = iteration_in_name(folder.name)
        with contextlib.suppress(OSError):  # a drain removes it meanwhile
            if number is not None and is_published(folder):
                holdings[number] = _holding(folder)
    return dict(sorted(holdings.items()))


def _holding(folder: Path) -> Holding:
    names = set(filter(is_data_file_name, os.listdir(folder)))
    nodes, manifest = nodes_in(folder), manifest_in(folder)
    if nodes is None or manifest is None:
        return Holding(len(names), {}, "", [], manifest is not None)
    ranks = [file.rank for file in manifest.files if file.name in names]  # without left-overs of other saves
    others = [node for n, node in enumerate(nodes.nodes) if n != nodes.own]
    copies = Counter(node.name for node in others for rank in ranks if rank in node.ranks)
    return Holding(
        len(ranks),
        dict(copies),
        nodes.nodes[nodes.own].name,
        [node.name for node in others],
    )


def remove_folder(folder: Path) -> None:
    """Removes a checkpoint's directory, its manifest first. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        (folder / MANIFEST_NAME).unlink()
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
    # Names without a save id first: what a kill leaves has to say whose it is (earlier_jobs.py).
    for name, own in sorted(names.items(), key=lambda item: item[1] is not None):
        if (own in save_ids or is_alone) and name not in kept and not (folder / name).is_dir():
            (folder / name).unlink(missing_ok=True)  # the saves themselves remove some
    if is_alone:
        with contextlib.suppress(OSError):  # it is not empty any more
            folder.rmdir()


def run_ids_in(run: Path) -> frozenset[int]:
    """Returns the run ids of the jobs that have files in a run's folder of a near tier."""
    with contextlib.suppress(OSError):
        return frozenset(save_id.run_id for folder in folders_of_run(run) for save_id in save_ids_in(folder))
    return frozenset()


def remove_earlier(run: Path, iteration: int, own_run_id: int) -> None:
    """Removes what earlier jobs left of an iteration and of those before it. Ranks may do so at one time."""
    for folder in folders_of_run(run):
        number, ids = iteration_in_name(folder.name), save_ids_in(folder)
        if number is None or number > iteration or any(one.run_id == own_run_id for one in ids):
            continue
        if ids:  # else a save of another rank may have just begun
            with contextlib.suppress(OSError):
                remove_saves(folder, ids)


def folders_of_run(run: Path) -> list[Path]:
    """Returns the folders of a run's checkpoints in a near tier, by name. Raises OSError."""
    return [folder for folder in sorted(run.iterdir()) if folder.is_dir() and not folder.is_symlink()]


def save_ids_in(folder: Path) -> set[SaveId]:
    """Returns the saves that have files in a folder, or objects below a name; none if it is gone."""
    try:
        return {save_id for name in names_in(folder) if (save_id := save_id_in_name(name))}
    except FileNotFoundError:
        return set()
