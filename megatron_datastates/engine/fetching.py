"""Reads objects in large pieces: threads fetch windows, the native reader checks and delivers each of them.

A window's bytes are put into a file in memory, at the offsets that they have in the object. So blocks are
checked, and spans delivered to hosts and devices, by the same code as from a disk.

At most _IN_FLIGHT windows of _WINDOW_BYTES, and as much again for each thread, are in memory.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_datastates import stores
from megatron_datastates.config import MIB
from megatron_datastates.engine import native
from megatron_datastates.errors import StorageError
from megatron_datastates.plan.reads import ReadSpans
from megatron_datastates.plan.windows import Window, cut_windows
from megatron_datastates.threads import Call, ThreadPool

_WINDOW_BYTES = 16 * MIB  # the longest request, except for one block; takes far longer than its first byte
_GAP_BYTES = 2 * MIB  # read through rather than asked for separately
_THREADS = 8  # one connection moves some 100 MB/s
_IN_FLIGHT = 12


def read_through_windows(
    sources: Sequence[tuple[Path, int]],
    spans: ReadSpans,
    deliver: Callable[[Path, int, ReadSpans], None],
    progress: Callable[[int], None],
) -> int:
    """Reads spans of objects; returns how many bytes were fetched.

    Args:
        sources: objects, and how many bytes of data each has. `files` of the spans are indices of it.
        deliver: called on this thread with a file that has a window's bytes, the number of the source, and
            the window's spans, whose `files` are 0.
        progress: called with the number of bytes fetched since its last call.

    Raises:
        StorageError: an object cannot be read.
    """
    sizes = np.array([size for _, size in sources], np.uint64)
    windows = cut_windows(spans, sizes, window_bytes=_WINDOW_BYTES, gap_bytes=_GAP_BYTES)
    waiting: deque[tuple[Window, Call[_Held]]] = deque()
    fetched = 0
    with ThreadPool(_THREADS, "fetches objects") as threads:
        try:
            for window in windows:
                waiting.append((window, threads.submit(_fetch, *sources[window.file], window)))
                if len(waiting) >= _IN_FLIGHT:
                    fetched += _finish(waiting, deliver, progress)
            while waiting:
                fetched += _finish(waiting, deliver, progress)
        finally:  # an error keeps this frame, which then does not keep what was fetched
            waiting.clear()
    return fetched


def _finish(
    waiting: deque[tuple[Window, Call[_Held]]],
    deliver: Callable[[Path, int, ReadSpans], None],
    progress: Callable[[int], None],
) -> int:
    window, call = waiting.popleft()
    held = call.result()
    with contextlib.closing(held):
        deliver(held.path, window.file, window.spans.in_one_file())
    count = sum(end - begin for begin, end in window.pieces)
    progress(count)
    return count


class _Held:
    """A file in memory, as long as an object but with holes; where a sandbox refuses that, without a name.

    Closed at the latest when nothing refers to it any more, as after an error of the caller.
    """

    def __init__(self) -> None:
        try:
            self._descriptor = os.memfd_create("datastates-window", os.MFD_CLOEXEC)
        except OSError:
            with tempfile.TemporaryFile() as file:
                self._descriptor = os.dup(file.fileno())
        native.close_in_forked_child(self._descriptor)
        self.path = Path(f"/proc/self/fd/{self._descriptor}")
        self.close = weakref.finalize(self, _close, self._descriptor, os.getpid())
        self.close.atexit = False  # a thread may write yet, and another file get the number

    def write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._descriptor, view, offset)
            view, offset = view[count:], offset + count


def _close(descriptor: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has closed it, and may have another file with that number
        native.forget_descriptor(descriptor)
        os.close(descriptor)


def _fetch(path: Path, data_bytes: int, window: Window) -> _Held:
    held = _Held()
    try:
        os.truncate(held.path, data_bytes)
        for begin, end in window.pieces:
            held.write(stores.read(path, begin, end - begin), begin)
    except BaseException as error:
        held.close()
        if not isinstance(error, OSError):
            raise
        text = f"data file {path} cannot be read: {error.strerror}"
        raise StorageError.of(error, path, text, "read") from error
    return held
