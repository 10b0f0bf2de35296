"""The index of tensors: where every fragment of every tensor lies.

A rank's *own index* describes its data file alone, as number 0, with nothing packed. Ranks exchange own
indexes when a layout is new, and the layout digest in a footer is that of the rank's own index. Rank 0
merges them into the index of the checkpoint, from which `own_index` makes each of them again. The file is
named after the digest of its directory, which has those of all its sections, so it never changes in place. A
reader reads the directory whole, and the fragments of a key on demand.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import FormatError, MissingKeyError, UnsupportedFormatError
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.manifest import IndexEntry
from megatron_datastates.format.rows import Rows
from megatron_datastates.format.tables import (
    ENCODED,
    Directory,
    Row,
    Words,
    column_count,
    decode_section,
    encode_section,
    encode_tables,
    starts,
)
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.values import DTYPE_NAMES, DTYPES, FORMAT_VERSION, Extent, Fragment

_MAX_BYTES = 1 << 62  # of a tensor, and of a file: sums and products of offsets stay within 64 bits
_MOST_ENTRIES = 1 << 32  # of a footer
# An access to an entry that is not decoded yet reads those that follow, too, after so many accesses, so many
# entries and so many bytes at most: one by one, each opens the file.
_FEW_MISSES, _MOST_AHEAD, _AHEAD_BYTES = 8, 64, 64 << 10
_MOST_SIMILAR = 2  # keys in a message
_MOST_COMPARED = 5000  # keys; of so many, the comparison takes less than a second
TensorFacts = tuple[str, str, tuple[int, ...], bool]  # key, dtype, global shape, whether it is encoded
# Yields the bytes of each range (offset, size) of the index file. The ranges are in the order of the file.
ReadRanges = Callable[[Sequence[tuple[int, int]]], Iterable[bytes]]


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One global tensor of d dimensions, and its n stored fragments."""

    dtype: str
    global_shape: tuple[int, ...]
    offsets: npt.NDArray[np.int64]  # (n, d), elements
    shapes: npt.NDArray[np.int64]  # (n, d), elements
    files: npt.NDArray[np.uint32]  # (n,), positions in the manifest's list
    file_offsets: npt.NDArray[np.uint64]  # (n,), bytes; if encoded, numbers of entries of the file's footer
    file_bytes: npt.NDArray[np.uint64]  # (n,), decoded
    encoded: bool = False

    def fragments(self, key: str) -> Iterator[tuple[Fragment, Extent]]:
        """Yields the fragments and their extents, one by one. Only of a tensor that is not encoded."""
        assert not self.encoded, "only footers have the extents of encoded fragments"
        for i in range(len(self.files)):
            offset, shape = tuple(self.offsets[i].tolist()), tuple(self.shapes[i].tolist())
            extent = Extent(int(self.files[i]), int(self.file_offsets[i]), int(self.file_bytes[i]))
            yield Fragment(key, self.dtype, self.global_shape, offset, shape), extent

    def columns(self) -> Words:
        """Returns the fragments as the columns of a section."""
        dims = len(self.global_shape)
        columns = np.empty((column_count(dims), len(self.files)), np.uint64)
        columns[:dims], columns[dims : 2 * dims] = self.offsets.T, self.shapes.T
        columns[-2], columns[-1] = self.files, self.file_offsets
        return columns


