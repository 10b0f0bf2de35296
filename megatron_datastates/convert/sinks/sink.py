"""The interface of a format that can be written, and what the sinks share.

A sink writes one file for each rank of the stored world, in any order, from any thread or process; then all
are published at once. It writes to a directory that nobody reads yet: see job.py.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_datastates.convert.sources.source import FragmentRange, RankContents, Source
from megatron_datastates.format.directory import METADATA_NAME
from megatron_datastates.pipeline.runs import metadata_members

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[int], None]  # called with the number of bytes done since the last call; raises to stop


class Sink(ABC):
    """Writes a source in one format.

    `write` and `publish` raise OSError or StorageError for a file that cannot be written, and what the source
    raises.

    Args:
        source: the checkpoint to write.
        directory: where to write; it exists and is empty.
        window_bytes: host memory for each file that is being written.
        progress: called with the number of bytes of tensors written since the last call, from any thread.
    """

    format: str

    def __init__(self, source: Source, directory: Path, window_bytes: int, progress: Progress) -> None:
        self.source = source
        self.directory = directory
        self.window_bytes = window_bytes
        self.progress = progress

    @abstractmethod
    def write(self, number: int, contents: RankContents) -> Any:
        """Writes the file of rank `number` durably; returns what `publish` needs, which can be pickled."""

    @abstractmethod
    def publish(self, written: Sequence[Any]) -> None:
        """Makes the directory a checkpoint of these files, durably. All of them have been written.

        Args:
            written: what `write` returned, for each rank in order.
        """

    def close(self) -> None:  # noqa: B027 - not every sink has something to close
        """Joins the sink's threads; any `write`, even one in progress, fails from then on."""

    def write_metadata(self) -> None:
        """Writes Megatron's metadata.json: that of the source, with this format."""
        config = metadata_members(self.source.directory)
        config |= {"sharded_backend": self.format, "sharded_backend_version": 1}
        write_synced(self.directory / METADATA_NAME, json.dumps(config).encode())


def write_synced(path: Path, data: bytes) -> None:
    """Writes and syncs a small file. The caller has to sync its directory."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def stream_fragments(
    source: Source, fragments: Iterable[tuple[str, int]], window: Bytes
) -> Iterator[tuple[FragmentRange, Bytes]]:
    """Reads (key, number) fragments in order through a window, and yields each range with its bytes.

    Each fragment has at least one range, if need be an empty one. The bytes are valid until the next range.
    """
    batch: list[FragmentRange] = []
    at = 0
    for key, number in fragments:
        begin, size = 0, source.fragment(key, number).bytes
        while True:
            batch.append(FragmentRange(key, number, begin, min(size - begin, len(window) - at), at))
            begin, at = begin + batch[-1].size, at + batch[-1].size
            if at == len(window):
                yield from _read(source, batch, window)
                batch, at = [], 0
            if begin == size:
                break
    yield from _read(source, batch, window)


def _read(
    source: Source, batch: Sequence[FragmentRange], window: Bytes
) -> Iterator[tuple[FragmentRange, Bytes]]:
    source.read_ranges([part for part in batch if part.size], window)
    for part in batch:
        yield part, window[part.at : part.at + part.size]
