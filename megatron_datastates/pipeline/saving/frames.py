"""The way of encoded bytes to the tail of a data file: cut into frames, encoded by threads, written in order.

Belongs here: order, back-pressure, and the digest of the logical bytes. Does not belong here: codecs.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
from collections import deque
from typing import Any

import numpy as np

from megatron_datastates.format.codecs import FRAME_BYTES, encode_frame
from megatron_datastates.providers.base import Encoding, Write

_MOST_THREADS = 4


class FrameWriter:
    """Encodes what is written to it, frame by frame. Used by one thread.

    At most twice as many frames as there are threads are in host memory.
    """

    def __init__(self, write: Write, encoding: Encoding, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        self._write_on, self._encoding, self._pool = write, encoding, pool
        self._frame = np.empty(FRAME_BYTES, np.uint8)
        self._filled = 0
        self._encoded: deque[concurrent.futures.Future[bytes]] = deque()
        self._digest = hashlib.sha256()
        self.bytes = 0  # logical ones
        self._frame_sizes: list[int] = []

    def write(self, data: Any) -> int:
        """Appends a buffer, which may change afterwards; returns its size."""
        source = memoryview(data)
        if source.nbytes == 0:
            return 0
        view, at = source.cast("B"), 0
        while at < len(view):
            part = min(len(view) - at, FRAME_BYTES - self._filled)
            self._frame[self._filled : self._filled + part] = np.frombuffer(view[at : at + part], np.uint8)
            self._filled, at = self._filled + part, at + part
            if self._filled == FRAME_BYTES:
                self._end_frame()
        return len(view)

    def close(self) -> list[int]:
        """Writes what is left; returns the sizes of the frames as stored."""
        if self._filled:
            self._end_frame()
        while self._encoded:
            self._write_first()
        return self._frame_sizes

    def digest(self) -> bytes:
        """Returns the SHA-256 of the logical bytes."""
        return self._digest.digest()

    def _end_frame(self) -> None:
        frame = self._frame[: self._filled].tobytes()
        self._filled = 0
        self.bytes += len(frame)
        self._encoded.append(self._encode(frame))
        self._digest.update(frame)
        if len(self._encoded) >= 2 * threads():
            self._write_first()

    def _encode(self, frame: bytes) -> concurrent.futures.Future[bytes]:
        codec, item_bytes, level = self._encoding
        try:
            return self._pool.submit(encode_frame, codec, frame, item_bytes, level)
        except RuntimeError:  # such as while the interpreter ends: pools take no work then
            encoded: concurrent.futures.Future[bytes] = concurrent.futures.Future()
            encoded.set_result(encode_frame(codec, frame, item_bytes, level))
            return encoded

    def _write_first(self) -> None:
        stored = self._encoded.popleft().result()
        self._frame_sizes.append(len(stored))
        self._write_on(stored)


def threads() -> int:
    """Returns how many threads encode frames."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


def encoder_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Returns the threads of one save; they start when they are first used."""
    return concurrent.futures.ThreadPoolExecutor(threads(), thread_name_prefix="datastates-encode")
