"""The footer, which ends a data file: what the file's tail holds, and the checksums of its blocks.

A data file without a valid footer was never sealed: its save failed, or its process was killed.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import zlib
from collections.abc import Mapping, Sequence

from megatron_datastates.errors import FormatError
from megatron_datastates.format.features import check_readable
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.tail import Kind, TailEntry, decode_tail, encode_tail
from megatron_datastates.format.values import ALIGNMENT, BLOCK_BYTES, FORMAT_VERSION, SaveId

_MAGIC = b"DSFOOT\x00\x01"
_FIELDS = struct.Struct("<8sIIIIQQQIIIIQ16s")
_TRAILER_MAGIC = b"DSTAIL\x00\x01"
_TRAILER = struct.Struct("<8sQQII")
TRAILER_BYTES = _TRAILER.size + 4


@dataclasses.dataclass(frozen=True)
class Footer:
    """Everything that a sealed data file says about itself."""

    save_id: SaveId
    rank: int
    world_size: int
    data_bytes: int  # of everything before the footer
    layout_digest: bytes  # 16 bytes: half of the SHA-256 of the file's own index
    entries: Sequence[TailEntry]  # names are unique for each kind
    block_checksums: bytes  # a little-endian u32 CRC-32C per block; empty if switched off
    incompatible: int = 0
    compatible: int = 0
    format_version: int = FORMAT_VERSION
    group: int = 0
    crc: int = dataclasses.field(default=0, compare=False)  # as decoded; `encode` does not use it

    @functools.cached_property
    def objects(self) -> Mapping[str, TailEntry]:
        return self._named(Kind.OBJECT)

    @functools.cached_property
    def streams(self) -> Mapping[str, TailEntry]:
        return self._named(Kind.STREAM)

    @functools.cached_property
    def fragments(self) -> Sequence[TailEntry]:
        """The encoded fragments by number."""
        return [entry for entry in self.entries if entry.kind == Kind.FRAGMENT]

    def _named(self, kind: Kind) -> dict[str, TailEntry]:
        return {entry.name: entry for entry in self.entries if entry.kind == kind}

    def encode(self) -> bytes:
        """Returns the file's bytes from `data_bytes` on, trailer included: a multiple of ALIGNMENT."""
        fields = _FIELDS.pack(
            _MAGIC,
            self.format_version,
            self.incompatible,
            self.compatible,
            BLOCK_BYTES,
            self.data_bytes,
            self.save_id.run_id,
            self.save_id.ordinal,
            self.rank,
            self.world_size,
            len(self.entries),
            self.group,
            len(self.block_checksums) // 4,
            self.layout_digest,
        )
        body = b"".join([fields, encode_tail(self.entries, self.format_version), self.block_checksums])
        total = -(-(len(body) + TRAILER_BYTES) // ALIGNMENT) * ALIGNMENT
        body = body.ljust(total - TRAILER_BYTES, b"\0")
        trailer = _TRAILER.pack(_TRAILER_MAGIC, self.data_bytes, total, zlib.crc32(body), 0)
        return body + trailer + struct.pack("<I", zlib.crc32(trailer))

    @classmethod
    def decode(cls, data: bytes, name: str) -> Footer:
        """Returns the footer of the file `name`.

        Args:
            data: all bytes from where the footer begins to the end of the file.

        Raises:
            FormatError: `data` is damaged, or is not a footer.
            UnsupportedFormatError: a later release wrote it.
        """
        offset, total, crc = decode_trailer(data[-TRAILER_BYTES:], name)
        body = data[:-TRAILER_BYTES]
        if total != len(data) or zlib.crc32(body) != crc:
            raise FormatError(f"the footer of {name} is damaged: its checksum differs")
        if len(body) < _FIELDS.size or body[:8] != _MAGIC:
            raise FormatError(f"the footer of {name} is damaged: it does not begin as a footer does")
        (_, version, incompatible, compatible, block_bytes, data_bytes, run_id, ordinal, rank, world,
         count, group, blocks, layout_digest) = _FIELDS.unpack_from(body)  # fmt: skip
        check_readable(name, version, incompatible)
        aligned = data_bytes % ALIGNMENT == 0 and total % ALIGNMENT == 0 and data_bytes >= HEADER_BYTES
        if data_bytes != offset or block_bytes != BLOCK_BYTES or not aligned:
            raise FormatError(
                f"the footer of {name} contradicts itself: found {data_bytes} and {offset} bytes of data, "
                f"{total} bytes of footer and blocks of {block_bytes} bytes; expected the first two to be "
                f"equal, multiples of {ALIGNMENT}, and blocks of {BLOCK_BYTES} bytes"
            )
        if version == 1:  # its number of objects has 64 bits, and there are no groups
            count, group = count | group << 32, 0
        entries, at = decode_tail(body, _FIELDS.size, count, data_bytes, version, f"the footer of {name}")
        checksums = body[at : at + 4 * blocks]
        if len(checksums) != 4 * blocks or blocks not in (0, -(-data_bytes // BLOCK_BYTES)):
            raise FormatError(
                f"the footer of {name} is damaged: it has {blocks} checksums for {data_bytes} bytes of data"
            )
        save_id = SaveId(run_id, ordinal)
        return cls(
            save_id, rank, world, data_bytes, layout_digest, entries, checksums,
            incompatible, compatible, version, group, crc
        )  # fmt: skip


def decode_trailer(data: bytes, name: str) -> tuple[int, int, int]:
    """Returns (footer offset, footer bytes, footer CRC) of the file `name`.

    Args:
        data: the last TRAILER_BYTES of the file.

    Raises:
        FormatError: `data` is not a trailer: the file was never sealed, was truncated, or is damaged.
    """
    if len(data) != TRAILER_BYTES or data[:8] != _TRAILER_MAGIC:
        raise FormatError(f"{name} has no footer at its end: it was never sealed, or it was truncated")
    if struct.unpack_from("<I", data, _TRAILER.size)[0] != zlib.crc32(data[: _TRAILER.size]):
        raise FormatError(f"the last bytes of {name} are damaged: their checksum differs")
    _, offset, total, crc, _ = _TRAILER.unpack_from(data)
    return offset, total, crc
