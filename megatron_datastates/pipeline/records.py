"""What every rank sends to all others when a save is durable or has failed: records of fixed size."""

from __future__ import annotations

import dataclasses
import struct

_RECORD = struct.Struct("<I?QQI16sQ7d")
_FAILURE_BYTES = 768
_FAILURE = struct.Struct(f"<?H{_FAILURE_BYTES - 3}s")


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """One rank's part of a durable save. Times are seconds."""

    rank: int
    has_file: bool
    file_bytes: int
    footer_offset: int
    footer_crc: int
    layout_digest: bytes  # 16 bytes
    layout_bytes: int  # of the rank's own index, if it is new; else 0
    held: float
    fence: float
    stream_wait: float
    staging: float
    writing: float
    durable: float
    slot_wait: float

    def encode(self) -> bytes:
        return _RECORD.pack(*dataclasses.astuple(self))

    @classmethod
    def decode(cls, data: bytes) -> RankRecord:
        return cls(*_RECORD.unpack(data))


def encode_failure(text: str | None) -> bytes:
    """Encodes a rank's first error, cut to the record's size, or that it has none."""
    data = (text or "").encode()[: _FAILURE_BYTES - 3]
    return _FAILURE.pack(text is not None, len(data), data)


def decode_failure(data: bytes) -> str | None:
    """Decodes what encode_failure returned; None if the rank has no error."""
    failed, size, text = _FAILURE.unpack(data)
    return text[:size].decode(errors="replace") if failed else None
