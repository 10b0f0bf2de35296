"""Copies of a node's files in the near tiers of other nodes, so that one lost node costs no checkpoint.

Protocol, once all ranks have the manifest of a save (publishing.py):
  1. The nodes with files near are a ring, in the order of their first ranks. With K replicas, each node
     fetches the files of K others, which divide the ring into equal parts: nodes that are next to each other
     are often in one rack, and lost together. Files go where its own are. Its ranks share the work.
  2. A file comes from the rank that wrote it (serving.py), to a temporary name. It is synced, and read again:
     its footer has to be the one that the manifest names, and each block has to have its checksum.
  3. It is renamed, and so counts: for a load it is as good as the original (recovery.py).
  4. When all ranks are done, the save counts as published. The copies are removed with the folder.
Before that, the checkpoint before it is kept everywhere. What fails here fails no save: there is a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_datastates.config import Options
from megatron_datastates.engine.atomic_files import appearing, sync_directory
from megatron_datastates.engine.faults import Faults
from megatron_datastates.engine.reader import Reader, read_footer
from megatron_datastates.errors import CorruptDataError, DataStatesError
from megatron_datastates.format.manifest import FileEntry, Manifest
from megatron_datastates.format.values import Extent, SaveId
from megatron_datastates.pipeline.near.copying import PIECE_BYTES, is_whole, new_file, read_extent
from megatron_datastates.pipeline.near.places import SPARE_BYTES, free_bytes, occupied_bytes
from megatron_datastates.pipeline.near.serving import Endpoint, Server, download
from megatron_datastates.pipeline.runs.opening import check_identity
from megatron_datastates.pipeline.saving.records import HOST_BYTES, RankRecord, Records

logger = logging.getLogger(__name__)
_ATTEMPTS = 3
_PAUSE_SECONDS = 0.5  # before the next one


def host_name() -> bytes:
    """Returns what people call this node; the end of a name that is too long for a record."""
    return socket.gethostname().partition(".")[0].encode("ascii", "replace")[-HOST_BYTES:]


def ring_of(records: Records) -> list[list[int]]:
    """Returns the nodes with files in near tiers, each as the ranks there that have some."""
    near = records.columns[records.columns["is_near"]]
    nodes: dict[int, list[int]] = {}
    for node, rank in zip(near["node"].tolist(), near["rank"].tolist(), strict=True):
        nodes.setdefault(node, []).append(rank)
    return list(nodes.values())


@dataclasses.dataclass(frozen=True)
class CopyTask:
    """The copies that one rank makes.

    Attributes:
        files: each with the record of the rank that has it.
        own_bytes, node_bytes: of the node's own files, and of all copies that it makes.
        nodes: how many have files near.
        is_first: whether the rank is the first one of its node.
    """

    files: list[tuple[FileEntry, RankRecord]]
    own_bytes: int
    node_bytes: int
    nodes: int
    is_first: bool


def copy_task_of(rank: int, records: Records, manifest: Manifest, replicas: int) -> CopyTask:
    """Returns the copies that a rank with files in a near tier makes.

    Args:
        records: of all ranks of the world, so that each is at the place of its rank.
    """
    ring = ring_of(records)
    own = next(n for n, ranks in enumerate(ring) if rank in ranks)
    count = min(replicas, len(ring) - 1)
    fetched = [(own - step * (len(ring) // (count + 1))) % len(ring) for step in range(1, count + 1)]
    origins = {origin for n in fetched for origin in ring[n]}
    wanted = [file for file in manifest.files if file.rank in origins]
    part = wanted[ring[own].index(rank) :: len(ring[own])]
    return CopyTask(
        files=[(file, records[file.rank]) for file in part],
        own_bytes=sum(file.bytes for file in manifest.files if file.rank in ring[own]),
        node_bytes=sum(file.bytes for file in wanted),
        nodes=len(ring),
        is_first=rank == ring[own][0],
    )


@dataclasses.dataclass
class Copied:
    """What one rank has copied of a save.

    Attributes:
        started_at: as time.time() has it.
        origins: the nodes whose files it copies.
        files, bytes: that are there now; bytes without those that were there before.
        error: why copies are left out; empty if none is.
    """

    started_at: float
    origins: list[str]
    seconds: float = 0.0
    files: int = 0
    bytes: int = 0
    error: str = ""


class Replicas:
    """What this rank does for copies: serves its own files, and fetches those of others.

    `offer` and `withdraw` are called by the trainer's thread, `fetch` by the thread of a save.
    """

    def __init__(self, options: Options, faults: Faults) -> None:
        self.count = options.near_replicas
        self._options = options
        self._faults = faults
        self._server: Server | None = None
        self._can_serve = True
        self._is_warned = False
        self._one_save = threading.Lock()  # held while copies of one save are made: the older one first

    def offer(self, save_id: SaveId, folder: Path) -> bytes:
        """Serves this rank's files of a save from now on; returns where, for its record.

        Returns nothing if it cannot, which it tries once.
        """
        if not self._can_serve:
            return b""
        if self._server is not None and self._server.is_lost:
            logger.warning(
                "the thread that serves this rank's files to other nodes has ended, as where memory lacks: "
                "they may have no copies of the last saves; a new thread serves the next ones"
            )
            self.close()
        try:
            self._server = self._server or Server()
        except (OSError, RuntimeError) as error:
            self._can_serve = False
            self._warn(f"this rank cannot serve its files: {error}")
            return b""
        self._server.offer(save_id, folder)
        return self._server.endpoint.encode()

    def withdraw(self, save_id: SaveId) -> None:
        """Notes that a save is over."""
        if self._server is not None:
            self._server.withdraw(save_id)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def fetch(self, task: CopyTask, folder: Path, manifest: Manifest, is_over: Callable[[], bool]) -> Copied:
        """Makes this rank's copies. Never raises: what cannot be copied now is left out, with one warning.

        Args:
            folder: of the save, in this node's near tier.
            is_over: the save has failed or was given up, so that copies are of no use.
        """
        copied = Copied(time.time(), list(dict.fromkeys(map(_name_of, (one for _, one in task.files)))))
        begin = time.perf_counter()
        with self._one_save:
            if task.nodes == 1 and task.is_first:
                self._leave_out(copied, "all files in near tiers are of one node")
            self._fetch_all(task, folder, manifest, is_over, copied)
        copied.seconds = time.perf_counter() - begin
        return copied

    def _fetch_all(
        self, task: CopyTask, folder: Path, manifest: Manifest, is_over: Callable[[], bool], copied: Copied
    ) -> None:
        failure = ""
        for file, origin in task.files:
            try:
                if lack := self._lack_of_room(task, folder, manifest.save_id):
                    copied.error = f"{folder}: {lack}"
                    failure = copied.error if task.is_first else ""  # one rank of the node says it
                    break
                copied.bytes += self._copy(file, origin, folder, manifest, is_over)
                copied.files += 1
            except Exception as error:
                failure = failure or f"{file.name} of {_node(origin)}: {error}"
                if isinstance(error, TimeoutError) and not is_over():
                    break  # the save waits for this
            if is_over():
                return
        if failure:
            self._leave_out(copied, failure)
        elif task.files and not copied.error:
            self._is_warned = False

    def _leave_out(self, copied: Copied, reason: str) -> None:
        copied.error = reason
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if not self._is_warned:
            logger.warning(
                "no copies are made on other nodes (--datastates-near-replicas): %s; if a node is lost, "
                "so are its files that are not in --save yet",
                reason,
            )
        self._is_warned = True

    def _lack_of_room(self, task: CopyTask, folder: Path, save_id: SaveId) -> str:
        """Returns why the node has no room for its copies, counting those there; empty if it has."""
        made = max(occupied_bytes(folder, save_id) - task.own_bytes, 0)
        free = free_bytes(folder) + made
        needed = task.node_bytes + SPARE_BYTES
        return "" if free >= needed else f"{free >> 20} MiB are free, {needed >> 20} MiB are needed"

    def _copy(
        self,
        file: FileEntry,
        origin: RankRecord,
        folder: Path,
        manifest: Manifest,
        is_over: Callable[[], bool],
    ) -> int:
        """Makes one copy; returns how many bytes were fetched: none if the file is there already."""
        target = folder / file.name
        if is_whole(target, manifest, file) or (file.save_id and _link(target, manifest, file)):
            return 0
        endpoint = Endpoint.decode(origin.endpoint)
        if endpoint is None:
            raise DataStatesError("this rank serves no files: see its log")
        for attempt in range(_ATTEMPTS):
            try:
                self._fetch(endpoint, target, manifest, file, is_over)
                return file.bytes
            except (OSError, DataStatesError) as error:
                if _is_final(error) or is_over() or attempt == _ATTEMPTS - 1:
                    raise
            time.sleep(_PAUSE_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    def _fetch(
        self,
        endpoint: Endpoint,
        target: Path,
        manifest: Manifest,
        file: FileEntry,
        is_over: Callable[[], bool],
    ) -> None:
        memory = mmap.mmap(-1, PIECE_BYTES)  # begins at a page, for direct I/O
        with appearing(target, manifest.file_save_id(file)) as temporary:
            at = 0
            with new_file(temporary) as write:
                pieces = download(endpoint, manifest.save_id, file.name, file.bytes, memoryview(memory))
                for count in pieces:
                    self._faults.point("replica read")
                    if is_over():
                        raise DataStatesError("given up: the save is over")
                    write(memoryview(memory)[:count], at)
                    at += count
                self._faults.point("replica sync")
            self._check(temporary, manifest, file, memory)
            self._faults.point("replica rename")

    def _check(self, path: Path, manifest: Manifest, file: FileEntry, memory: mmap.mmap) -> None:
        """Reads a copy from where it is stored. Raises DataStatesError if it is not the manifest's file."""
        footer = read_footer(path, file.bytes)
        check_identity(manifest, file, footer, path)
        reader = Reader(self._options)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        for at in range(0, footer.data_bytes, PIECE_BYTES):
            extent = Extent(0, at, min(PIECE_BYTES, footer.data_bytes - at))
            damage = read_extent(reader, path, footer, extent, address)
            if damage:
                raise CorruptDataError(f"what arrived is corrupt: {damage}")


def _link(target: Path, manifest: Manifest, file: FileEntry) -> bool:
    """Links a file of an earlier save, durably, from where this node has it; returns whether it could."""
    with contextlib.suppress(OSError):
        for folder in target.parent.parent.iterdir():
            if is_whole(folder / file.name, manifest, file):
                os.link(folder / file.name, target)
                sync_directory(target.parent)
                return True
    return False


def _is_final(error: Exception) -> bool:
    """Returns whether it is of no use to try again at once."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in full)


def _name_of(record: RankRecord) -> str:
    return record.host_name or "?"


def _node(record: RankRecord) -> str:
    return f"node {_name_of(record)} (rank {record.rank})"
