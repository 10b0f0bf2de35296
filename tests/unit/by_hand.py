"""Checkpoints built from their parts, good or bad, without the engine that normally writes them."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_datastates.engine._native import crc32c
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.codecs import FRAME_BYTES, NONE, ZSTD, encode_frame
from megatron_datastates.format.footer import TRAILER_BYTES, Footer, decode_trailer
from megatron_datastates.format.header import Header
from megatron_datastates.format.index import Index, build_index, index_entry, index_name
from megatron_datastates.format.manifest import FileEntry, IndexEntry, Manifest
from megatron_datastates.format.tail import Kind, TailEntry
from megatron_datastates.format.values import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    MANIFEST_NAME,
    Extent,
    Fragment,
    SaveId,
)

SAVE = SaveId(0x0123456789ABCDEF, 3)


@dataclasses.dataclass
class Part:
    """One data file: pieces are (offset, bytes)."""

    data_bytes: int = 8192
    pieces: Sequence[tuple[int, bytes]] = ()
    objects: Mapping[str, tuple[int, bytes]] = dataclasses.field(default_factory=dict)
    entries: Sequence[tuple[TailEntry, bytes]] = ()  # others of the tail, with their stored bytes
    checksums: bool = True
    footer: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # other fields of the footer


def fragment(key: str, global_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> Fragment:
    """Makes a fragment of uint8, so that bytes and elements are the same."""
    return Fragment(key, "uint8", tuple(global_shape), tuple(offset), tuple(shape))


def block_checksums(data: bytes) -> bytes:
    blocks = (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
    return b"".join(struct.pack("<I", crc32c(block)) for block in blocks)


def object_entries(places: Mapping[str, Extent]) -> list[TailEntry]:
    """Returns the entries of objects that are stored as they are, by key."""
    return [
        TailEntry(Kind.OBJECT, key, extent.offset, extent.bytes, extent.bytes)
        for key, extent in places.items()
    ]


def encoded_entry(
    kind: Kind, name: str, offset: int, data: bytes, codec: int = ZSTD, item_bytes: int = 1
) -> tuple[TailEntry, bytes]:
    """Returns an entry of the tail that holds `data`, with its SHA-256, and its stored bytes."""
    sha256 = hashlib.sha256(data).digest()
    if codec == NONE:
        return TailEntry(kind, name, offset, len(data), len(data), sha256=sha256), data
    parts = (data[at : at + FRAME_BYTES] for at in range(0, len(data), FRAME_BYTES))
    frames = [encode_frame(codec, part, item_bytes) for part in parts]
    stored, sizes = b"".join(frames), tuple(map(len, frames))
    return TailEntry(kind, name, offset, len(stored), len(data), codec, item_bytes, sizes, sha256), stored


def data_file(part: Part, rank: int, world_size: int, save_id: SaveId = SAVE, **footer: Any) -> bytes:
    """Returns the bytes of a data file."""
    data, group = bytearray(part.data_bytes), footer.get("group", 0)
    version = footer.get("format_version", FORMAT_VERSION)
    header = Header(save_id, rank, world_size, format_version=version, group=group).encode()
    entries = [(entry.offset, stored) for entry, stored in part.entries]
    for offset, piece in [(0, header), *part.pieces, *part.objects.values(), *entries]:
        data[offset : offset + len(piece)] = piece
    objects = {key: Extent(0, offset, len(piece)) for key, (offset, piece) in part.objects.items()}
    tail = [*object_entries(objects), *(entry for entry, _ in part.entries)]
    checksums = block_checksums(bytes(data)) if part.checksums else b""
    digest = footer.pop("layout_digest", bytes(16))
    footer_bytes = Footer(save_id, rank, world_size, len(data), digest, tail, checksums, **footer).encode()
    return bytes(data) + footer_bytes


def file_entry(data: bytes, rank: int, written_by: SaveId = SAVE, **fields: Any) -> FileEntry:
    offset, _, crc = decode_trailer(data[-TRAILER_BYTES:], "a file")
    name = written_by.data_file_name(rank, fields.get("group", 0))
    return FileEntry(name, rank, len(data), offset, crc, **fields)


def entry_of(index: bytes) -> IndexEntry:
    """Returns a manifest's entry for an index, or for bytes that are none: then all are its directory."""
    try:
        return index_entry(index)
    except DataStatesError:
        sha256 = hashlib.sha256(index).hexdigest()
        return IndexEntry(index_name(sha256), len(index), len(index), sha256)


def manifest_of(files: Sequence[FileEntry], index: bytes, save_id: SaveId = SAVE, **fields: Any) -> Manifest:
    return Manifest(
        run_id=f"{save_id.run_id:016x}",
        ordinal=save_id.ordinal,
        created="2026-01-01T00:00:00+00:00",
        index=entry_of(index),
        files=list(files),
        **{"world_size": max(len(files), 1), **fields},
    )


def write_checkpoint(
    directory: Path, parts: Sequence[Part], index: Index | bytes, save_id: SaveId = SAVE, **fields: Any
) -> Manifest:
    """Writes a checkpoint of these parts; `fields` are the manifest's."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for rank, part in enumerate(parts):
        data = data_file(part, rank, len(parts), save_id, **part.footer)
        files.append(file_entry(data, rank, save_id))
        (directory / files[-1].name).write_bytes(data)
    encoded = index if isinstance(index, bytes) else index.encode(packed=True)
    manifest = manifest_of(files, encoded, save_id, **fields)
    (directory / manifest.index.name).write_bytes(encoded)
    (directory / MANIFEST_NAME).write_bytes(manifest.encode())
    return manifest


def index_of(places: Iterable[tuple[Fragment, int, int]], objects: Mapping[str, int] | None = None) -> Index:
    """Returns the index of (fragment, file, offset in the file)."""
    entries = [(item, Extent(file, offset, item.bytes)) for item, file, offset in places]
    return build_index(entries, objects or {})