class Index:
    """Where tensors (TensorEntry), objects and streams (number of the data file) lie, by key. Read-only."""

    def __init__(
        self,
        tensors: Mapping[str, TensorEntry],
        objects: Mapping[str, int],
        streams: Mapping[str, int] | None = None,
    ) -> None:
        self.tensors = tensors
        self.objects = objects
        self.streams = streams or {}

    def tensor(self, key: str) -> TensorEntry:
        """Returns a tensor's entry. Raises MissingKeyError, and what `from_directory` raises on demand."""
        if key not in self.tensors:
            raise self.missing("tensor", key)
        return self.tensors[key]

    def missing(
        self, kind: Literal["tensor", "object", "stream"], key: str, where: str = "this checkpoint"
    ) -> MissingKeyError:
        """Returns the error for a key that is not there, or is something else there."""
        kinds: dict[str, Mapping[str, Any]]
        kinds = {"tensor": self.tensors, "object": self.objects, "stream": self.streams}
        found = next((other for other, keys in kinds.items() if key in keys), None)
        end = f": {key!r} is {'an' if found == 'object' else 'a'} {found} there" if found else ""
        return MissingKeyError(
            f"there is no {kind} {key!r} in {where}{end or similar_keys(key, kinds[kind])}"
        )

    def describe(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Returns the dtype and global shape of a tensor without reading its fragments. Raises KeyError."""
        if isinstance(self.tensors, StoredTensors):
            return self.tensors.describe(key)
        return self.tensors[key].dtype, self.tensors[key].global_shape

    def preload(self, keys: Iterable[str]) -> None:
        """Reads those tensors that are not decoded yet, in the order of the file. Ignores unknown keys."""
        if isinstance(self.tensors, StoredTensors):
            self.tensors.preload(keys)

    def encode(self, *, packed: bool = False, version: int = FORMAT_VERSION) -> bytes:
        """Returns the bytes of the index file. Keys are sorted, so equal indexes have equal bytes.

        Args:
            packed: compress sections, as in a stored index; own indexes are plain.
            version: of the format.
        """
        rows = [
            (key.encode(), places[key], kind)
            for kind, places in ((Kind.OBJECT, self.objects), (Kind.STREAM, self.streams))
            for key in sorted(places)
        ]
        files = max((file for _, file, _ in rows), default=-1) + 1
        keys = []
        for key in sorted(self.tensors):
            entry, count = self.tensors[key], len(self.tensors[key].files)
            files = max(files, int(entry.files.max(initial=0)) + 1 if count else 0)
            section = encode_section(entry.columns(), packed)
            flags = ENCODED if entry.encoded else 0
            keys.append((key.encode(), DTYPES[entry.dtype][0], entry.global_shape, flags, count, section))
        return encode_tables(keys, rows, files, version)

    def own_index(self, file: int, version: int = FORMAT_VERSION) -> bytes:
        """Returns the own index of a data file, as its rank wrote it; its digest is in the file's footer.

        Args:
            version: of the format of the data file.
        """
        tensors = {}
        for key, entry in self.tensors.items():
            mine = np.flatnonzero(entry.files == file)
            if len(mine):
                tensors[key] = TensorEntry(
                    entry.dtype,
                    entry.global_shape,
                    entry.offsets[mine],
                    entry.shapes[mine],
                    np.zeros(len(mine), np.uint32),
                    entry.file_offsets[mine],
                    entry.file_bytes[mine],
                    entry.encoded,
                )
        objects, streams = (
            {key: 0 for key, place in places.items() if place == file}
            for places in (self.objects, self.streams)
        )
        return Index(tensors, objects, streams).encode(version=version)

    @classmethod
    def decode(cls, data: bytes, name: str, files: int) -> Index:
        """Returns the index in `data`, all bytes of the file `name`.

        Args:
            files: number of data files in the manifest.

        Raises:
            FormatError: the index is damaged, or names data files that the manifest does not.
            UnsupportedFormatError: a later release wrote it.
        """
        return cls.from_directory(
            Directory(data, name, len(data)), files, lambda ranges: (data[at : at + n] for at, n in ranges)
        )

    @classmethod
    def from_directory(
        cls, directory: Directory, files: int, read: ReadRanges, known: DecodedEntries | None = None
    ) -> Index:
        """Returns an index that reads sections on demand. Raises what `decode` raises; so does each access.

        Args:
            read: reads ranges of the file.
            known: entries that were decoded from the same bytes before; this index adds to them.
        """
        name = directory.name
        if directory.files > files:
            raise FormatError(
                f"{name} is damaged: it names {directory.files} data files, and the manifest {files}"
            )
        places: dict[int, dict[str, int]] = {Kind.OBJECT: {}, Kind.STREAM: {}}
        rows = zip(directory.object_kinds(), directory.object_names(), directory.objects["file"], strict=True)
        for kind, key, file in rows:
            places[kind][directory.text(key)] = int(file)
        if sum(map(len, places.values())) != len(directory.objects):
            raise FormatError(f"{name} is damaged: it names an object or a stream twice")
        tensors = StoredTensors(directory, read, DecodedEntries() if known is None else known)
        return cls(tensors, places[Kind.OBJECT], places[Kind.STREAM])


class DecodedEntries(dict[str, TensorEntry]):
    """Decoded entries by key. A class, since weak references to a plain dict are not possible."""


class StoredTensors(Mapping[str, TensorEntry]):
    """A mapping that reads and decodes an entry at its first access."""

    def __init__(self, directory: Directory, read: ReadRanges, decoded: DecodedEntries) -> None:
        self.directory, self.read, self._decoded = directory, read, decoded
        self._misses = 0  # first accesses so far

    @functools.cached_property
    def _names(self) -> list[str]:
        return list(self._numbers)

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        """Key -> row. Made on demand, since merging many indexes does not need it."""
        names = [self.directory.text(name) for name in self.directory.key_names()]
        numbers = {key: number for number, key in enumerate(names)}
        if len(numbers) != len(names):
            raise FormatError(f"{self.directory.name} is damaged: it names a key twice")
        return numbers

    def __getitem__(self, key: str) -> TensorEntry:
        if key not in self._decoded:
            self._load_ahead(key)
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def describe(self, key: str) -> tuple[str, tuple[int, ...]]:
        """See Index.describe."""
        (row,) = self.directory.rows([self._numbers[key]])
        return self._dtype(row, key), row.global_shape

    def preload(self, keys: Iterable[str]) -> None:
        """See Index.preload."""
        self._load({k: self._numbers[k] for k in keys if k in self._numbers and k not in self._decoded})

    def _load_ahead(self, key: str) -> None:
        """Loads an entry; and those next to it, once so many were needed that all may be."""
        number = self._numbers[key]
        self._misses += 1
        if self._misses > _FEW_MISSES:
            last = min(number + _MOST_AHEAD, len(self._names))
            rows = self.directory.rows(list(range(number, last)))
            sizes = itertools.accumulate(row.stored_bytes for row in rows)
            count = sum(size <= _AHEAD_BYTES for size in sizes)
            # One of the others may be damaged, which is no fault of this one.
            with contextlib.suppress(FormatError, UnsupportedFormatError):
                self.preload(self._names[number : number + count])
        if key not in self._decoded:
            self._load({key: number})

    def _load(self, numbers: Mapping[str, int]) -> None:
        keys = sorted(numbers, key=numbers.__getitem__)
        rows = self.directory.rows([numbers[key] for key in keys])
        sections = self.read([(row.at, row.stored_bytes) for row in rows])
        name = self.directory.name
        groups: dict[int, tuple[list[TensorFacts], list[Words]]] = defaultdict(lambda: ([], []))
        for key, row, section in zip(keys, rows, sections, strict=True):
            described, columns = groups[len(row.global_shape)]
            described.append((key, self._dtype(row, key), row.global_shape, bool(row.flags & ENCODED)))
            columns.append(decode_section(section, row, f"{name}: the section of {key!r}"))
        for described, columns in groups.values():
            bounds = [0, *itertools.accumulate(part.shape[1] for part in columns)]
            joined = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
            self._decoded.update(_checked_entries(described, joined, bounds, self.directory.files, name))

    def _dtype(self, row: Row, key: str) -> str:
        """Returns a tensor's dtype, after checking its flags and its global shape."""
        name = self.directory.name
        if row.dtype_code not in DTYPE_NAMES or row.flags & ~ENCODED:
            raise UnsupportedFormatError(
                f"{name}: tensor {key!r} has the dtype code {row.dtype_code} and the flags {row.flags:#x}, "
                "which this release does not know: update this installation of megatron_datastates."
            )
        dtype = DTYPE_NAMES[row.dtype_code]
        # With 1 for 0: a size of 0 must not hide absurd ones beside it, whose products are strides.
        elements = math.prod(max(size, 1) for size in row.global_shape)
        if min(row.global_shape, default=0) < 0 or elements * DTYPES[dtype][1] >= _MAX_BYTES:
            raise FormatError(f"{name} is damaged: {key!r} cannot have the shape {row.global_shape}")
        return dtype


def _checked_entries(
    tensors: Sequence[TensorFacts], columns: Words, bounds: Sequence[int], files: int, name: str
) -> dict[str, TensorEntry]:
    """Returns entries by key, of tensors of d dimensions whose sections stand side by side in `columns`.

    All are checked at once: with thousands of small tensors, a loop takes a tenth of a second.

    Args:
        bounds: where each tensor's columns begin, and where the last one's end.

    Raises:
        FormatError: they cannot be true.
    """
    dims, counts = len(tensors[0][2]), np.diff(bounds)
    whole = np.array([shape for _, _, shape, _ in tensors], np.int64).reshape(len(tensors), dims)
    whole, encoded = np.repeat(whole, counts, axis=0), np.repeat([one[3] for one in tensors], counts)
    offsets, shapes = columns[:dims].view(np.int64).T, columns[dims : 2 * dims].view(np.int64).T
    inside = (
        ((offsets >= 0) & (shapes >= 0) & (offsets <= whole)).all(axis=1)
        # So no fragment is larger than its tensor, and its bytes fit 64 bits.
        & (shapes <= whole - offsets).all(axis=1)
        & (encoded | (columns[-1] >= HEADER_BYTES))
        & (columns[-1] < np.where(encoded, np.uint64(_MOST_ENTRIES), np.uint64(_MAX_BYTES)))
    )
    known = columns[-2] < files
    if not (inside & known).all():
        wrong = int((~(inside & known)).argmax())
        key, number = tensors[bisect.bisect_right(bounds, wrong) - 1][0], int(columns[-2][wrong])
        what = f"lies in data file {number}, expected a number below {files}"
        what = what if inside[wrong] else "does not fit its tensor"
        raise FormatError(f"{name} is damaged: a fragment of {key!r} {what}")
    item_bytes = np.repeat(np.array([DTYPES[one[1]][1] for one in tensors], np.uint64), counts)
    sizes, numbers = np.prod(shapes, axis=1, dtype=np.uint64) * item_bytes, columns[-2].astype(np.uint32)
    parts = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
    return {
        key: TensorEntry(
            dtype, shape, offsets[at], shapes[at], numbers[at], columns[-1][at], sizes[at], is_encoded
        )
        for (key, dtype, shape, is_encoded), at in zip(tensors, parts, strict=True)
    }


def build_index(
    entries: Iterable[tuple[Fragment, Extent]],
    objects: Mapping[str, int],
    streams: Mapping[str, int] | None = None,
    encoded: Collection[str] = (),
) -> Index:
    """Returns the index of these fragments, and of objects and streams, given as key -> data file.

    Args:
        encoded: keys of tensors whose extents have the number of an entry in place of an offset.

    Raises:
        FormatError: two fragments of one key disagree on dtype or global shape.
    """
    grouped: dict[str, list[tuple[Fragment, Extent]]] = {}
    for fragment, extent in entries:
        grouped.setdefault(fragment.key, []).append((fragment, extent))
    tensors = {key: _entry(key, group, key in encoded) for key, group in grouped.items()}
    return Index(tensors, dict(objects), dict(streams or {}))


def _entry(key: str, group: Sequence[tuple[Fragment, Extent]], encoded: bool) -> TensorEntry:
    first = group[0][0]
    for fragment, _ in group:
        one, other = (first.dtype, first.global_shape), (fragment.dtype, fragment.global_shape)
        if one != other:
            raise FormatError(
                f"shards of {key!r} disagree: {one[0]} of global shape {one[1]}, and {other[0]} of {other[1]}"
            )
    dims = len(first.global_shape)
    return TensorEntry(
        first.dtype,
        first.global_shape,
        np.array([f.offset for f, _ in group], np.int64).reshape(len(group), dims),
        np.array([f.shape for f, _ in group], np.int64).reshape(len(group), dims),
        np.array([e.file for _, e in group], np.uint32),
        np.array([e.offset for _, e in group], np.uint64),
        np.array([e.bytes for _, e in group], np.uint64),
        encoded,
    )


def merge_indexes(parts: Iterable[tuple[Index, int]]) -> Index:
    """Returns the index of a checkpoint, given ranks' own indexes and the position of each rank's data file.

    It sorts the tables of all ranks at once: with many ranks, a loop over ranks and keys takes minutes.

    Raises:
        FormatError: ranks disagree on a tensor's dtype or global shape, or on whether it is encoded, or store
            one object or stream twice.
    """
    plain = [(_plain(index), file) for index, file in parts]
    places = _merge_objects(plain)
    rows = Rows.of(plain)
    order = np.argsort(rows.ids, kind="stable")  # by key, and within a key in the order of the parts
    rows.check_consistent(order)
    files = max((file for _, file in plain), default=-1) + 1
    tensors: dict[str, TensorEntry] = {}
    for dims in np.unique(rows.ndim).tolist():
        mine = order[rows.ndim[order] == dims]
        columns, firsts = rows.columns(mine, dims), np.flatnonzero(np.diff(rows.ids[mine], prepend=-1))
        bounds = [*starts(rows.counts[mine])[firsts].tolist(), columns.shape[1]]
        described = [rows.describe(row) for row in mine[firsts].tolist()]
        tensors |= _checked_entries(described, columns, bounds, files, "the layout of all ranks")
    return Index(tensors, places[Kind.OBJECT], places[Kind.STREAM])


def _plain(index: Index) -> Directory:
    """Returns the directory of an index of which no section is packed, with its sections."""
    tensors = index.tensors
    if isinstance(tensors, StoredTensors) and tensors.directory.is_plain() and tensors.directory.sections:
        return tensors.directory
    data = index.encode()
    return Directory(data, "an index", len(data))


def _merge_objects(parts: Iterable[tuple[Directory, int]]) -> dict[int, dict[str, int]]:
    """Returns the data files of objects and of streams by key, for each kind."""
    found: dict[int, dict[str, int]] = {Kind.OBJECT: {}, Kind.STREAM: {}}
    for directory, file in parts:
        for kind, name in zip(directory.object_kinds(), directory.object_names(), strict=True):
            key, known = directory.text(name), found[kind]
            if key in known:
                what = Kind(kind).name.lower()
                raise FormatError(
                    f"{what} {key!r} is stored by two ranks, in the data files {known[key]} and {file}: put "
                    "the rank into the key, or yield it on one rank only"
                )
            known[key] = file
    return found


def index_name(sha256: str) -> str:
    """Returns the file name of an index without a save id, given the SHA-256 of its directory."""
    return f"index-{sha256[:32]}"


def index_entry(encoded: bytes) -> IndexEntry:
    """Returns a manifest's entry for an index, given its bytes."""
    directory = Directory(encoded, "the index", len(encoded)).bytes
    sha256 = hashlib.sha256(encoded[:directory]).hexdigest()
    return IndexEntry(index_name(sha256), len(encoded), directory, sha256)


def similar_keys(key: str, keys: Iterable[str]) -> str:
    """Returns keys that are like one that is not there, as the end of a message; empty if there are none."""
    names, tail = list(keys), key.rsplit(".", 2)[-2:]
    close = [name for name in names if name.rsplit(".", 2)[-2:] == tail][:_MOST_SIMILAR]
    if not close and len(names) <= _MOST_COMPARED:
        close = difflib.get_close_matches(key, names, _MOST_SIMILAR, 0.75)
    return f" (it has {' and '.join(map(repr, close))})" if close else ""
