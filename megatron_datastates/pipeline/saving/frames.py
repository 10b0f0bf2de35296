"""The way of encoded bytes to the tail of a data file: cut into frames, encoded by threads, written in order.

Belongs here: order, back-pressure, and the digest of the logical bytes. Does not belong here: codecs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import queue
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_datastates.flag import Flag
from megatron_datastates.format.codecs import FRAME_BYTES, encode_frame
from megatron_datastates.providers.base import Encoding, Write
from megatron_datastates.threads import BackgroundThread

_MOST_THREADS = 4
_WAIT_SECONDS = 0.1


class FrameWriter:
    """Encodes what is written to it, frame by frame. Used by one thread.

    At most twice as many frames as there are threads are in host memory.
    """

    def __init__(self, write: Write, encoding: Encoding, encoders: Encoders) -> None:
        self._write_on, self._encoding, self._encoders = write, encoding, encoders
        self._frame = np.empty(FRAME_BYTES, np.uint8)
        self._filled = 0
        self._encoded: deque[_Result] = deque()
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

    def _encode(self, frame: bytes) -> _Result:
        codec, item_bytes, level = self._encoding
        return self._encoders.submit(functools.partial(encode_frame, codec, frame, item_bytes, level))

    def _write_first(self) -> None:
        stored = self._encoded.popleft().result()
        self._frame_sizes.append(len(stored))
        self._write_on(stored)


def threads() -> int:
    """Returns how many threads encode frames."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


class _Result:
    """A frame that is to be encoded, by whoever comes first."""

    def __init__(self, encode: Callable[[], bytes]) -> None:
        self._encode = [encode]
        self._done = Flag()
        self._encoded, self._error = b"", list[BaseException]()

    def run(self) -> None:
        """Encodes the frame, unless somebody has begun to. Never raises."""
        try:
            encode = self._encode.pop()
        except IndexError:
            return
        try:
            self._encoded = encode()
        except BaseException as error:  # or somebody would wait forever
            self._error.append(error)
        self._done.set()

    def result(self) -> bytes:
        """Waits for the encoded frame. Raises what encoding it raised."""
        while not self._done.wait(_WAIT_SECONDS):
            self.run()  # the threads may have ended, and are busy otherwise
        if self._error:
            raise self._error[0]
        return self._encoded


class Encoders:
    """The threads of one save that encode frames; they start when they are first used.

    Not a pool of concurrent.futures: a signal handler that raises within a call of the trainer's thread may
    leave a lock of it held, and then its threads never end (flag.py).
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._work: queue.SimpleQueue[_Result | None] = queue.SimpleQueue()
        self._threads: list[BackgroundThread] = []

    def submit(self, encode: Callable[[], bytes]) -> _Result:
        """Has a thread call `encode`; where none can be started, as while the interpreter ends, calls it."""
        result = _Result(encode)
        if len(self._threads) < threads() and not self.is_closed:
            thread = BackgroundThread(functools.partial(_work_off, self._work))
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._threads.append(thread)
        if self._threads and not self.is_closed:
            self._work.put(result)
        else:
            result.run()
        return result

    def close(self) -> None:
        """Ends the threads, once they have encoded what they were given before. Once more does no harm."""
        self.is_closed = True
        self._work.put(None)
        for thread in self._threads:
            thread.join()


def _work_off(work: queue.SimpleQueue[_Result | None]) -> None:
    while (result := work.get()) is not None:
        result.run()
    work.put(None)  # for the next one: an interrupt may have kept a thread from being counted
