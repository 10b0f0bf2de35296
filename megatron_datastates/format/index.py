"""The index of tensors: where every fragment of every tensor lies.

A rank's own index (one file, ordinal 0) is what ranks exchange when a layout is new; rank 0 merges them
into the index of a checkpoint, which is named after its bytes and therefore never changes in place.
Decoding looks at the header and the key directory; fragments are decoded key by key, on demand.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import FormatError, MissingKeyError, UnsupportedFormatError
from megatron_datastates.format.features import check_readable
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.values import (
    DTYPE_NAMES,
    DTYPES,
    FORMAT_VERSION,
    Extent,
    Fragment,
    decode_name,
)

_MAGIC = b"DSINDEX\x01"
_HEADER = struct.Struct("<8sIIIIQQQQQ")
_KEY = np.dtype(
    [("name_at", "<u8"), ("name_bytes", "<u4"), ("dtype", "<u2"), ("ndim", "<u2"), ("first", "<u8"),
     ("fragments", "<u8"), ("coordinates_at", "<u8")]
)  # fmt: skip
_FRAGMENT = np.dtype([("file", "<u4"), ("zero", "<u4"), ("offset", "<u8"), ("bytes", "<u8")])
_OBJECT = np.dtype([("name_at", "<u8"), ("name_bytes", "<u4"), ("file", "<u4")])
_MAX_DIMENSIONS = 64
_MOST_BYTES = 1 << 62  # of a tensor, and of a file: sums and products of offsets stay within 64 bits


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One global tensor and its stored fragments (n of them, d dimensions)."""

    dtype: str
    global_shape: tuple[int, ...]
    offsets: npt.NDArray[np.int64]  # (n, d), elements
    shapes: npt.NDArray[np.int64]  # (n, d), elements
    files: npt.NDArray[np.uint32]  # (n,), ordinals
    file_offsets: npt.NDArray[np.uint64]  # (n,), bytes
    file_bytes: npt.NDArray[np.uint64]  # (n,)

    def fragments(self, key: str) -> Iterator[tuple[Fragment, Extent]]:
        """The same, one by one."""
        for i in range(len(self.files)):
            offset, shape = tuple(self.offsets[i].tolist()), tuple(self.shapes[i].tolist())
            extent = Extent(int(self.files[i]), int(self.file_offsets[i]), int(self.file_bytes[i]))
            yield Fragment(key, self.dtype, self.global_shape, offset, shape), extent


class Index:
    """Read-only: key -> TensorEntry, and object key -> file ordinal."""

    def __init__(self, tensors: Mapping[str, TensorEntry], objects: Mapping[str, int]) -> None:
        self.tensors = tensors
        self.objects = objects

    def tensor(self, key: str) -> TensorEntry:
        """Raises MissingKeyError."""
        if key not in self.tensors:
            raise MissingKeyError(f"there is no tensor {key!r} in this checkpoint")
        return self.tensors[key]

    def encode(self) -> bytes:
        """Keys are sorted, so that equal indexes have equal bytes."""
        keys, names, coordinates, fragments = [], bytearray(), [], []
        fragment_count = coordinate_count = 0
        for key in sorted(self.tensors):
            entry, count = self.tensors[key], len(self.tensors[key].files)
            name, dims = key.encode(), len(entry.global_shape)
            keys.append(
                (len(names), len(name), DTYPES[entry.dtype][0], dims, fragment_count, count, coordinate_count)
            )
            names += name
            boxes = np.concatenate([entry.offsets, entry.shapes], axis=1).reshape(-1)
            coordinates += [np.array(entry.global_shape, "<i8"), boxes.astype("<i8")]
            table = np.zeros(count, _FRAGMENT)
            table["file"], table["offset"], table["bytes"] = entry.files, entry.file_offsets, entry.file_bytes
            fragments.append(table)
            fragment_count += count
            coordinate_count += dims * (1 + 2 * count)
        objects = []
        for key in sorted(self.objects):
            name = key.encode()
            objects.append((len(names), len(name), self.objects[key]))
            names += name
        counts = (len(keys), fragment_count, coordinate_count, len(objects), len(names))
        header = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, 0, 0, *counts)
        parts = [header, np.array(keys, _KEY).tobytes()]
        parts += [table.tobytes() for table in fragments] + [part.tobytes() for part in coordinates]
        return b"".join([*parts, np.array(objects, _OBJECT).tobytes(), bytes(names)])

    @classmethod
    def decode(cls, data: bytes, name: str, files: int) -> Index:
        """Reads the file `name` of a checkpoint with so many data files.

        Raises:
            FormatError: damaged, or it points outside itself or outside the file table.
            UnsupportedFormatError: written by a later release.
        """
        tables = _Tables(data, name)
        if len(tables.fragments) and int(tables.fragments["file"].max()) >= files:
            raise FormatError(f"{name} names a data file that the manifest does not")
        if len(tables.objects) and int(tables.objects["file"].max()) >= files:
            raise FormatError(f"{name} names a data file that the manifest does not")
        objects = {tables.text(row): int(row["file"]) for row in tables.objects}
        if len(objects) != len(tables.objects):
            raise FormatError(f"{name} is damaged: it names an object twice")
        return cls(_LazyTensors(tables), objects)


