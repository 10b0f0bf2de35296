"""The tensors of an index that was read: each is decoded, and checked, when somebody asks for it.

Belongs here: the way from sections to entries that can be true. Does not belong here: the bytes of a
section (tables.py); objects and streams, which the directory has whole (index.py).
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from megatron_datastates.errors import FormatError, UnsupportedFormatError
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.tables import ENCODED, Directory, Row, Words, decode_section
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.format.values import DTYPE_NAMES, DTYPES

_MAX_BYTES = 1 << 62  # of a tensor, and of a file: sums and products of offsets stay within 64 bits
_MOST_ENTRIES = 1 << 32  # of a footer
# An access to an entry that is not decoded yet reads those that follow, too, after so many accesses, so many
# entries and so many bytes at most: one by one, each opens the file.
_FEW_MISSES, _MOST_AHEAD, _AHEAD_BYTES = 8, 64, 64 << 10
TensorFacts = tuple[str, str, tuple[int, ...], bool]  # key, dtype, global shape, whether it is encoded
# Yields the bytes of each range (offset, size) of the index file. The ranges are in the order of the file.
ReadRanges = Callable[[Sequence[tuple[int, int]]], Iterable[bytes]]


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
        """Key -> row."""
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
            self._decoded.update(checked_entries(described, joined, bounds, self.directory.files, name))

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


def checked_entries(
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
