"""The tables of many indexes as one table for numpy: a loop over many ranks and their keys takes minutes.

Belongs here: the rows of several directories, and their sections. Does not belong here: merging (merging.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import FormatError
from megatron_datastates.format.tables import ENCODED, KEY, Directory, Words, column_count, starts
from megatron_datastates.format.values import DTYPE_NAMES


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of several directories and their sections. Arrays have one item per row."""

    names: list[bytes]  # of all keys, in the order of their numbers
    ids: npt.NDArray[np.int64]  # the key's number
    ndim: npt.NDArray[np.uint8]
    dtypes: npt.NDArray[np.uint16]  # codes
    flags: npt.NDArray[np.uint8]
    counts: npt.NDArray[np.int64]  # fragments
    files: npt.NDArray[np.int64]  # ordinals of data files
    shape_starts: npt.NDArray[np.int64]  # where its global shape begins in `shapes`
    section_starts: npt.NDArray[np.int64]  # where its section begins in `words`
    shapes: npt.NDArray[np.int64]  # of all rows together, like `words`
    words: Words

    @classmethod
    def of(cls, directories: Sequence[Directory]) -> Rows:
        """Returns the rows of the directories of own indexes, which are in the order of the data files."""
        names, ids = _number_keys(directories)
        keys = np.concatenate([np.zeros(0, KEY), *(directory.keys for directory in directories)])
        lengths = [len(directory.keys) for directory in directories]
        words = [np.frombuffer(directory.sections, "<u8") for directory in directories]
        return cls(
            names,
            ids,
            keys["ndim"],
            keys["dtype"],
            keys["flags"],
            keys["fragments"].astype(np.int64),
            np.repeat(np.arange(len(directories)), lengths),
            starts(keys["ndim"]),
            starts(keys["stored_bytes"]) // 8,
            np.concatenate([np.zeros(0, np.int64), *(directory.shapes for directory in directories)]),
            np.concatenate([np.zeros(0, np.uint64), *words]),
        )

    def describe(self, row: int) -> tuple[str, str, tuple[int, ...], bool]:
        """Returns key, dtype, global shape, and whether its fragments are encoded."""
        at = int(self.shape_starts[row])
        shape = tuple(self.shapes[at : at + int(self.ndim[row])].tolist())
        key, dtype = self.names[self.ids[row]].decode(), DTYPE_NAMES[int(self.dtypes[row])]
        return key, dtype, shape, bool(self.flags[row] & ENCODED)

    def check_consistent(self, order: npt.NDArray[np.int64]) -> None:
        """Raises FormatError if two rows of one key, neighbours in `order`, differ in dtype or shape."""
        same = self.ids[order[1:]] == self.ids[order[:-1]]
        one, other = order[:-1][same], order[1:][same]
        wrong = (self.dtypes[one] != self.dtypes[other]) | (self.ndim[one] != self.ndim[other])
        wrong |= self.flags[one] != self.flags[other]
        for axis in range(int(self.ndim.max(initial=0))):
            has = np.flatnonzero(~wrong & (self.ndim[one] > axis))
            sizes = [self.shapes[self.shape_starts[rows[has]] + axis] for rows in (one, other)]
            wrong[has] = sizes[0] != sizes[1]
        if wrong.any():
            pair = [int(rows[wrong.argmax()]) for rows in (one, other)]
            key, one_text, other_text = self.describe(pair[0])[0], *map(self._described, pair)
            files = self.files[pair].tolist()
            raise FormatError(
                f"shards of {key!r} disagree: {one_text} from the rank of file {files[0]}, and {other_text} "
                f"from the rank of file {files[1]}"
            )

    def _described(self, row: int) -> str:
        _, dtype, shape, encoded = self.describe(row)
        return f"{'encoded ' if encoded else ''}{dtype} of global shape {shape}"

    def columns(self, rows: npt.NDArray[np.int64], dims: int) -> Words:
        """Returns the sections of these rows, which have `dims` dimensions each, as one table."""
        counts = self.counts[rows]
        steps = np.repeat(counts, counts)
        at = np.repeat(self.section_starts[rows] - starts(counts), counts) + np.arange(len(steps))
        columns = np.empty((column_count(dims), len(steps)), np.uint64)
        for column in columns:
            np.take(self.words, at, out=column, mode="clip")  # numpy's default mode buffers `out`
            at += steps
        columns[-2] = np.repeat(self.files[rows], counts)
        return columns


def _number_keys(directories: Sequence[Directory]) -> tuple[list[bytes], npt.NDArray[np.int64]]:
    """Returns all keys, and the number of its key for each row of all directories."""
    numbers: dict[bytes, int] = defaultdict(itertools.count().__next__)
    known: dict[tuple[memoryview, bytes], npt.NDArray[np.int64]] = {}  # many ranks have the same keys
    found = []
    for directory in directories:
        kind = directory.names, directory.keys["name_bytes"].tobytes()
        if kind not in known:
            known[kind] = np.array([numbers[name] for name in directory.key_names()], np.int64)
        found.append(known[kind])
    return list(numbers), np.concatenate([np.zeros(0, np.int64), *found])
