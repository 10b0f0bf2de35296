"""Layouts that were saved before: each rank's own index, and the merged index of a checkpoint.

What belongs here: keeping and merging indexes, and ranks' lists of state providers, in memory. What does not:
sending and writing them (publication.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import threading
from collections import ChainMap
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from megatron_datastates.errors import FormatError
from megatron_datastates.format.index import Index, index_entry
from megatron_datastates.format.manifest import IndexEntry, ProviderEntry
from megatron_datastates.format.merging import merge_indexes
from megatron_datastates.format.tables import Directory
from megatron_datastates.pipeline.saving.records import Records
from megatron_datastates.plan.coverage import coverage_faults
from megatron_datastates.threads import BackgroundThread

_KEPT_INDEXES = 2  # persistent and non-persistent saves alternate
_ANY_FILES = 1 << 31  # more data files than a checkpoint has
_SPARE_BYTES = 64 << 20  # of indexes that rank 0 keeps beside what a save needs
_SPARE_SAVES = 4  # and how many times that
_KEPT_NEAR = 4  # while other saves are published, an index that a rank counts on must not be forgotten


@dataclasses.dataclass(frozen=True)
class MergedIndex:
    """The index of a checkpoint, as it is stored."""

    entry: IndexEntry
    encoded: bytes


class LayoutStore:
    """The layouts that rank 0 knows, so that a save with a known one gathers, merges and hashes nothing.

    Every rank keeps the digests of its own layouts and lists of providers; rank 0 keeps all ranks' indexes,
    all lists, and the last merged indexes.

    Structures may change in every save, and training goes on for weeks. So when rank 0 has too many indexes,
    all ranks `forget` at once what they know, and an *epoch* ends: from then on they send what they use
    again. Saves under way rely on what they knew before, so rank 0 keeps the indexes of the last epoch, too,
    and ends the next one only when those saves are over.

    Args:
        publishing: the lock of this process, if it has several of these, one for each world.
    """

    def __init__(self, publishing: threading.Lock | None = None) -> None:
        self.known: set[bytes] = set()
        self.epoch = 0
        self._uses: dict[int, int] = {}  # saves under way that rely on what was known, by epoch
        self._bytes = 0  # of the indexes and lists of this epoch
        self._needed_bytes = 0  # of the indexes of the largest save
        # One at a time: a save removes what earlier ones of its process have left, and must not do so between
        # the check and the rename of one of them.
        self.publishing = publishing or threading.Lock()
        self.publisher: BackgroundThread | None = None  # of the last save: the next one's follows it
        # The indexes of the last saves that were published near (near/), by digest and the ranks that
        # store them; on rank 0 and those ranks.
        self._near: dict[tuple[str, tuple[int, ...]], bytes] = {}
        # Of this epoch and of the last one; one list of providers for all ranks that have the same.
        self._parts: ChainMap[tuple[int, bytes], bytes] = ChainMap({}, {})
        self._providers: ChainMap[bytes, list[ProviderEntry]] = ChainMap({}, {})
        self._merged: dict[tuple[tuple[int, bytes], ...], MergedIndex] = {}
        self._last: dict[Path, MergedIndex] = {}  # of the last checkpoint, by the directory of the run

    def begin_use(self) -> int:
        """Notes that a save relies on what is known; returns the epoch, for `end_use`."""
        with _lock:
            self._uses[self.epoch] = self._uses.get(self.epoch, 0) + 1
            return self.epoch

    def end_use(self, epoch: int, digests: Iterable[bytes]) -> None:
        """Notes that the save is over, and that rank 0 knows these digests of this rank from now on."""
        with _lock:
            self._uses[epoch] -= 1
            if epoch == self.epoch:
                self.known.update(digests)

    def should_forget(self) -> bool:
        """Returns whether rank 0 has too many indexes, and no save relies on those of the last epoch."""
        with _lock:
            is_free = not any(count for epoch, count in self._uses.items() if epoch != self.epoch)
            needed = self._needed_bytes
            return is_free and 0 < needed < (self._bytes - _SPARE_BYTES) / _SPARE_SAVES

    def forget(self, epoch: int | None) -> None:
        """Ends this epoch, if it is the current one. On all ranks in the same poll."""
        with _lock:
            if epoch != self.epoch:  # saves that began in one epoch end it once
                return
            self.known.clear()
            self._uses = {epoch: count for epoch, count in self._uses.items() if count}
            self.epoch += 1
            self._bytes = 0
            self._parts = ChainMap({}, self._parts.maps[0])
            self._providers = ChainMap({}, self._providers.maps[0])

    def add(self, rank: int, digest: bytes, index: bytes) -> None:
        """Stores the own index of one of a rank's data files, on rank 0."""
        with _lock:
            self._bytes += len(index) - len(self._parts.maps[0].get((rank, digest), b""))
            self._parts[rank, digest] = index

    def add_providers(self, digest: bytes, encoded: bytes) -> None:
        """Stores the list of a rank's state providers, on rank 0."""
        decoded = _PROVIDERS.decode(encoded)
        with _lock:
            if digest not in self._providers.maps[0]:
                self._bytes += len(encoded)
            self._providers[digest] = decoded

    def providers(self, records: Records) -> list[ProviderEntry]:
        """Returns the providers of all ranks; of one that several have, what the first of them says."""
        found: dict[str, ProviderEntry] = {}
        for digest in records.providers_digests():
            for provider in self._providers[digest]:
                found.setdefault(provider.name, provider)
        return list(found.values())

    def merged(self, records: Records) -> MergedIndex:
        """Returns the index of a checkpoint with the data files of these records.

        Raises:
            FormatError: ranks disagree on a tensor, or their fragments leave holes in it or overlap.
        """
        wanted = tuple(records.layouts())
        found = self._merged.pop(wanted, None) or self._merge(wanted)
        kept = list(self._merged.items())[1 - _KEPT_INDEXES :]
        self._merged = dict([*kept, (wanted, found)])
        return found

    def left_out(self, run: Path, index: MergedIndex) -> list[str]:
        """Returns the tensors that this run's checkpoint before had and this one lacks, on rank 0.

        That ranks' parts fit together does not show it if no rank has stored a tensor.
        """
        before = self._last.pop(run, index)
        self._last = dict([*list(self._last.items())[1 - _KEPT_INDEXES :], (run, index)])
        if before.encoded == index.encoded:
            return []
        had, has = (Index.decode(one.encoded, "an index", _ANY_FILES).tensors for one in (before, index))
        return sorted(had.keys() - has.keys())

    def near_index(self, digest: str, ranks: tuple[int, ...]) -> bytes | None:
        """Returns the index that these ranks have stored near; None if they do not know it any more."""
        return self._near.get((digest, ranks))

    def keep_near_index(self, digest: str, ranks: tuple[int, ...], index: bytes) -> None:
        """Remembers an index that all of these ranks have."""
        kept = [item for item in self._near.items() if item[0] != (digest, ranks)]
        self._near = dict([*kept[1 - _KEPT_NEAR :], ((digest, ranks), index)])

    def _merge(self, wanted: tuple[tuple[int, bytes], ...]) -> MergedIndex:
        parts = [(key[0], self._parts[key]) for key in wanted]
        # Of the largest one: were it of the last one, a small save would have all ranks forget a large one.
        self._needed_bytes = max(self._needed_bytes, sum(len(index) for _, index in parts))
        return merge_layouts(parts)


_lock = threading.RLock()  # of what stores know; a signal handler may save in the middle


def _unlock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)  # a thread of the parent may hold it
_PROVIDERS = msgspec.json.Decoder(list[ProviderEntry])


def encode_providers(providers: Sequence[ProviderEntry]) -> tuple[bytes, bytes]:
    """Returns the digest of a rank's list of state providers, and the list as it is sent to rank 0."""
    encoded = msgspec.json.encode(providers)
    return hashlib.sha256(encoded).digest()[:16], encoded


def merge_layouts(parts: Iterable[tuple[int, bytes]]) -> MergedIndex:
    """Merges the own indexes of ranks, each (rank, index), in the order of the data files.

    Raises:
        FormatError: as LayoutStore.merged.
    """
    whole = merge_indexes(Directory(data, f"the layout of rank {rank}", len(data)) for rank, data in parts)
    found = (fault for key, entry in whole.tensors.items() for fault in coverage_faults(key, entry))
    faults = list(itertools.islice(found, 3))
    if faults:
        raise FormatError(f"the state of all ranks together has holes or overlaps: {'; '.join(faults)}")
    encoded = whole.encode(packed=True)
    return MergedIndex(index_entry(encoded), encoded)
