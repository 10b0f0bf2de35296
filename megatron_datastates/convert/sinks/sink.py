"""The interface of a format that can be written, and what the sinks share.

A sink writes one file for each rank of the stored world, in any order, from any thread or process; then all
are published at once. It writes to a directory that nobody reads yet: see job.py.
"""

from __future__ import annotations

import itertools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_datastates.convert.sources.source import FragmentRange, RankContents, Source
from megatron_datastates.engine.staging import StagingEngine
from megatron_datastates.format.directory import METADATA_NAME
from megatron_datastates.plan.layout import align_up

_ELEMENT_BYTES = 16  # of the largest elements; a multiple of all others
Bytes = npt.NDArray[np.uint8]
Progress = Callable[[int], None]  # called with the number of bytes done since the last call; raises to stop


class Sink(ABC):
    """Writes a source in one format.

    `write` and `publish` raise OSError or StorageError for a file that cannot be written, and what the source
    raises.

    Args:
        source: the checkpoint to write.
        directory: where to write; it exists and is empty.
        engine: writes the files, and is closed with the sink.
        window_bytes: host memory for each file that is being written.
        progress: called with the number of bytes of tensors written since the last call, from any thread.
    """

    format: str

    def __init__(
        self, source: Source, directory: Path, engine: StagingEngine, window_bytes: int, progress: Progress
    ) -> None:
        self.source = source
        self.directory = directory
        self._engine = engine
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

    def close(self) -> None:
        """Joins the sink's threads; any `write`, even one in progress, fails from then on."""
        self._engine.close()

    def write_metadata(self) -> None:
        """Writes Megatron's metadata.json: that of the source, with this format."""
        config = self.source.read_metadata() | {"sharded_backend": self.format, "sharded_backend_version": 1}
        write_synced(self.directory / METADATA_NAME, json.dumps(config).encode())


def write_synced(path: Path, data: bytes) -> None:
    """Writes and syncs a small file. The caller has to sync its directory."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def stream_fragments(
    source: Source, fragments: Iterable[tuple[str, int]], window: Bytes
) -> Generator[tuple[FragmentRange, Bytes], None, None]:
    """Reads (key, number) fragments in order through a window, and yields each range with its bytes.

    Each fragment has at least one range, if need be an empty one. The bytes are valid until the next range.
    A thread reads into one half of the window while the caller works on the other half; `close` ends it.

    Args:
        window: a multiple of 2 * _ELEMENT_BYTES.
    """
    half = len(window) // 2
    halves = itertools.cycle((window[:half], window[half : 2 * half]))

    def read(batch: list[FragmentRange], view: Bytes) -> None:
        source.read_ranges([part for part in batch if part.size], view)

    batches = _batches(source, fragments, half)
    last, view = next(batches, []), next(halves)
    read(last, view)
    with ThreadPoolExecutor(1) as reader:  # which has no thread for what fits into one half
        for batch in batches:
            other = next(halves)
            reading = reader.submit(read, batch, other)
            yield from _parts(last, view)
            reading.result()
            last, view = batch, other
        yield from _parts(last, view)


def _batches(
    source: Source, fragments: Iterable[tuple[str, int]], capacity: int
) -> Iterator[list[FragmentRange]]:
    """Yields ranges of consecutive fragments that fill this many bytes."""
    assert capacity % _ELEMENT_BYTES == 0, "fragments are cut between elements"
    batch: list[FragmentRange] = []
    at = 0
    for key, number in fragments:
        begin, size = 0, source.fragment(key, number).bytes
        while True:
            batch.append(FragmentRange(key, number, begin, min(size - begin, capacity - at), at))
            begin, at = begin + batch[-1].size, align_up(at + batch[-1].size, _ELEMENT_BYTES)
            if at == capacity:
                yield batch
                batch, at = [], 0
            if begin == size:
                break
    if batch:
        yield batch


def _parts(batch: Sequence[FragmentRange], view: Bytes) -> Iterator[tuple[FragmentRange, Bytes]]:
    for part in batch:
        yield part, view[part.at : part.at + part.size]
