"""Objects and streams of an open checkpoint: reads of what they decode to, and their SHA-256."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from megatron_datastates.errors import CorruptDataError, FormatError
from megatron_datastates.files import OBJECT_BYTES
from megatron_datastates.format.codecs import NONE
from megatron_datastates.format.tail import NOT_RECORDED, TailEntry, describe
from megatron_datastates.format.values import Extent
from megatron_datastates.plan.frames import plan_range
from megatron_datastates.plan.reads import ScheduledRead, plan_extent

_STREAM_BYTES = 16 << 20  # of a stream that are read at a time, decoded
Read = Callable[[list[ScheduledRead]], None]


@dataclasses.dataclass(frozen=True)
class ObjectReads:
    """Objects as `torch.save` wrote them, and the reads that bring them."""

    buffers: dict[str, np.ndarray]
    scheduled: list[ScheduledRead]
    entries: dict[str, TailEntry]
    trust: bool = False

    def stored(self, key: str) -> bytes:
        """Returns an object's bytes, once they are read. CorruptDataError: their SHA-256 differs."""
        data = self.buffers[key].tobytes()
        if self.entries[key].sha256 != NOT_RECORDED:
            check_sha256(self.entries[key], hashlib.sha256(data).digest())
        return data

    def values(self) -> dict[str, Any]:
        """Unpickled once they are read (providers/objects.py). FormatError: one is not accepted."""
        from megatron_datastates.providers.objects import deserialize

        return {key: deserialize(self.stored(key), key, trust=self.trust) for key in self.buffers}


def plan_object(file: int, entry: TailEntry) -> tuple[np.ndarray, ScheduledRead]:
    """Returns memory for an object, and the read that fills it. FormatError: it is too large for memory.

    The page cache serves it: most objects are read by all ranks of a node, some of them several times in a
    load, and each time the whole of its block.
    """
    if entry.codec != NONE and entry.bytes > OBJECT_BYTES:  # a few bytes may claim to decode to many
        raise FormatError(
            f"{describe(entry)} decodes to {entry.bytes} bytes, expected at most {OBJECT_BYTES} of an object "
            "with a codec"
        )
    buffer = np.empty(entry.bytes, np.uint8)
    return buffer, dataclasses.replace(_whole(file, entry, 0, entry.bytes, buffer), through_cache=True)


def read_stream(read: Read, file: int, entry: TailEntry) -> Iterator[memoryview]:
    """Yields the bytes of a stream, window by window.

    Raises:
        CorruptDataError: a checksum differs; that of the whole is known at the end.
    """
    digest = hashlib.sha256()
    for begin in range(0, entry.bytes, _STREAM_BYTES):
        # Each has memory of its own: `b"".join` and `list` take all of them before they use the first.
        part = np.empty(min(entry.bytes - begin, _STREAM_BYTES), np.uint8)
        read([_whole(file, entry, begin, len(part), part)])
        digest.update(part)
        yield memoryview(part)
    if entry.sha256 != NOT_RECORDED:
        check_sha256(entry, digest.digest())


def _whole(file: int, entry: TailEntry, begin: int, size: int, target: np.ndarray) -> ScheduledRead:
    """Plans to read a range of an entry's logical bytes."""
    if entry.codec == NONE:
        extent = Extent(file, entry.offset + begin, size)
        return ScheduledRead(plan_extent(extent), target.ctypes.data)
    return ScheduledRead(plan_range(file, entry, begin, size), target.ctypes.data)


def check_sha256(entry: TailEntry, found: bytes) -> None:
    """Raises CorruptDataError if `found` is not the SHA-256 that an entry has."""
    if found != entry.sha256:
        raise CorruptDataError(
            f"{describe(entry)} is corrupt: its SHA-256 is {found.hex()}, expected {entry.sha256.hex()}. "
            "Nothing of it can be trusted: load an older checkpoint"
        )
