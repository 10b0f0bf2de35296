"""The bytes of an index: a directory of tensors and objects, then a section of fragments for each tensor.

Belongs here: how tables and sections are encoded, and refusing false claims. Does not belong here: what
tensors mean (tensor_entry.py), files. A directory is small and read whole. A section is read when its tensor
is requested; it is a table of columns with one number per fragment, since similar numbers compress well.
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

from megatron_datastates.errors import FormatError, UnsupportedFormatError
from megatron_datastates.format.features import check_readable
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.values import FORMAT_VERSION, decode_name

Words = npt.NDArray[np.uint64]

_MAGIC = b"DSINDEX\x01"
_HEADER = struct.Struct("<8sIIIIQQQQ")
KEY = np.dtype(
    [("name_bytes", "<u4"), ("dtype", "<u2"), ("ndim", "u1"), ("flags", "u1"), ("fragments", "<u8"),
     ("stored_bytes", "<u8"), ("digest", "V16")]
)  # fmt: skip
_OBJECT_1 = np.dtype([("name_bytes", "<u4"), ("file", "<u4")])  # in format 1, which has no streams
_OBJECT = np.dtype([*_OBJECT_1.descr, ("kind", "<u4")])
ENCODED = 1  # the flag of a tensor whose fragments are entries of footers
_ALIGNMENT = 8
_MAX_DIMENSIONS = 64
_MAX_EXPANSION = 1032  # of DEFLATE: 258 bytes from two bits


def column_count(ndim: int) -> int:
    """Returns the number of columns of a section: fragments' offsets and shapes, data files, file offsets."""
    return 2 * ndim + 2


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor of a directory, and where its section is."""

    dtype_code: int
    global_shape: tuple[int, ...]
    fragments: int
    at: int  # offset of its section in the file
    stored_bytes: int  # of its section, packed or plain
    digest: bytes  # half of the section's SHA-256
    flags: int

    @property
    def plain_bytes(self) -> int:
        """The size of its section when it is not packed."""
        return 8 * column_count(len(self.global_shape)) * self.fragments


class Directory:
    """The decoded tables of an index; all that they claim lies within the file.

    Args:
        data: the file's first bytes, at least the directory.
        name: the file's name, for messages.
        total_bytes: the file's size.

    Raises:
        FormatError: `data` is damaged, or is not a directory.
        UnsupportedFormatError: a later release wrote it.
    """

    def __init__(self, data: bytes, name: str, total_bytes: int) -> None:
        self.name = name
        if len(data) < _HEADER.size or data[:8] != _MAGIC:
            raise FormatError(f"{name} does not begin as a datastates index does")
        _, self.version, incompatible, _, self.files, *counts = _HEADER.unpack_from(data)
        check_readable(name, self.version, incompatible)
        objects = _OBJECT_1 if self.version == 1 else _OBJECT
        sizes = [KEY.itemsize, 8, objects.itemsize, 1]
        lengths = [count * size for count, size in zip(counts, sizes, strict=True)]
        self.bytes = _aligned(_HEADER.size + sum(lengths))
        if self.bytes > len(data):
            raise FormatError(f"{name} is damaged: its tables do not add up to its size")
        at = _HEADER.size
        self.keys = np.frombuffer(data, KEY, counts[0], at)
        at += lengths[0]
        self.shapes = np.frombuffer(data, "<i8", counts[1], at)
        at += lengths[1]
        self.objects = np.frombuffer(data, objects, counts[2], at)
        at += lengths[2]
        self.names = memoryview(data)[at : at + counts[3]]
        self.sections = memoryview(data)[self.bytes :]  # as far as `data` has them
        self._check(total_bytes)
        self.shape_starts = starts(self.keys["ndim"])
        self.section_starts = self.bytes + starts(self.keys["stored_bytes"])

    def _check(self, total_bytes: int) -> None:
        """Checks sums in Python's integers, which no claim can overflow."""
        lengths = [*self.keys["name_bytes"].tolist(), *self.objects["name_bytes"].tolist()]
        if (
            self.bytes + sum(self.keys["stored_bytes"].tolist()) != total_bytes
            or sum(self.keys["ndim"].tolist()) != len(self.shapes)
            or sum(lengths) != len(self.names)
        ):
            raise FormatError(f"{self.name} is damaged: its tables do not add up to its size")
        # In format 1 the flags are the upper half of the number of dimensions.
        if (self.keys["ndim"] > _MAX_DIMENSIONS).any() or (self.version == 1 and self.keys["flags"].any()):
            raise FormatError(f"{self.name} is damaged: a tensor has more than {_MAX_DIMENSIONS} dimensions")
        if (self.objects["file"] >= self.files).any():
            raise FormatError(
                f"{self.name} is damaged: an object lies in data file {int(self.objects['file'].max())}, "
                f"expected a number below {self.files}"
            )

        unknown = set(self.object_kinds()) - {Kind.OBJECT, Kind.STREAM}
        if unknown:
            raise UnsupportedFormatError(
                f"{self.name} has entries of kind {min(unknown)}, which this release does not know: "
                "update this installation of megatron_datastates."
            )

    def object_kinds(self) -> list[int]:
        """Returns whether the rows of the object table are objects or streams (`Kind`)."""
        if self.version == 1:
            return [int(Kind.OBJECT)] * len(self.objects)
        kinds: list[int] = self.objects["kind"].tolist()
        return kinds

    def key_names(self) -> list[bytes]:
        """Returns the keys of tensors in the order of the rows."""
        return self._names(0, self.keys["name_bytes"])

    def object_names(self) -> list[bytes]:
        """Returns the keys of objects in the order of their table."""
        return self._names(int(self.keys["name_bytes"].sum()), self.objects["name_bytes"])

    def _names(self, at: int, lengths: npt.NDArray[np.uint32]) -> list[bytes]:
        ends = (at + np.cumsum(lengths, dtype=np.int64)).tolist()
        return [self.names[start:end].tobytes() for start, end in zip([at, *ends], ends, strict=False)]

    def text(self, name: bytes) -> str:
        """Returns a name as text. Raises FormatError if it is not UTF-8."""
        return decode_name(name, self.name)

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Returns rows of the key table."""
        places = [column[numbers].tolist() for column in (self.shape_starts, self.section_starts)]
        return [
            Row(dtype, tuple(self.shapes[shape : shape + ndim].tolist()), count, at, size, digest, flags)
            for (_, dtype, ndim, flags, count, size, digest), shape, at in zip(
                self.keys[numbers].tolist(), *places, strict=True
            )
        ]


def starts(lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """Returns where each of many neighbours begins, given their lengths."""
    return np.cumsum(lengths, dtype=np.int64) - lengths.astype(np.int64)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def encode_tables(
    keys: Sequence[tuple[bytes, int, tuple[int, ...], int, int, bytes]],
    objects: Sequence[tuple[bytes, int, int]],
    files: int,
    version: int = FORMAT_VERSION,
) -> bytes:
    """Returns the bytes of an index.

    Args:
        keys: per tensor, in the order of names: name, dtype code, global shape, flags, number of fragments,
            section.
        objects: per object, in the order of names, and then per stream: name, number of its data file, kind.
        files: number of data files.
        version: of the format; 1 has neither flags nor streams.
    """
    rows = [
        (len(name), code, len(shape), flags, count, len(section), hashlib.sha256(section).digest()[:16])
        for name, code, shape, flags, count, section in keys
    ]
    shapes = np.array([size for _, _, shape, *_ in keys for size in shape], "<i8")
    names = b"".join([*(key[0] for key in keys), *(row[0] for row in objects)])
    counts = (len(keys), len(shapes), len(objects), len(names))
    header = _HEADER.pack(_MAGIC, version, 0, 0, files, *counts)
    places = np.array([(len(name), file, kind) for name, file, kind in objects], _OBJECT)
    if version == 1:
        assert not places["kind"].tolist().count(Kind.STREAM) and not any(row[3] for row in rows)
        places = places[["name_bytes", "file"]].astype(_OBJECT_1)
    tables = b"".join([header, np.array(rows, KEY).tobytes(), shapes.tobytes(), places.tobytes(), names])
    return b"".join([tables.ljust(_aligned(len(tables)), b"\0"), *(section for *_, section in keys)])


def encode_section(columns: Words, packed: bool) -> bytes:
    """Returns the section of a (columns, fragments) table, packed as differences if that is smaller."""
    plain = columns.astype("<u8", copy=False).tobytes()
    if not packed:
        return plain
    steps = columns.copy()
    steps[:, 1:] -= columns[:, :-1]
    small = zlib.compress(steps.astype("<u8", copy=False).tobytes(), 1)
    return small if len(small) < len(plain) else plain


def decode_section(data: bytes, row: Row, what: str) -> Words:
    """Returns the (columns, fragments) table of a section. Allocates no more than `data` can expand to.

    Args:
        what: names the section in messages.

    Raises:
        FormatError: `data` is damaged, or does not agree with `row`.
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
