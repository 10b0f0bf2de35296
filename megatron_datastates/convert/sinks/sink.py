"""What a format has to offer to be written, and what the sinks share.

A sink writes one file for each rank of the stored world, in any order, in any thread or process; what came of
them all is committed once. It writes into a directory that nobody reads yet: see job.py.
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

from megatron_datastates.convert.sources.source import Piece, Source, Stored
from megatron_datastates.format.directory import METADATA_NAME
from megatron_datastates.pipeline.runs import metadata_members

Bytes = npt.NDArray[np.uint8]
Moved = Callable[[int], None]  # is told of bytes; raises to stop


class Sink(ABC):
    """Raises (both methods): OSError, StorageError for what cannot be written, and what the source raises.

    Args:
        source: what is written.
        directory: where to; it exists and is empty.
        window_bytes: of host memory, for each file under way.
        moved: told of the bytes of tensors as they are written, by any thread.
    """

    format: str

    def __init__(self, source: Source, directory: Path, window_bytes: int, moved: Moved) -> None:
        self.source = source
        self.directory = directory
        self.window_bytes = window_bytes
        self.moved = moved

    @abstractmethod
    def write(self, number: int, stored: Stored) -> Any:
        """Writes the file of rank `number`, durably; gives what `commit` has to know of it. To be pickled."""

    @abstractmethod
    def commit(self, written: Sequence[Any]) -> None:
        """Makes the directory a checkpoint of these files, durably. All of them are there."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Joins what threads there are; from then on `write` fails, also where it is under way."""

    def write_metadata(self) -> None:
        """Megatron's metadata.json, as the source has it but for the format."""
        config = metadata_members(self.source.directory)
        config |= {"sharded_backend": self.format, "sharded_backend_version": 1}
        write_synced(self.directory / METADATA_NAME, json.dumps(config).encode())


def write_synced(path: Path, data: bytes) -> None:
    """A small file; its directory is the caller's to sync."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def stretches(
    source: Source, fragments: Iterable[tuple[str, int]], window: Bytes
) -> Iterator[tuple[Piece, Bytes]]:
    """All bytes of (key, number) fragments in their order, through a window; of each at least one stretch.

    What is yielded is overwritten after the next one was asked for.
    """
    batch: list[Piece] = []
    at = 0
    for key, number in fragments:
        begin, size = 0, source.fragment(key, number).bytes
        while True:
            batch.append(Piece(key, number, begin, min(size - begin, len(window) - at), at))
            begin, at = begin + batch[-1].size, at + batch[-1].size
            if at == len(window):
                yield from _read(source, batch, window)
                batch, at = [], 0
            if begin == size:
                break
    yield from _read(source, batch, window)


def _read(source: Source, batch: Sequence[Piece], window: Bytes) -> Iterator[tuple[Piece, Bytes]]:
    source.read_pieces([piece for piece in batch if piece.size], window)
    for piece in batch:
        yield piece, window[piece.at : piece.at + piece.size]
