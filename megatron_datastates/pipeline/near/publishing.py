"""Publishing near: what rank 0 sends to all ranks, and what the ranks of each node do with it.

The first rank of a node stores it beside the node's files, the manifest last. Then the ranks make copies of
other nodes' files, if the options ask for any (replicas.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import DataStatesError
from megatron_datastates.files import MANIFEST_BYTES, OBJECT_BYTES, read_regular
from megatron_datastates.format.directory import METADATA_NAME
from megatron_datastates.format.manifest import FileEntry, Manifest
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.near.nodes import NODES_NAME, NodeEntry, Nodes
from megatron_datastates.pipeline.near.replicas import Copied, Replicas, copy_task_of, ring_of
from megatron_datastates.pipeline.publishing.collectives import Collectives, PollableResult
from megatron_datastates.pipeline.publishing.directory_publisher import SmallFiles, encoded_manifest
from megatron_datastates.pipeline.publishing.layouts import LayoutStore
from megatron_datastates.pipeline.publishing.presence import holds_exactly, missing_data_files, sync_above
from megatron_datastates.pipeline.runs.branches import point_of
from megatron_datastates.pipeline.runs.jobs import note_job
from megatron_datastates.pipeline.saving.milestones import SaveContext
from megatron_datastates.pipeline.saving.records import Records


class _Offer(msgspec.Struct):
    """All of a checkpoint that is not in data files."""

    manifest: bytes
    metadata: bytes
    others: dict[str, bytes]
    index: bytes  # empty if the nodes have it from an earlier save


_OFFER = msgspec.msgpack.Decoder(_Offer)


class NearPlace(NamedTuple):
    """Whose near tier a rank can use, the name of that node, and who makes copies of others' files."""

    node: int = 0
    host: bytes = b""
    endpoint: bytes = b""  # where the rank serves its files to other nodes
    replicas: Replicas | None = None


