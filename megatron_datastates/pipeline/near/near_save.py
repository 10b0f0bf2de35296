"""A save that was published near, until it is far."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_datastates.errors import DataStatesError
from megatron_datastates.files import MANIFEST_BYTES, Status, is_object, open_regular, status_of_open
from megatron_datastates.format.manifest import FileEntry, Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.near.places import published_in
from megatron_datastates.pipeline.publishing.directory_publisher import DirectoryPublisher, SmallFiles
from megatron_datastates.units import milliseconds


@dataclasses.dataclass(eq=False)
class NearSave:
    """One save that was published near, as one rank's drain sees it."""

    save_id: SaveId
    iteration: int | None
    far: Path  # directory of the checkpoint
    near: Path | None  # the node's folder; None on a rank that stores nothing
    files: Sequence[FileEntry]  # the node's data files in it
    small_files: SmallFiles
    others: dict[str, bytes]  # other files that the manifest names, and what is in them
    publisher: DirectoryPublisher | None  # on rank 0
    publishing: threading.Lock  # held meanwhile, as by saves that publish in such a directory themselves
    is_drained: bool  # brought far now; else it stays near until the job ends
    has_copies: bool = False  # on other nodes, all that were to be made
    published: Callable[[SaveId, bool], None] = lambda save_id, is_retried: None  # called once it is far
    is_superseded: bool = False  # a later save is in `far`, which this one must not replace
    near_since: float = dataclasses.field(default_factory=time.monotonic)
    attempts: int = 0  # to copy it, then to publish it
    tracker_attempts: int = 0  # to make the tracker name it
    failed_at: float = 0.0  # the last attempt to publish it; by time.monotonic
    overtaken_by: str = ""  # name of a newer save that was published before it
    seen: tuple[int, int] = (-1, 0)  # by rank 0: missing files, and bytes of them that have arrived
    arrived: set[str] = dataclasses.field(default_factory=set)  # data files that rank 0 has seen in `far`
    manifest_read: tuple[Status, SaveId] | None = None  # the last one in `far`, and its save
    copied_bytes: int = 0
    copied_seconds: float = 0.0

    @property
    def name(self) -> str:
        """Returns what messages call it."""
        return f"iteration {self.iteration}" if self.iteration is not None else self.far.name

    @property
    def is_far(self) -> bool:
        """Whether the checkpoint's directory has this save now, or a later one: others may take its place."""
        return self.is_superseded or self._published_far() == self.save_id

    def _published_far(self) -> SaveId | None:
        """Returns what `published_in` does. A manifest is read once: with many ranks it has megabytes.

        Each time, a client of NFS asks the server for the file.
        """
        if is_object(self.far):
            return published_in(self.far)
        with contextlib.suppress(OSError, DataStatesError):
            with open_regular(self.far / MANIFEST_NAME, MANIFEST_BYTES) as file:
                status = status_of_open(file)
                if self.manifest_read is None or self.manifest_read[0] != status:
                    found = Manifest.decode_save_id(file.read(status[1]), str(self.far))
                    self.manifest_read = status, found
            return self.manifest_read[1]
        return None

    def report(self) -> dict[str, Any]:
        """Returns the report of a save that has become far; docs/reports.md lists the fields."""
        seconds = self.copied_seconds
        return {
            "event": "drain",
            "save_id": str(self.save_id),
            "directory": str(self.far),
            "iteration": self.iteration,
            "rank": 0,
            "state": "published",
            "ended_at": round(time.time(), 3),
            "bytes": self.small_files.manifest.data_bytes,
            "node_bytes": self.copied_bytes,
            "node_copying_ms": milliseconds(seconds),
            "node_mb_per_s": round(self.copied_bytes / seconds / 1e6, 1) if seconds > 0 else 0.0,
            "near_ms": milliseconds(time.monotonic() - self.near_since),
        }
