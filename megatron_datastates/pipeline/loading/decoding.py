"""Reads what is encoded: native reads of stored frames, which threads decode and copy to where they go.

Belongs here: turning boxes of entries into reads of extents, and delivering what they decode to. Does not
belong here: the codecs (format/codecs.py), which frames a box needs (plan/frames.py).

Memory: at most two batches of stored frames, and one window of decoded ones for each thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import FormatError, UnsupportedFormatError
from megatron_datastates.format.codecs import CODECS, FRAME_BYTES, NONE, decode_frame, require_zstandard
from megatron_datastates.format.strides import footprint_elements
from megatron_datastates.format.tail import TailEntry, describe
from megatron_datastates.format.values import Extent
from megatron_datastates.pipeline.runs.damage import OpenFiles
from megatron_datastates.plan.frames import FramedBox, cut_into_windows
from megatron_datastates.plan.reads import ScheduledRead, in_groups, plan_extent
from megatron_datastates.threads import Call, ThreadPool

_WINDOW_BYTES = 8 << 20  # decoded, by one thread at a time
_BATCH_BYTES = 64 << 20  # stored, read by one native job
ReadExtents = Callable[[list[ScheduledRead]], None]


def resolve(checkpoint: OpenFiles, box: FramedBox) -> TailEntry:
    """Returns the entry that a box lies in.

    Raises:
        FormatError: the footer has no such entry, or one of another size.
        UnsupportedFormatError: this release does not know its codec.
        MissingPackageError: the package of its codec is not installed.
    """
    entry, path = box.entry, checkpoint.file_path(box.file)
    if not isinstance(entry, TailEntry):
        fragments = checkpoint.footer(box.file).fragments
        if entry >= len(fragments):
            raise FormatError(
                f"{path} has {len(fragments)} encoded fragments, and the index names number {entry}"
            )
        entry = fragments[entry]
    if entry.bytes != box.logical_bytes:
        raise FormatError(
            f"{path}: {describe(entry)} decodes to {entry.bytes} bytes, the index says {box.logical_bytes}"
        )
    if entry.codec not in CODECS:
        raise UnsupportedFormatError(
            f"{path}: {describe(entry)} has the codec {entry.codec}, which this release does not know: "
            "update this installation of megatron_datastates."
        )
    if entry.codec != NONE:
        require_zstandard()
    return entry


def read_framed(
    checkpoint: OpenFiles, items: Sequence[ScheduledRead], read_extents: ReadExtents, threads: int
) -> None:
    """Delivers boxes of entries. Nothing is read before all of them are resolved, and raises what that does.

    Args:
        read_extents: reads extents of data files as they are stored, checked.
        threads: that decode.

    Raises:
        CorruptDataError: a frame does not decode to what it should.
    """
    windows = [window for item in items for window in _windows(checkpoint, item)]
    deliveries = _Deliveries()
    with ThreadPool(threads, "decodes") as pool:
        before: list[Call[None]] = []
        try:
            for batch in in_groups(windows, lambda window: window.extent.bytes, _BATCH_BYTES):
                buffers = [np.empty(window.extent.bytes, np.uint8) for window in batch]
                read_extents(
                    [window.read_into(buffer) for window, buffer in zip(batch, buffers, strict=True)]
                )
                _await(before)  # so that no more than two batches are in memory
                pairs = zip(batch, buffers, strict=True)
                before = [pool.submit(deliveries.make, *pair) for pair in pairs]
                del buffers
            _await(before)
        except BaseException:
            deliveries.end()
            raise


def _await(decoding: Iterable[Call[None]]) -> None:
    for call in decoding:
        call.result()


class _Deliveries:
    """Writes to the destinations of a read, until it is ended: they may be freed then.

    After an interrupt the pool waits for no thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._is_over = False

    def make(self, window: _Window, stored: npt.NDArray[np.uint8]) -> None:
        """Delivers a window, on a thread of the pool."""
        with self._changed:
            if self._is_over:
                return
            self._under_way += 1
        try:
            window.deliver(stored)
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Waits for those under way; none is made afterwards."""
        self._is_over = True
        with self._changed:
            while self._under_way:
                self._changed.wait()


@dataclasses.dataclass(frozen=True)
class _Window:
    """A part of a box, the stored bytes that it needs, and what they decode to."""

    box: FramedBox
    item: ScheduledRead
    entry: TailEntry
    extent: Extent  # of its frames; without a codec, of its bytes
    begin: int  # the first logical byte that `extent` decodes to
    frames: tuple[int, ...]  # stored sizes
    what: str  # for messages

    def read_into(self, buffer: npt.NDArray[np.uint8]) -> ScheduledRead:
        """Returns the read of the stored bytes."""
        return dataclasses.replace(self.item, reads=plan_extent(self.extent), address=buffer.ctypes.data)

    def deliver(self, stored: npt.NDArray[np.uint8]) -> None:
        """Decodes the frames, and copies the box from them to its destination."""
        item, box = self.box.item_bytes, self.box
        plain = self._decoded(stored) if self.frames else stored
        first, end = box.span
        source = _strided(plain[first - self.begin : end - self.begin], item, box.lengths, box.strides)
        size = item * footprint_elements(box.lengths, box.target_strides)
        memory = (ctypes.c_uint8 * size).from_address(self.item.address + box.target)
        target = _strided(np.frombuffer(memory, np.uint8), item, box.lengths, box.target_strides)
        target[...] = source

    def _decoded(self, stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        end = min(self.begin + len(self.frames) * FRAME_BYTES, self.entry.bytes)
        plain, at = np.empty(end - self.begin, np.uint8), 0
        for number, size in enumerate(self.frames):
            part = plain[number * FRAME_BYTES : (number + 1) * FRAME_BYTES]
            what = f"{self.what}, frame {self.begin // FRAME_BYTES + number}"
            frame = stored[at : at + size].tobytes()
            data = decode_frame(self.entry.codec, frame, len(part), self.entry.item_bytes, what)
            part[:] = np.frombuffer(data, np.uint8)
            at += size
        return plain


def _strided(
    data: npt.NDArray[np.uint8], item_bytes: int, shape: Sequence[int], strides: Sequence[int]
) -> npt.NDArray[np.void]:
    """Returns bytes as elements of a box. `data` reaches from its first element to its last."""
    steps = [stride * item_bytes for stride in strides]
    return np.lib.stride_tricks.as_strided(data.view(np.dtype((np.void, item_bytes))), shape, steps)


def _windows(checkpoint: OpenFiles, item: ScheduledRead) -> Iterator[_Window]:
    box = item.reads
    assert isinstance(box, FramedBox) and not item.on_device
    entry = resolve(checkpoint, box)
    what = f"{checkpoint.file_path(box.file)}: {describe(entry)}"
    places = [entry.offset, *(entry.offset + end for end in itertools.accumulate(entry.frame_sizes))]
    for part in cut_into_windows(box, _WINDOW_BYTES):
        begin, end = part.span
        if entry.codec == NONE:
            extent = Extent(box.file, entry.offset + begin, end - begin)
            yield _Window(part, item, entry, extent, begin, (), what)
            continue
        low, high = begin // FRAME_BYTES, -(-end // FRAME_BYTES)
        extent = Extent(box.file, places[low], places[high] - places[low])
        yield _Window(part, item, entry, extent, low * FRAME_BYTES, entry.frame_sizes[low:high], what)
