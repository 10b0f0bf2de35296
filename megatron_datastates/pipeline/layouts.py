"""Layouts that were saved before: each rank's own index, and the merged index of a checkpoint.

What belongs here: keeping and merging indexes in memory. What does not: sending and writing them
(publication.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterable

from megatron_datastates.errors import FormatError
from megatron_datastates.format.index import Index, index_entry, merge_indexes
from megatron_datastates.format.manifest import IndexEntry
from megatron_datastates.pipeline.records import RankRecord
from megatron_datastates.plan.coverage import coverage_faults

_KEPT_INDEXES = 2  # persistent and non-persistent saves alternate


@dataclasses.dataclass(frozen=True)
class MergedIndex:
    """The index of a checkpoint, as it is stored."""

    entry: IndexEntry
    encoded: bytes


class LayoutStore:
    """The layouts that rank 0 knows, so that a save with a known one gathers, merges and hashes nothing.

    Every rank keeps the digests of its own layouts; rank 0 keeps all ranks' indexes and the last merged ones.
    """

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        # One at a time: a save removes what earlier ones of its process have left, and must not do so between
        # the check and the rename of one of them.
        self.publishing = threading.Lock()
        self._parts: dict[tuple[int, bytes], bytes] = {}
        self._merged: dict[tuple[tuple[int, bytes], ...], MergedIndex] = {}

    def add(self, rank: int, digest: bytes, index: bytes) -> None:
        """Stores the own index of one of a rank's data files, on rank 0."""
        self._parts[rank, digest] = index

    def merged(self, records: list[RankRecord]) -> MergedIndex:
        """Returns the index of a checkpoint with the data files of these records.

        Raises:
            FormatError: ranks disagree on a tensor, or their fragments leave holes in it or overlap.
        """
        wanted = tuple((record.rank, digest) for record in records for digest in record.layouts())
        found = self._merged.pop(wanted, None) or self._merge(wanted)
        kept = list(self._merged.items())[1 - _KEPT_INDEXES :]
        self._merged = dict([*kept, (wanted, found)])
        return found

    def _merge(self, wanted: tuple[tuple[int, bytes], ...]) -> MergedIndex:
        return merge_layouts((key[0], self._parts[key]) for key in wanted)


def merge_layouts(parts: Iterable[tuple[int, bytes]]) -> MergedIndex:
    """Merges the own indexes of ranks, each (rank, index), in the order of the data files.

    Raises:
        FormatError: as LayoutStore.merged.
    """
    indexes = (Index.decode(data, f"the layout of rank {rank}", 1) for rank, data in parts)
    whole = merge_indexes((part, file) for file, part in enumerate(indexes))
    found = (fault for key, entry in whole.tensors.items() for fault in coverage_faults(key, entry))
    faults = list(itertools.islice(found, 3))
    if faults:
        raise FormatError(f"the state of all ranks together has holes or overlaps: {'; '.join(faults)}")
    encoded = whole.encode(packed=True)
    return MergedIndex(index_entry(encoded), encoded)
