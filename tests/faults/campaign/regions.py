"""Where each class of byte lies in the files of a checkpoint, as FORMAT.md says.

Offsets of fields are written down here a second time, on purpose: a codec that reads a field from a wrong
place does not lead the damage astray.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.support.fragments import fragments_of

MANIFEST, METADATA = "datastates.manifest", "metadata.json"
Fields = tuple[tuple[str, int], ...]  # name and size, one after the other

_IDENTITY: Fields = (("magic", 8), ("version", 4), ("incompatible", 4), ("compatible", 4))
HEADER: Fields = (*_IDENTITY, ("group", 4), ("run id", 8), ("ordinal", 8), ("rank", 4), ("world size", 4))
FOOTER: Fields = (
    *_IDENTITY,
    *(("block size", 4), ("data bytes", 8), ("run id", 8), ("ordinal", 8), ("rank", 4), ("world size", 4)),
    *(("number of entries", 4), ("group", 4), ("number of checksums", 8), ("layout digest", 16)),
)
ENTRY: Fields = (
    *(("offset", 8), ("stored bytes", 8), ("logical bytes", 8), ("kind", 1), ("codec", 1), ("item bytes", 2)),
    *(("bytes of name", 4), ("number of frames", 4), ("reserved", 4), ("SHA-256", 32)),
)
TRAILER: Fields = (
    ("magic", 8),
    ("data bytes", 8),
    ("footer bytes", 8),
    ("footer CRC", 4),
    ("reserved", 4),
    ("CRC", 4),
)
INDEX: Fields = (
    *_IDENTITY,
    *(("data files", 4), ("rows", 8), ("shape numbers", 8), ("object rows", 8), ("name bytes", 8)),
)
KEY: Fields = (
    ("bytes of name", 4),
    ("dtype", 2),
    ("dimensions", 1),
    ("flags", 1),
    ("fragments", 8),
    ("section bytes", 8),
    ("digest", 16),
)
OBJECT_ROW: Fields = (("bytes of name", 4), ("file", 4), ("kind", 4))


@dataclasses.dataclass(frozen=True)
class Region:
    """Bytes [begin, end) of a file, and what they are."""

    file: str
    what: str
    begin: int
    end: int


def size_of(fields: Fields) -> int:
    return sum(size for _, size in fields)


def regions(directory: Path) -> list[Region]:
    """Returns the regions of all files of a sound checkpoint, in no order."""
    checkpoint = Checkpoint.open(directory)
    found = [*_of_index(directory / checkpoint.manifest.index.name), *_of_manifest(directory / MANIFEST)]
    found += _of_metadata(directory / METADATA)
    for file in range(len(checkpoint.manifest.files)):
        found += _of_data_file(checkpoint, file)
    return [region for region in found if region.end > region.begin]


def _fields(path: Path, prefix: str, fields: Fields, at: int) -> Iterator[Region]:
    for name, size in fields:
        yield Region(path.name, f"{prefix}: {name}", at, at + size)
        at += size


def _of_data_file(checkpoint: Checkpoint, file: int) -> Iterator[Region]:
    path = checkpoint.file_path(file)
    data = path.read_bytes()
    data_bytes = struct.unpack_from("<Q", data, len(data) - 36 + 8)[0]
    yield from _fields(path, "header", HEADER, 0)
    yield Region(path.name, "header: padding", size_of(HEADER), 4092)
    yield Region(path.name, "header: CRC", 4092, 4096)
    yield from _of_extents(checkpoint, file, data_bytes)
    yield from _fields(path, "footer", FOOTER, data_bytes)
    entries, _, checksums = struct.unpack_from("<IIQ", data, data_bytes + 56)
    at = data_bytes + size_of(FOOTER)
    for _ in range(entries):
        yield from _fields(path, "footer's entry", ENTRY, at)
        name, frames = struct.unpack_from("<II", data, at + 28)
        at += size_of(ENTRY)
        yield Region(path.name, "footer's entry: name", at, at + name)
        yield Region(path.name, "footer's entry: frames", at + name, at + name + 4 * frames)
        at += name + 4 * frames
    yield Region(path.name, "footer: block checksums", at, at + 4 * checksums)
    yield Region(path.name, "footer: padding", at + 4 * checksums, len(data) - 36)
    yield from _fields(path, "trailer", TRAILER, len(data) - 36)


def _of_extents(checkpoint: Checkpoint, file: int, data_bytes: int) -> Iterator[Region]:
    """Yields the regions of tensors, of objects, and of the gaps between them."""
    name, places = checkpoint.file_path(file).name, []
    for key, entry in checkpoint.index.tensors.items():
        places += [
            (e.offset, e.offset + e.bytes, "tensor") for _, e in fragments_of(entry, key) if e.file == file
        ]
    for extent in checkpoint.footer(file).objects.values():
        places.append((extent.offset, extent.offset + extent.bytes, "object"))
    at = 4096
    for begin, end, what in sorted(places):
        yield Region(name, "data: gap", at, begin)
        if end - begin > 1 << 20:
            yield Region(name, "data: across a block's end", (1 << 20) - 40, (1 << 20) + 40)
        yield Region(name, f"data: {what}", begin, end)
        at = end
    yield Region(name, "data: gap", at, data_bytes)


def _of_index(path: Path) -> Iterator[Region]:
    data = path.read_bytes()
    rows, numbers, objects, names = struct.unpack_from("<QQQQ", data, 24)
    yield from _fields(path, "index header", INDEX, 0)
    at, sections = size_of(INDEX), []
    for _ in range(rows):
        yield from _fields(path, "key table", KEY, at)
        sections.append(struct.unpack_from("<Q", data, at + 16)[0])
        at += size_of(KEY)
    yield Region(path.name, "index: global shapes", at, at + 8 * numbers)
    at += 8 * numbers
    for _ in range(objects):
        yield from _fields(path, "object table", OBJECT_ROW, at)
        at += size_of(OBJECT_ROW)
    yield Region(path.name, "index: names", at, at + names)
    directory = len(data) - sum(sections)
    yield Region(path.name, "index: padding", at + names, directory)
    for section in sections:
        yield Region(path.name, "index: section", directory, directory + section)
        directory += section


def _of_manifest(path: Path) -> Iterator[Region]:
    data = path.read_bytes()
    line = data.index(b"\n") + 1
    at = 0
    for what, word in zip(("magic", "version", "size", "CRC"), data[: line - 1].split(b" "), strict=True):
        yield Region(path.name, f"manifest's line: {what}", at, at + len(word))
        at += len(word) + 1
    yield Region(path.name, "manifest's line: end", line - 1, line)
    for match in re.finditer(rb'"(\w+)": ?([^\n,]+)', data[line:]):
        yield Region(path.name, "manifest: name of a field", line + match.start(1), line + match.end(1))
        yield Region(path.name, f"manifest: {match[1].decode()}", line + match.start(2), line + match.end(2))
    for match in re.finditer(rb"\n *", data[line:]):
        yield Region(path.name, "manifest: white space", line + match.start(), line + match.end())


def _of_metadata(path: Path) -> Iterator[Region]:
    yield Region(path.name, "metadata.json", 0, path.stat().st_size)
