"""The bytes of an index: a directory of what there is, then a section of fragments for every tensor.

What belongs here: how tables and sections lie in bytes, and refusing bytes that lie. What does not: what
tensors mean (index.py), files. A directory is small and read whole. A section is read when its tensor is
asked for; it is a table of columns, each one number a fragment, so that what repeats packs well.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import FormatError
from megatron_datastates.format.features import check_readable
from megatron_datastates.format.values import FORMAT_VERSION, decode_name

Words = npt.NDArray[np.uint64]

_MAGIC = b"DSINDEX\x01"
_HEADER = struct.Struct("<8sIIIIQQQQ")
KEY = np.dtype(
    [("name_bytes", "<u4"), ("dtype", "<u2"), ("ndim", "<u2"), ("fragments", "<u8"), ("stored_bytes", "<u8"),
     ("digest", "V16")]
)  # fmt: skip
_OBJECT = np.dtype([("name_bytes", "<u4"), ("file", "<u4")])
_ALIGNMENT = 8
_MAX_DIMENSIONS = 64
_MAX_EXPANSION = 1032  # of DEFLATE: two bits for 258 bytes


def column_count(ndim: int) -> int:
    """Columns of a section: offsets and shapes of the fragments, data files, offsets in them."""
    return 2 * ndim + 2


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor in a directory."""

    dtype_code: int
    global_shape: tuple[int, ...]
    fragments: int
    at: int  # of its section, from the beginning of the file
    stored_bytes: int
    digest: bytes

    @property
    def plain_bytes(self) -> int:
        return 8 * column_count(len(self.global_shape)) * self.fragments


class Directory:
    """The tables of an index file of `total_bytes`. What they say stays within the file.

    Raises:
        FormatError, UnsupportedFormatError: `data` is no such directory.
    """

    def __init__(self, data: bytes, name: str, total_bytes: int) -> None:
        self.name = name
        if len(data) < _HEADER.size or data[:8] != _MAGIC:
            raise FormatError(f"{name} does not begin as a datastates index does")
        _, version, incompatible, _, self.files, *counts = _HEADER.unpack_from(data)
        check_readable(name, version, incompatible)
        sizes = [KEY.itemsize, 8, _OBJECT.itemsize, 1]
        lengths = [count * size for count, size in zip(counts, sizes, strict=True)]
        self.bytes = _aligned(_HEADER.size + sum(lengths))
        if self.bytes > len(data):
            raise FormatError(f"{name} is damaged: its tables do not add up to its size")
        at = _HEADER.size
        self.keys = np.frombuffer(data, KEY, counts[0], at)
        at += lengths[0]
        self.shapes = np.frombuffer(data, "<i8", counts[1], at)
        at += lengths[1]
        self.objects = np.frombuffer(data, _OBJECT, counts[2], at)
        at += lengths[2]
        self.names = memoryview(data)[at : at + counts[3]]
        self.sections = memoryview(data)[self.bytes :]  # all of them or, of a directory alone, none
        self._check(total_bytes)
        self.shape_starts = starts(self.keys["ndim"])
        self.section_starts = self.bytes + starts(self.keys["stored_bytes"])

    def _check(self, total_bytes: int) -> None:
        """Sums are of Python's integers: no lie overflows them."""
        lengths = [*self.keys["name_bytes"].tolist(), *self.objects["name_bytes"].tolist()]
        if (
            self.bytes + sum(self.keys["stored_bytes"].tolist()) != total_bytes
            or sum(self.keys["ndim"].tolist()) != len(self.shapes)
            or sum(lengths) != len(self.names)
        ):
            raise FormatError(f"{self.name} is damaged: its tables do not add up to its size")
        if (self.keys["ndim"] > _MAX_DIMENSIONS).any():
            raise FormatError(f"{self.name} is damaged: a tensor has more than {_MAX_DIMENSIONS} dimensions")
        if (self.objects["file"] >= self.files).any():
            raise FormatError(f"{self.name} is damaged: an object lies in a data file that it does not count")

    def key_names(self) -> list[bytes]:
        """In the order of the rows."""
        return self._names(0, self.keys["name_bytes"])

    def object_names(self) -> list[bytes]:
        """In the order of the rows."""
        return self._names(int(self.keys["name_bytes"].sum()), self.objects["name_bytes"])

    def _names(self, at: int, lengths: npt.NDArray[np.uint32]) -> list[bytes]:
        ends = (at + np.cumsum(lengths, dtype=np.int64)).tolist()
        return [self.names[start:end].tobytes() for start, end in zip([at, *ends], ends, strict=False)]

    def text(self, name: bytes) -> str:
        return decode_name(name, self.name)

    def row(self, number: int) -> Row:
        row, shape = self.keys[number], int(self.shape_starts[number])
        return Row(
            int(row["dtype"]),
            tuple(self.shapes[shape : shape + int(row["ndim"])].tolist()),
            int(row["fragments"]),
            int(self.section_starts[number]),
            int(row["stored_bytes"]),
            row["digest"].tobytes(),
        )

    def is_plain(self) -> bool:
        """Whether no section is packed, as in a rank's own index."""
        keys = self.keys
        few = (keys["fragments"] <= keys["stored_bytes"]).all()  # so that the product below fits
        plain = 16 * keys["fragments"] * (keys["ndim"].astype(np.uint64) + np.uint64(1))
        return bool(few and (plain == keys["stored_bytes"]).all())


