"""The index of tensors: where every fragment of every tensor lies.

A rank's *own index* describes its data file alone, as number 0, with nothing packed. Ranks exchange own
indexes when a layout is new, and the layout digest in a footer is that of the rank's own index. Rank 0
merges them into the index of the checkpoint, from which `own_index` makes each of them again. The file is
named after the digest of its directory, which has those of all its sections, so it never changes in place. A
reader reads the directory whole, and the fragments of a key on demand.

Belongs here: an index as a whole, its bytes, and its name. Does not belong here: one tensor
(tensor_entry.py), sections that are read on demand (stored_entries.py), joining those of ranks (merging.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from megatron_datastates.errors import FormatError, MissingKeyError, similar_keys
from megatron_datastates.format.manifest import IndexEntry
from megatron_datastates.format.stored_entries import DecodedEntries, ReadRanges, StoredTensors
from megatron_datastates.format.tables import ENCODED, Directory, encode_section, encode_tables
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.format.values import DTYPES, FORMAT_VERSION, Extent, Fragment


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
                files = np.zeros(len(mine), np.uint32)
                tensors[key] = dataclasses.replace(entry.take(mine), files=files)
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


def index_name(sha256: str) -> str:
    """Returns the file name of an index without a save id, given the SHA-256 of its directory."""
    return f"index-{sha256[:32]}"


def index_entry(encoded: bytes) -> IndexEntry:
    """Returns a manifest's entry for an index, given its bytes."""
    directory = Directory(encoded, "the index", len(encoded)).bytes
    sha256 = hashlib.sha256(encoded[:directory]).hexdigest()
    return IndexEntry(index_name(sha256), len(encoded), directory, sha256)
