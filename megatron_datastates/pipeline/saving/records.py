"""What every rank sends to all others when a save is durable or has failed: records of fixed size.

The trainer of each rank receives the records of all. It reads what it needs of them in columns, and so does
rank 0's publishing thread, which has the GIL meanwhile: to decode those of 16,384 ranks takes a tenth of a
second.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.manifest import FileEntry
from megatron_datastates.format.values import SaveId

HOST_BYTES, ENDPOINT_BYTES = 40, 34
STABLE_GROUP = 1  # of the second data file
# Fields, with their kinds as numpy has them.
_U32 = Annotated[int, "<u4"]
_U64 = Annotated[int, "<u8"]
_I64 = Annotated[int, "<i8"]
_Flag = Annotated[bool, "?"]
_Seconds = Annotated[float, "<f8"]
_Digest = Annotated[bytes, "V16"]
_CODES = {"<u4": "I", "<u8": "Q", "<i8": "q", "<f8": "d", "|b1": "?"}
_FAILURE_BYTES = 768
_FAILURE = struct.Struct(f"<?H{_FAILURE_BYTES - 3}s")


@dataclasses.dataclass(frozen=True)
class DurableFile:
    """A sealed and synced data file."""

    bytes: int
    footer_offset: int
    footer_crc: int


class RankRecord(NamedTuple):
    """One rank's part of a durable save."""

    rank: _U32
    has_file: _Flag
    file_bytes: _U64
    footer_offset: _U64
    footer_crc: _U32
    layout_digest: _Digest
    layout_bytes: _U64  # of the rank's own index, if it is new; else 0
    held: _Seconds
    fence: _Seconds
    stream_wait: _Seconds
    staging: _Seconds
    writing: _Seconds
    durable: _Seconds
    slot_wait: _Seconds
    providers_digest: Annotated[bytes, ("<u8", (2,))] = bytes(16)  # of the list of the rank's state providers
    providers_bytes: _U32 = 0  # of that list, if it is new; else 0
    node: _U64 = 0  # whose near tier the rank can use; 0: none (near/places.py)
    is_near: _Flag = False  # its files are there, and not yet in the checkpoint's directory
    forgets: _Flag = False  # of rank 0: all ranks forget known layouts (layouts.py)
    # What people call the node, if the rank can use its near tier.
    host: Annotated[bytes, f"V{HOST_BYTES}"] = bytes(HOST_BYTES)
    # Where the rank serves its files; zeros: nowhere (near/serving.py).
    endpoint: Annotated[bytes, f"V{ENDPOINT_BYTES}"] = bytes(ENDPOINT_BYTES)
    iteration: _I64 = -1  # -1: none was given. The same on all ranks, or the save fails
    # Of the second data file, which holds tensors that are not expected to change (stable.py).
    stable_file_bytes: _U64 = 0  # 0: there is none
    stable_footer_offset: _U64 = 0
    stable_footer_crc: _U32 = 0
    stable_layout_digest: _Digest = bytes(16)
    stable_layout_bytes: _U64 = 0  # of the file's own index, if it is new; else 0
    stable_ordinal: _U64 = 0  # of the save of this run that wrote it
    stable_content_sha256: Annotated[bytes, "V32"] = bytes(32)

    def encode(self) -> bytes:
        return _RECORD.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> RankRecord:
        return cls._make(_RECORD.unpack(data))

    @property
    def host_name(self) -> str:
        """Returns what people call the node; nothing if the rank cannot use its near tier."""
        return self.host.rstrip(b"\0").decode("ascii", "replace")

    def layouts(self) -> list[bytes]:
        """Returns the layout digests of the rank's data files, in the order of groups."""
        first = [self.layout_digest] if self.has_file else []
        return [*first, self.stable_layout_digest] if self.stable_file_bytes else first


def _code(kind: np.dtype[Any]) -> str:
    return f"{kind.itemsize}s" if kind.kind == "V" else _CODES[kind.str]


_KINDS = get_type_hints(RankRecord, include_extras=True)
_COLUMNS = np.dtype([(name, kind.__metadata__[0]) for name, kind in _KINDS.items()])
_RECORD = struct.Struct("<" + "".join(_code(_COLUMNS[name]) for name in _COLUMNS.fields or ()))
RECORD_BYTES = _RECORD.size


