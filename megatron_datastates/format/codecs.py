"""Codecs: how the bytes of a tail entry are encoded, in frames of 1 MiB that are decoded one by one.

Belongs here: pure functions of bytes and sizes. Does not belong here: where frames are (tail.py), reading
them. zstandard is imported at first use: checkpoints without codecs do not need it. It releases the GIL.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_datastates.errors import CorruptDataError, optional_package

FRAME_BYTES = 1 << 20  # logical bytes of each frame but the last
NONE, ZSTD, PLANES = 0, 1, 2  # in a tail entry
CODECS = {NONE: "none", ZSTD: "zstd", PLANES: "byte planes, zstd"}  # numbers are never reused
_contexts = threading.local()


def frame_count(logical_bytes: int) -> int:
    """Returns the number of frames of an entry with a codec."""
    return -(-logical_bytes // FRAME_BYTES)


def frame_lengths(logical_bytes: int) -> Iterator[int]:
    """Yields the logical bytes of each frame."""
    for begin in range(0, logical_bytes, FRAME_BYTES):
        yield min(FRAME_BYTES, logical_bytes - begin)


def encode_frame(codec: int, data: bytes | memoryview, item_bytes: int = 1, level: int = 1) -> bytes:
    """Returns a frame as it is stored: `data` itself if encoding does not make it smaller.

    Args:
        data: at most FRAME_BYTES.
        level: of zstd, from 1 (fast) to 19 (small).

    Raises:
        MissingPackageError: zstandard is not installed.
    """
    plain = bytes(data)
    assert codec in (ZSTD, PLANES) and 0 < len(plain) <= FRAME_BYTES
    planes = split_planes(plain, item_bytes) if codec == PLANES else plain
    compressor = _context(f"compressor {level}", lambda zstandard: zstandard.ZstdCompressor(
        level=level, write_checksum=True, write_content_size=True))  # fmt: skip
    packed: bytes = compressor.compress(planes)
    return packed if len(packed) < len(plain) else plain


def decode_frame(codec: int, stored: bytes, logical_bytes: int, item_bytes: int, what: str) -> bytes:
    """Returns the logical bytes of a frame. Allocates no more than `logical_bytes`, whatever `stored` says.

    Args:
        what: names the frame in messages.

    Raises:
        CorruptDataError: `stored` does not decode to that many bytes, or its checksum differs.
        MissingPackageError: zstandard is not installed.
    """
    assert codec in (ZSTD, PLANES)
    if len(stored) == logical_bytes:
        return stored
    zstandard = require_zstandard()
    try:
        found = zstandard.get_frame_parameters(stored)
        if found.content_size != logical_bytes or not found.has_checksum:
            raise CorruptDataError(
                f"{what} is damaged: it decodes to {found.content_size} bytes, expected {logical_bytes}, "
                "with a checksum"
            )
        decompressor = _context("decompressor", lambda module: module.ZstdDecompressor())
        plain: bytes = decompressor.decompress(stored, max_output_size=logical_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"{what} is damaged: {error}") from None
    if len(plain) != logical_bytes:
        raise CorruptDataError(f"{what} is damaged: it decodes to {len(plain)} bytes, not {logical_bytes}")
    return join_planes(plain, item_bytes) if codec == PLANES else plain


def split_planes(data: bytes, item_bytes: int) -> bytes:
    """Returns byte 0 of every item, then byte 1 of every item, and so on, and what follows the items."""
    items = len(data) // item_bytes
    if items < 2 or item_bytes < 2:
        return data
    whole = np.frombuffer(data, np.uint8, items * item_bytes).reshape(items, item_bytes)
    return whole.T.tobytes() + data[items * item_bytes :]


def join_planes(data: bytes, item_bytes: int) -> bytes:
    """Returns the bytes of which `split_planes` returns `data`."""
    items = len(data) // item_bytes
    if items < 2 or item_bytes < 2:
        return data
    planes = np.frombuffer(data, np.uint8, items * item_bytes).reshape(item_bytes, items)
    return planes.T.tobytes() + data[items * item_bytes :]


def _context(kind: str, make: Any) -> Any:
    """Returns this thread's compressor or decompressor: no two threads may use one at a time."""
    known = _contexts.__dict__
    if kind not in known:
        known[kind] = make(require_zstandard())
    return known[kind]


@functools.cache
def require_zstandard() -> Any:
    """Returns the module zstandard. Raises MissingPackageError if it is not installed."""
    with optional_package(
        "compressed data needs the package zstandard, which cannot be imported", "compress"
    ):
        import zstandard
    return zstandard
