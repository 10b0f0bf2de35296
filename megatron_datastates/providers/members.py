"""The members of an archive as torch.save writes it: a zip file in which nothing is compressed.

The members that `find_members` returns are together no larger than the archive, even if its directory claims
more.
"""

from __future__ import annotations

import dataclasses
import io
import struct
import zipfile
import zlib
from typing import BinaryIO

from megatron_datastates.errors import FormatError

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip file's entry: signature, lengths of its name and extra
PICKLE = "data.pkl"


@dataclasses.dataclass(frozen=True)
class Member:
    """One member: where its bytes are in the archive, and their checksum."""

    offset: int
    size: int
    crc: int | None  # CRC-32; None: it was switched off (torch.serialization.set_crc32_options)

    def of(self, archive: bytes) -> memoryview:
        """Returns its bytes, given the whole archive."""
        return memoryview(archive)[self.offset : self.offset + self.size]

    def is_intact(self, data: bytes | memoryview) -> bool:
        """Returns whether `data` has the CRC-32 that the archive has for it, if it has one."""
        return self.crc is None or zlib.crc32(data) == self.crc

    def check(self, data: bytes | memoryview, name: str) -> None:
        """Raises FormatError if `data` does not have the CRC-32 that the archive has for it."""
        if not self.is_intact(data):
            raise FormatError(f"the CRC-32 of its {name} differs: it is corrupt")


def find_members(stream: BinaryIO) -> dict[str, Member]:
    """Returns the members by torch.save's names (`data.pkl`, `data/0`), without the folder that they are in.

    Raises:
        FormatError: `stream` is not an archive of torch.save, is damaged, or is compressed.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            return _members(archive, stream)
    except (FormatError, MemoryError):
        raise
    except Exception as error:  # a damaged archive raises anything
        raise FormatError(f"it is not an archive of torch.save: {error}") from error


def check_archive(data: bytes) -> None:
    """Raises FormatError if `data` is not an archive of torch.save, or if a CRC-32 in it differs."""
    for name, member in find_members(io.BytesIO(data)).items():
        member.check(member.of(data), name)


def corrupt_member(data: bytes) -> str:
    """Returns the name of a member whose CRC-32 differs; empty if none does, and for what is no archive."""
    try:
        members = find_members(io.BytesIO(data))
    except FormatError:
        return ""
    return next((name for name, one in members.items() if not one.is_intact(one.of(data))), "")


def _members(archive: zipfile.ZipFile, stream: BinaryIO) -> dict[str, Member]:
    entries, found, total = archive.infolist(), {}, 0
    prefix = next((e.filename for e in entries if e.filename.endswith(f"/{PICKLE}")), None)
    if prefix is None:
        raise FormatError(f"it is not an archive of torch.save: it has no {PICKLE}")
    folder = prefix.removesuffix(PICKLE)
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise FormatError(f"{entry.filename} is compressed: expected a member that is stored as it is")
        total += entry.file_size
        offset = _data_offset(stream, entry)
        if offset + entry.file_size > archive.start_dir or total > archive.start_dir:
            raise FormatError(f"{entry.filename} overlaps another part of the archive")
        crc = entry.CRC or None
        found[entry.filename.removeprefix(folder)] = Member(offset, entry.file_size, crc)
    return found


def _data_offset(stream: BinaryIO, entry: zipfile.ZipInfo) -> int:
    stream.seek(entry.header_offset)
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"expected a member at byte {entry.header_offset}, found none")
    return entry.header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)
