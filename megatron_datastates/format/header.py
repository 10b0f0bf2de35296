"""The header, the first 4 KiB of a data file: which rank wrote it in which save."""

from __future__ import annotations

import dataclasses
import struct
import zlib

from megatron_datastates.errors import FormatError
from megatron_datastates.format.features import check_readable
from megatron_datastates.format.values import ALIGNMENT, FORMAT_VERSION, SaveId

HEADER_BYTES = ALIGNMENT
_MAGIC = b"DSTATES\x01"
_FIELDS = struct.Struct("<8sIIIIQQII")
_CRC = struct.Struct("<I")


@dataclasses.dataclass(frozen=True)
class Header:
    """The identity of a data file."""

    save_id: SaveId
    rank: int
    world_size: int
    incompatible: int = 0
    compatible: int = 0
    format_version: int = FORMAT_VERSION
    group: int = 0  # which of the rank's data files it is

    def encode(self) -> bytes:
        """Returns HEADER_BYTES bytes."""
        fields = _FIELDS.pack(
            _MAGIC,
            self.format_version,
            self.incompatible,
            self.compatible,
            self.group,
            self.save_id.run_id,
            self.save_id.ordinal,
            self.rank,
            self.world_size,
        )
        body = fields.ljust(HEADER_BYTES - _CRC.size, b"\0")
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def decode(cls, data: bytes, name: str) -> Header:
        """Returns the header of the file `name`.

        Args:
            data: the first HEADER_BYTES of the file; more are ignored.

        Raises:
            FormatError: the file is not a data file, or is damaged.
            UnsupportedFormatError: a later release wrote it.
        """
        if len(data) < HEADER_BYTES or data[:8] != _MAGIC:
            raise FormatError(f"{name} does not begin as a datastates data file does")
        body = data[: HEADER_BYTES - _CRC.size]
        if _CRC.unpack_from(data, len(body))[0] != zlib.crc32(body):
            raise FormatError(f"the header of {name} is damaged: its checksum differs")
        _, version, incompatible, compatible, group, run_id, ordinal, rank, world = _FIELDS.unpack_from(data)
        check_readable(name, version, incompatible)
        group = group if version > 1 else 0  # reserved in format 1
        return cls(SaveId(run_id, ordinal), rank, world, incompatible, compatible, version, group)