def starts(lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """Where each of many things begins that stand without gaps."""
    return np.cumsum(lengths, dtype=np.int64) - lengths.astype(np.int64)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def encode_tables(
    keys: Sequence[tuple[bytes, int, tuple[int, ...], int, bytes]],
    objects: Sequence[tuple[bytes, int]],
    files: int,
) -> bytes:
    """An index of tensors and objects, both in the order of their names.

    Args:
        keys: name, dtype's code, global shape, number of fragments, section.
        objects: name, data file.
        files: how many data files there are.
    """
    rows = [
        (len(name), code, len(shape), count, len(section), hashlib.sha256(section).digest()[:16])
        for name, code, shape, count, section in keys
    ]
    shapes = np.array([size for _, _, shape, _, _ in keys for size in shape], "<i8")
    names = b"".join([*(key[0] for key in keys), *(name for name, _ in objects)])
    counts = (len(keys), len(shapes), len(objects), len(names))
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, 0, files, *counts)
    places = np.array([(len(name), file) for name, file in objects], _OBJECT)
    tables = b"".join([header, np.array(rows, KEY).tobytes(), shapes.tobytes(), places.tobytes(), names])
    return b"".join([tables.ljust(_aligned(len(tables)), b"\0"), *(section for *_, section in keys)])


def encode_section(columns: Words, packed: bool) -> bytes:
    """A section of (columns, fragments). Packed are the steps from fragment to fragment, where it pays."""
    plain = columns.astype("<u8", copy=False).tobytes()
    if not packed:
        return plain
    steps = columns.copy()
    steps[:, 1:] -= columns[:, :-1]
    small = zlib.compress(steps.astype("<u8", copy=False).tobytes(), 1)
    return small if len(small) < len(plain) else plain


def decode_section(data: bytes, row: Row, what: str) -> Words:
    """The inverse: (columns, fragments).

    Raises:
        FormatError: `data` is not what `row` says. Nothing is allocated beyond what so many bytes can hold.
    """
    size = row.plain_bytes
    if not len(data) == row.stored_bytes <= size <= _MAX_EXPANSION * len(data):
        raise FormatError(f"{what} is damaged: {len(data)} bytes cannot hold {row.fragments} fragments")
    if hashlib.sha256(data).digest()[:16] != row.digest:
        raise FormatError(f"{what} is damaged: its SHA-256 differs")
    packed = len(data) < size
    plain = _expanded(data, size, what) if packed else data
    columns = np.frombuffer(plain, "<u8").reshape(column_count(len(row.global_shape)), row.fragments)
    return np.cumsum(columns, axis=1, dtype=np.uint64) if packed else columns


def _expanded(data: bytes, size: int, what: str) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(data, size + 1)
    except zlib.error as error:
        raise FormatError(f"{what} is damaged: {error}") from None
    if len(plain) != size or not unpacking.eof or unpacking.unused_data:
        raise FormatError(f"{what} is damaged: it does not unpack to {size} bytes")
    return plain