class Records:
    """The records of all ranks, in their order, as they were sent.

    Attributes:
        columns: an array with the fields of each record.
    """

    def __init__(self, data: bytes = b"") -> None:
        self._data = data
        self.columns = np.frombuffer(data, _COLUMNS)

    @classmethod
    def of(cls, records: Iterable[RankRecord]) -> Records:
        return cls(b"".join(record.encode() for record in records))

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, at: int) -> RankRecord:
        begin = range(len(self))[at] * _RECORD.size
        return RankRecord.decode(self._data[begin : begin + _RECORD.size])

    def check_iterations(self) -> None:
        """Raises DataStatesError if ranks have saved the state of other iterations."""
        found = self.columns["iteration"]
        if (found != found[0]).any():
            rank = int((found != found[0]).argmax())
            first, other = (None if n < 0 else int(n) for n in (found[0], found[rank]))
            raise DataStatesError(
                f"ranks save the state of different iterations: rank 0 of {first}, rank {rank} of {other}. "
                "Every rank has to pass the same one, and to save equally often"
            )

    def _rows(self, *names: str) -> Iterator[tuple[Any, ...]]:
        return zip(*(self.columns[name].tolist() for name in names), strict=True)

    def layouts(self) -> list[tuple[int, bytes]]:
        """Returns rank and layout digest of each data file, in the order of ranks and groups."""
        rows = self._rows("rank", "has_file", "layout_digest", "stable_file_bytes", "stable_layout_digest")
        layouts = []
        for rank, has_file, digest, stable_bytes, stable_digest in rows:
            if has_file:
                layouts.append((rank, digest))
            if stable_bytes:
                layouts.append((rank, stable_digest))
        return layouts

    def providers_digests(self) -> list[bytes]:
        """Returns the digests of the ranks' lists of state providers, each once, in the order of ranks."""
        data = self.columns["providers_digest"].tobytes()
        return list(dict.fromkeys(data[at : at + 16] for at in range(0, len(data), 16)))

    def file_entries(self, save_id: SaveId, written_as: Mapping[int, SaveId]) -> list[FileEntry]:
        """Returns the entries of all data files in the manifest of a save, in the order of ranks and groups.

        Args:
            written_as: the save ids of ranks' own files, if they are not `save_id`.
        """
        own = self._rows("rank", "has_file", "file_bytes", "footer_offset", "footer_crc")
        names = ("file_bytes", "footer_offset", "footer_crc", "ordinal", "content_sha256")
        shared = self._rows(*(f"stable_{name}" for name in names))
        entries = []
        for (rank, has_file, size, footer, crc), stable in zip(own, shared, strict=True):
            if has_file:
                writer = written_as.get(rank, save_id)
                other = "" if writer == save_id else str(writer)
                entries.append(FileEntry(writer.data_file_name(rank), rank, size, footer, crc, save_id=other))
            size, footer, crc, ordinal, content = stable
            if size:
                writer = SaveId(save_id.run_id, ordinal)
                entries.append(
                    FileEntry(
                        writer.data_file_name(rank, STABLE_GROUP),
                        rank,
                        size,
                        footer,
                        crc,
                        save_id="" if writer == save_id else str(writer),
                        group=STABLE_GROUP,
                        content_sha256=content.hex(),
                    )
                )
        return entries

    def sent_bytes(self) -> npt.NDArray[np.int64]:
        """Returns the bytes that rank 0 needs of each rank's two own indexes and of its list of providers.

        Rank 0 does not need its own list again. Shape (ranks, 3).
        """
        columns = self.columns
        digests = columns["providers_digest"]
        is_another = (digests[:, 0] != digests[:1, 0]) | (digests[:, 1] != digests[:1, 1])
        listed = np.where(is_another, columns["providers_bytes"], 0)
        sizes = (columns["layout_bytes"], columns["stable_layout_bytes"], listed)
        return np.stack(sizes, axis=1).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class RankContribution:
    """What rank 0 needs of a rank's part of a durable save, where another program brings it there."""

    save_id: SaveId  # of its files
    record: bytes
    indexes: tuple[bytes, ...]  # of the rank's data files, in the order of groups
    providers: bytes  # the list of its state providers


def encode_failure(text: str | None, node: str = "") -> bytes:
    """Encodes a rank's first error, cut to the record's size, and its node; or that it has no error."""
    end = f" (on node {node})".encode() if node else b""
    data = (text or "").encode()[: _FAILURE_BYTES - 3 - len(end)] + end
    return _FAILURE.pack(text is not None, len(data), data)


def decode_failures(data: bytes) -> dict[int, str]:
    """Decodes what encode_failure returned on all ranks; returns errors by rank, of those that have one."""
    return {
        rank: text[:size].decode(errors="replace")
        for rank, (failed, size, text) in enumerate(_FAILURE.iter_unpack(data))
        if failed
    }