class Storing:
    """Whether this rank may store a save's small files, and the manifest that it has replaced, if any.

    Outlives its NearPublishing, which holds all that the ranks have sent.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while the files are stored; guards the rest
        self.is_withdrawn = False
        self.replaced = b""

    def withdraw(self) -> bytes:
        """Keeps this rank from storing anything from now on, because the save has failed.

        Another rank's failure may come while this one stores: waits until it has. Returns the manifest that
        was there before; empty if there was none, or if this rank has not come so far.
        """
        with self.lock:
            self.is_withdrawn = True
            return self.replaced


class NearPublishing:
    """This rank's part of publishing one save in the near tiers.

    Attributes:
        stores: whether this rank stores small files: the first rank of its node whose data files are near.
        has_part: whether there is anything to do for it once rank 0's bytes are here.
        files: once published, where this rank stores: the node's data files that are near.
        small_files: once rank 0 has them, or this rank has stored them.
        others: likewise, the content of the other files that the manifest names.
        needs_drain: some rank's files are in the checkpoint's directory already, so the rest must follow.
        is_in_place: whether the manifest is in its place, or may be; also after a failure.
        storing: what is to know when the save has failed.
        copied: what this rank has copied from other nodes, if the options ask for copies.
    """

    def __init__(
        self,
        records: Records,
        context: SaveContext,
        layouts: LayoutStore,
        faults: Faults,
        replicas: Replicas | None,
    ) -> None:
        self._records = records
        self._context = context
        self._layouts = layouts
        self._faults = faults
        self._replicas = replicas if context.near is not None else None
        near = records.columns[records.columns["is_near"]]
        _, firsts = np.unique(near["node"], return_index=True)
        self._firsts = tuple(sorted(near["rank"][firsts].tolist()))
        self.stores = context.rank in self._firsts
        self.has_part = self.stores or self._replicas is not None
        self.files: list[FileEntry] = []
        self.small_files: SmallFiles | None = None
        self.others: dict[str, bytes] = {}
        self.needs_drain = bool((records.columns["has_file"] & ~records.columns["is_near"]).any())
        self.is_in_place = False
        self._is_renamed = False
        self.storing = Storing()
        self.copied: Copied | None = None
        self._offer = b""  # on rank 0
        self._pending: PollableResult[bytes] | None = None
        self._has_arrived = False

    # -- rank 0 -----------------------------------------------------------------------------------------

    def offer(self, files: SmallFiles) -> None:
        """Prepares what the polls send to all ranks. On rank 0's publishing thread. Raises OSError."""
        self.others = {
            name: files.others.get(name) or read_regular(self._context.directory / name, OBJECT_BYTES)
            for name in (other.name for other in files.manifest.others)
        }
        self.small_files = files
        known = self._layouts.near_index(files.manifest.index.sha256, self._firsts) is not None
        manifest = encoded_manifest(files.manifest, files.index)
        offer = _Offer(manifest, files.metadata, self.others, b"" if known else files.index)
        encoded = msgspec.msgpack.encode(offer)
        if len(encoded) >= 1 << 31:  # sums of the ranks are of 32 bits
            raise DataStatesError(
                f"the index and the other small files of this checkpoint have {len(encoded)} bytes, and near "
                "tiers take less than 2 GiB: save without --datastates-near"
            )
        self._offer = encoded

    @property
    def offered_bytes(self) -> int:
        """Returns how many bytes rank 0 wants to send; 0 elsewhere, and before it does."""
        return len(self._offer)

    # -- all ranks --------------------------------------------------------------------------------------

    @property
    def lacks_copies(self) -> bool:
        """Returns whether this rank has left out copies that it was to make."""
        return self.copied is not None and bool(self.copied.error)

    @property
    def is_sent(self) -> bool:
        """Returns whether the ranks have begun to send; the same on all of them."""
        return self._pending is not None

    def send(self, collectives: Collectives, size: int) -> None:
        """Sends what rank 0 offers to all ranks. Collective."""
        self._pending = collectives.send_from_first(self._offer, size)

    def has_arrived(self) -> bool:
        """Returns True once: when what rank 0 has sent is here. On the trainer's thread."""
        if self._has_arrived or self._pending is None or not self._pending.is_over():
            return False
        self._has_arrived = True
        return True

    def do_part(self, is_over: Callable[[], bool]) -> None:
        """Does what this rank has to do. On a thread of a rank that `has_part`.

        Args:
            is_over: whether the save has failed or was given up.

        Raises:
            OSError: a file could not be written.
            DataStatesError: data files of this node are gone.
        """
        assert self._pending is not None
        offer = _OFFER.decode(self._pending.result())
        manifest = Manifest.decode(offer.manifest, MANIFEST_NAME, is_own=True)
        if self.stores:
            with self.storing.lock:
                if not self.storing.is_withdrawn:
                    self._store(offer, manifest)
        if self._replicas is not None and self._context.near is not None:
            task = copy_task_of(self._context.rank, self._records, manifest, self._replicas.count)
            self.copied = self._replicas.fetch(task, self._context.near, manifest, is_over)

    def _store(self, offer: _Offer, manifest: Manifest) -> None:
        """Stores it beside the node's data files, the manifest last."""
        assert self._context.near is not None
        folder, save_id = self._context.near, self._context.save_id
        index = offer.index or self._layouts.near_index(manifest.index.sha256, self._firsts)
        if index is None:
            raise DataStatesError("the index of an earlier save is not known any more on this rank")
        self.small_files, self.others = SmallFiles(manifest, index, offer.metadata), offer.others
        contents = {manifest.index.name: index, **offer.others}
        if offer.metadata:
            contents[METADATA_NAME] = offer.metadata
        for name, content in contents.items():
            if not holds_exactly(folder / name, content):
                write_whole(folder / name, content, self._faults, save_id)
        columns, node = self._records.columns, self._records[self._context.rank].node
        own = set(columns["rank"][columns["is_near"] & (columns["node"] == node)].tolist())
        self.files = [file for file in manifest.files if file.rank in own]
        wrong = missing_data_files(folder, msgspec.structs.replace(manifest, files=self.files))
        if wrong:
            raise DataStatesError(
                f"files that ranks have written were not found in {folder}: {', '.join(wrong[:3])}: does "
                "a cleanup script or another job remove files there?"
            )
        write_whole(folder / NODES_NAME, self._nodes().encode(), self._faults, save_id)
        if manifest.iteration is not None:
            with contextlib.suppress(OSError, DataStatesError):  # the drain tries again, and warns
                point = point_of(manifest, manifest.iteration)
                note_job(folder.parent, save_id, point.origin, resumed=point.resumed)
        sync_above(folder)
        path = folder / MANIFEST_NAME
        with contextlib.suppress(OSError):
            self.storing.replaced = read_regular(path, MANIFEST_BYTES)
        try:
            write_whole(path, offer.manifest, self._faults, save_id, self._note_renamed, self._note_sent)
        except OSError:
            if not self._is_renamed:
                self.is_in_place = holds_exactly(path, offer.manifest, if_unknown=self.is_in_place)
            raise

    def _nodes(self) -> Nodes:
        ring = ring_of(self._records)
        own = next(n for n, ranks in enumerate(ring) if ranks[0] == self._context.rank)
        nodes = [NodeEntry(self._records[ranks[0]].host_name, ranks) for ranks in ring]
        return Nodes(own, nodes)

    def _note_sent(self) -> None:
        self.is_in_place = True

    def _note_renamed(self) -> None:
        self._is_renamed = True

    def note_published(self) -> None:
        """Remembers, once the save is published near, that the nodes have its index."""
        if self.small_files is not None:
            digest = self.small_files.manifest.index.sha256
            self._layouts.keep_near_index(digest, self._firsts, self.small_files.index)
