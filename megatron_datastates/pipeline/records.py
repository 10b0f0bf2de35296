"""What every rank sends to all others when a save is durable or has failed: records of fixed size."""

from __future__ import annotations

import dataclasses
import struct

from megatron_datastates.format.manifest import FileEntry
from megatron_datastates.format.values import SaveId

HOST_BYTES, ENDPOINT_BYTES = 40, 34
_RECORD = struct.Struct(f"<I?QQI16sQ7d16sIQ?{HOST_BYTES}s{ENDPOINT_BYTES}s QQI16sQQ32s")
STABLE_GROUP = 1  # of the second data file
_FAILURE_BYTES = 768
_FAILURE = struct.Struct(f"<?H{_FAILURE_BYTES - 3}s")


@dataclasses.dataclass(frozen=True)
class DurableFile:
    """A sealed and synced data file."""

    bytes: int
    footer_offset: int
    footer_crc: int


@dataclasses.dataclass(frozen=True)
class StableRecord:
    """A rank's second data file, which holds tensors that are not expected to change (stable.py)."""

    file_bytes: int = 0  # 0: there is none
    footer_offset: int = 0
    footer_crc: int = 0
    layout_digest: bytes = bytes(16)
    layout_bytes: int = 0  # of the file's own index, if it is new; else 0
    ordinal: int = 0  # of the save of this run that wrote it
    content_sha256: bytes = bytes(32)


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
    providers_digest: bytes = bytes(16)  # of the list of the rank's state providers
    providers_bytes: int = 0  # of that list, if it is new; else 0
    node: int = 0  # whose near tier the rank can use; 0: none (near/places.py)
    is_near: bool = False  # its files are there, and not yet in the checkpoint's directory
    host: bytes = bytes(HOST_BYTES)  # what people call the node, if the rank can use its near tier
    endpoint: bytes = bytes(
        ENDPOINT_BYTES
    )  # where the rank serves its files; zeros: nowhere (near/serving.py)
    stable: StableRecord = StableRecord()

    def encode(self) -> bytes:
        *values, stable = dataclasses.astuple(self)
        return _RECORD.pack(*values, *stable)

    @classmethod
    def decode(cls, data: bytes) -> RankRecord:
        values = _RECORD.unpack(data)
        return cls(*[*values[:_OWN_FIELDS], StableRecord(*values[_OWN_FIELDS:])])

    @property
    def host_name(self) -> str:
        """Returns what people call the node; nothing if the rank cannot use its near tier."""
        return self.host.rstrip(b"\0").decode("ascii", "replace")

    def layouts(self) -> list[bytes]:
        """Returns the layout digests of the rank's data files, in the order of groups."""
        first = [self.layout_digest] if self.has_file else []
        return [*first, self.stable.layout_digest] if self.stable.file_bytes else first

    def sent_bytes(self, first: RankRecord) -> tuple[int, int, int]:
        """Returns the bytes that rank 0 needs of the rank's two own indexes and of its list of providers.

        Args:
            first: the record of rank 0, which does not need its own list again.
        """
        is_known = self.providers_digest == first.providers_digest
        return self.layout_bytes, self.stable.layout_bytes, 0 if is_known else self.providers_bytes


_OWN_FIELDS = len(dataclasses.fields(RankRecord)) - 1


@dataclasses.dataclass(frozen=True)
class SavedPart:
    """What rank 0 needs of a rank's part of a durable save, where another program brings it there."""

    save_id: SaveId  # of its files
    record: bytes
    indexes: tuple[bytes, ...]  # of the rank's data files, in the order of groups
    providers: bytes  # the list of its state providers


def encode_failure(text: str | None) -> bytes:
    """Encodes a rank's first error, cut to the record's size, or that it has none."""
    data = (text or "").encode()[: _FAILURE_BYTES - 3]
    return _FAILURE.pack(text is not None, len(data), data)


def decode_failure(data: bytes) -> str | None:
    """Decodes what encode_failure returned; None if the rank has no error."""
    failed, size, text = _FAILURE.unpack(data)
    return text[:size].decode(errors="replace") if failed else None


def file_entries(record: RankRecord, save_id: SaveId, written_as: SaveId | None = None) -> list[FileEntry]:
    """Returns the entries of a rank's data files in the manifest of a save.

    Args:
        written_as: the save id of the rank's own file, if it is another one.
    """
    entries = []
    if record.has_file:
        own = written_as or save_id
        entries.append(
            FileEntry(
                own.data_file_name(record.rank),
                record.rank,
                record.file_bytes,
                record.footer_offset,
                record.footer_crc,
                save_id="" if own == save_id else str(own),
            )
        )
    if (stable := record.stable).file_bytes:
        writer = SaveId(save_id.run_id, stable.ordinal)
        entries.append(
            FileEntry(
                writer.data_file_name(record.rank, STABLE_GROUP),
                record.rank,
                stable.file_bytes,
                stable.footer_offset,
                stable.footer_crc,
                save_id="" if writer == save_id else str(writer),
                group=STABLE_GROUP,
                content_sha256=stable.content_sha256.hex(),
            )
        )
    return entries