class _Tables:
    """The sections of an encoded index, bounds checked once."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name = data, name
        if len(data) < _HEADER.size or data[:8] != _MAGIC:
            raise FormatError(f"{name} does not begin as a datastates index does")
        _, version, incompatible, _, _, *counts = _HEADER.unpack_from(data)
        check_readable(name, version, incompatible)
        sizes = [_KEY.itemsize, _FRAGMENT.itemsize, 8, _OBJECT.itemsize, 1]
        if _HEADER.size + sum(c * s for c, s in zip(counts, sizes, strict=True)) != len(data):
            raise FormatError(f"{name} is damaged: its sections do not add up to its size")
        at = _HEADER.size
        self.keys = np.frombuffer(data, _KEY, counts[0], at)
        at += self.keys.nbytes
        self.fragments = np.frombuffer(data, _FRAGMENT, counts[1], at)
        at += self.fragments.nbytes
        self.coordinates = np.frombuffer(data, "<i8", counts[2], at)
        at += self.coordinates.nbytes
        self.objects = np.frombuffer(data, _OBJECT, counts[3], at)
        self.names_at = at + self.objects.nbytes

    def text(self, row: np.void) -> str:
        start = self.names_at + int(row["name_at"])
        end = start + int(row["name_bytes"])
        if not self.names_at <= start <= end <= len(self.data):
            raise FormatError(f"{self.name} is damaged: a name lies outside it")
        return decode_name(self.data[start:end], self.name)

    def entry(self, number: int) -> TensorEntry:
        row = self.keys[number]
        dims, count = int(row["ndim"]), int(row["fragments"])
        first, at = int(row["first"]), int(row["coordinates_at"])
        if (
            first + count > len(self.fragments)
            or dims > _MAX_DIMENSIONS
            or at + dims * (1 + 2 * count) > len(self.coordinates)
        ):
            raise FormatError(f"{self.name} is damaged: the entry of {self.text(row)!r} points outside it")
        if int(row["dtype"]) not in DTYPE_NAMES:
            raise UnsupportedFormatError(
                f"{self.name}: tensor {self.text(row)!r} has a dtype of code {row['dtype']}, which this "
                "release does not know. A later release of megatron_datastates may: update it here."
            )
        shape = tuple(self.coordinates[at : at + dims].tolist())
        boxes = self.coordinates[at + dims : at + dims * (1 + 2 * count)].reshape(count, 2 * dims)
        table = self.fragments[first : first + count]
        dtype = DTYPE_NAMES[int(row["dtype"])]
        entry = TensorEntry(
            dtype, shape, boxes[:, :dims], boxes[:, dims:], table["file"], table["offset"], table["bytes"]
        )
        _check_boxes(entry, self.text(row), self.name)
        return entry


def _check_boxes(entry: TensorEntry, key: str, name: str) -> None:
    shape = np.array(entry.global_shape, np.int64)
    item = DTYPES[entry.dtype][1]
    inside = (
        (shape >= 0).all()
        # A size of 0 must not hide absurd ones beside it: strides are products of the others.
        and math.prod(max(size, 1) for size in entry.global_shape) * item < _MOST_BYTES
        and (entry.offsets >= 0).all()
        and (entry.shapes >= 0).all()
        and (entry.offsets <= shape).all()
        and (entry.shapes <= shape - entry.offsets).all()
        # From here on products fit: every fragment is smaller than its tensor.
        and (np.prod(entry.shapes, axis=1, dtype=np.uint64) * np.uint64(item) == entry.file_bytes).all()
        and (entry.file_offsets >= HEADER_BYTES).all()
        and (entry.file_offsets < _MOST_BYTES).all()
    )
    if not inside:
        raise FormatError(f"{name} is damaged: a fragment of {key!r} does not fit its tensor")


class _LazyTensors(Mapping[str, TensorEntry]):
    """Decodes an entry when it is asked for."""

    def __init__(self, tables: _Tables) -> None:
        self._tables = tables
        self._numbers = {tables.text(row): number for number, row in enumerate(tables.keys)}
        if len(self._numbers) != len(tables.keys):
            raise FormatError(f"{tables.name} is damaged: it names a key twice")
        self._decoded: dict[str, TensorEntry] = {}

    def __getitem__(self, key: str) -> TensorEntry:
        if key not in self._decoded:
            self._decoded[key] = self._tables.entry(self._numbers[key])
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def build_index(entries: Iterable[tuple[Fragment, Extent]], objects: Mapping[str, int]) -> Index:
    """Groups fragments by key.

    Raises:
        FormatError: two fragments of one key disagree on dtype or global shape.
    """
    grouped: dict[str, list[tuple[Fragment, Extent]]] = {}
    for fragment, extent in entries:
        grouped.setdefault(fragment.key, []).append((fragment, extent))
    return Index({key: _entry(key, group) for key, group in grouped.items()}, dict(objects))


def _entry(key: str, group: Sequence[tuple[Fragment, Extent]]) -> TensorEntry:
    first = group[0][0]
    for fragment, _ in group:
        _check_alike(key, (first.dtype, first.global_shape), (fragment.dtype, fragment.global_shape))
    dims = len(first.global_shape)
    return TensorEntry(
        first.dtype,
        first.global_shape,
        np.array([f.offset for f, _ in group], np.int64).reshape(len(group), dims),
        np.array([f.shape for f, _ in group], np.int64).reshape(len(group), dims),
        np.array([e.file for _, e in group], np.uint32),
        np.array([e.offset for _, e in group], np.uint64),
        np.array([e.bytes for _, e in group], np.uint64),
    )


def merge_indexes(parts: Iterable[tuple[Index, int]]) -> Index:
    """The index of a checkpoint from ranks' own indexes, each with the ordinal of its file.

    Raises:
        FormatError: ranks disagree on a tensor's dtype or global shape, or store one object twice.
    """
    groups: dict[str, list[tuple[TensorEntry, int]]] = {}
    objects: dict[str, int] = {}
    for index, file in parts:
        for key, entry in index.tensors.items():
            groups.setdefault(key, []).append((entry, file))
        for key in index.objects:
            if key in objects:
                raise FormatError(f"object {key!r} is stored by the ranks of files {objects[key]} and {file}")
            objects[key] = file
    return Index({key: _merge_entries(key, group) for key, group in groups.items()}, objects)


def _merge_entries(key: str, group: Sequence[tuple[TensorEntry, int]]) -> TensorEntry:
    first = group[0][0]
    for entry, _ in group:
        _check_alike(key, (first.dtype, first.global_shape), (entry.dtype, entry.global_shape))
    return TensorEntry(
        first.dtype,
        first.global_shape,
        np.concatenate([entry.offsets for entry, _ in group]),
        np.concatenate([entry.shapes for entry, _ in group]),
        np.concatenate([np.full(len(entry.files), file, np.uint32) for entry, file in group]),
        np.concatenate([entry.file_offsets for entry, _ in group]),
        np.concatenate([entry.file_bytes for entry, _ in group]),
    )


def _check_alike(key: str, one: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> None:
    if one != other:
        raise FormatError(
            f"shards of {key!r} disagree: {one[0]} of global shape {one[1]}, and {other[0]} of {other[1]}"
        )


def index_name(encoded: bytes) -> str:
    """The file name of an index: half of the SHA-256 of its bytes."""
    return f"index-{hashlib.sha256(encoded).hexdigest()[:32]}"
