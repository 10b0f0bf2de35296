"""Reads pieces of data files, checked, in parallel."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_datastates.config import MIB, Options
from megatron_datastates.engine import native
from megatron_datastates.errors import FormatError, StorageError
from megatron_datastates.format.footer import TRAILER_BYTES, Footer, decode_trailer
from megatron_datastates.format.header import HEADER_BYTES, Header

_BUFFER_BYTES = 8 * MIB  # per reading thread
_READ_AHEAD_BYTES = 64 << 10  # for small ranges that lie close together
Words = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True)
class ReadOutcome:
    """What a read found."""

    bytes_read: int  # from the file, padding of blocks included
    bad_blocks: list[int]  # whose checksum differs; nothing of them was delivered


def read_pieces(
    path: Path, footer: Footer, offsets: Words, sizes: Words, targets: Words, options: Options
) -> ReadOutcome:
    """Copies file bytes [offsets[i], offsets[i] + sizes[i]) to host address targets[i].

    Raises:
        StorageError: the file cannot be read, or ends early.
    """
    read, bad, error = native.read_pieces(
        path=str(path),
        data_bytes=footer.data_bytes,
        offsets=offsets,
        bytes=sizes,
        targets=targets,
        checksums=footer.block_checksums if options.checksums else b"",
        direct=options.direct_io,
        threads=options.read_threads,
        buffer_bytes=_BUFFER_BYTES,
        faults=options.faults,
    )
    if error:
        raise StorageError(error)
    return ReadOutcome(read, bad)


def read_small(path: Path) -> bytes:
    """A whole small file. Raises StorageError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def read_ranges(path: Path, expected_bytes: int, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Ranges (offset, bytes) of a file, one by one; quickest in the order of the file.

    Raises:
        StorageError: it cannot be read.
        FormatError: it has another size than `expected_bytes`.
    """
    try:
        file = path.open("rb", _READ_AHEAD_BYTES)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        if size != expected_bytes:
            raise FormatError(f"{path} is damaged: it has {size} bytes, its manifest says {expected_bytes}")
        for offset, count in ranges:
            try:
                file.seek(offset)
                data = file.read(count)
            except OSError as error:
                raise StorageError(f"cannot read {path}: {error.strerror}") from error
            yield data


def read_footer(path: Path, expected_bytes: int) -> Footer:
    """The footer of a data file, found through the trailer in its last bytes.

    Raises:
        StorageError: the file is missing or has another size than `expected_bytes`.
        FormatError: it was never sealed, or is damaged.
    """
    with _open(path, expected_bytes) as file:
        file.seek(expected_bytes - TRAILER_BYTES)
        offset, total, _ = decode_trailer(file.read(TRAILER_BYTES), str(path))
        if offset + total != expected_bytes:
            raise StorageError(f"{path}: its footer says {offset + total} bytes, it has {expected_bytes}")
        file.seek(offset)
        return Footer.decode(file.read(total), str(path))


def read_header(path: Path, expected_bytes: int) -> Header:
    """The header of a data file; raises as read_footer does."""
    with _open(path, expected_bytes) as file:
        return Header.decode(file.read(HEADER_BYTES), str(path))


@contextlib.contextmanager
def _open(path: Path, expected_bytes: int) -> Iterator[BinaryIO]:
    """A data file whose size has been checked."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise StorageError(f"data file {path} cannot be opened: {error.strerror}") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        if size != expected_bytes or size < HEADER_BYTES:
            raise StorageError(
                f"data file {path} has {size} bytes, its manifest says {expected_bytes}: "
                "it was truncated or replaced"
            )
        yield file
