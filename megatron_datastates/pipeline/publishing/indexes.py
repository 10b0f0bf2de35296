"""What the ranks send to rank 0 of their own layouts: their indexes, and their lists of state providers.

What belongs here: one rank's part of that exchange in one save, and what rank 0 stores of it. What does not:
keeping and merging (layouts.py), and when anything is sent (publication.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import DataStatesError
from megatron_datastates.flag import Flag
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.publishing.collectives import Collectives, PollableResult
from megatron_datastates.pipeline.publishing.layouts import LayoutStore, encode_providers
from megatron_datastates.pipeline.saving.rank_save import RankSave
from megatron_datastates.pipeline.saving.records import RankContribution, Records
from megatron_datastates.plan.layout import Layout

_LOOK_SECONDS = 0.002
PATIENCE_SECONDS = 10.0  # how long indexes are awaited once the save is abandoned or has failed


class IndexExchange:
    """The indexes and lists of providers that one save sends to rank 0, which keeps those it has had.

    The trainer's thread requests and looks, because no other thread may touch collective calls
    (PollableResult); rank 0's publishing thread waits and stores.
    """

    def __init__(self, save: RankSave, layouts: LayoutStore) -> None:
        self._save, self._layouts = save, layouts
        self._pending: PollableResult[list[bytes]] | None = None
        self._arrived = Flag()

    # -- what this rank has -----------------------------------------------------------------------------

    @property
    def own(self) -> list[Layout]:
        """The layouts of this rank's data files, in the order of groups."""
        return self._save.plan.layouts() if self._save.plan is not None else []

    @functools.cached_property
    def providers(self) -> tuple[bytes, bytes]:
        """The digest of this rank's list of state providers, and the list."""
        return encode_providers(self._save.tail.providers())

    def digests(self) -> list[bytes]:
        """Returns the digests of all that this rank has: once the save is published, rank 0 knows them."""
        return [self.providers[0], *(layout.digest for layout in self.own)]

    def unknown_bytes(self) -> tuple[list[int], int]:
        """Returns the bytes of own indexes and of the list of providers; 0 for what rank 0 has already."""
        digest, listed = self.providers
        known = self._layouts.known
        indexes = [0 if layout.digest in known else len(layout.index) for layout in self.own]
        return indexes, 0 if digest in known else len(listed)

    def _parts(self, sent_bytes: Sequence[int]) -> bytes:
        *sizes, listed = sent_bytes
        indexes = [layout.index for layout, size in zip(self.own, sizes, strict=False) if size]
        return b"".join([*indexes, self.providers[1] if listed else b""])

    # -- the trainer's thread ---------------------------------------------------------------------------

    def start(self, collectives: Collectives, sizes: npt.NDArray[np.int64]) -> None:
        """Starts gathering on rank 0. Collective.

        Args:
            sizes: what the records of all ranks say that they send. That counts: another save may have made
                a layout known since.
        """
        own = self._parts(sizes[collectives.rank].tolist())
        self._pending = collectives.gather_to_first(own, sizes.sum(axis=1))
        self.look()

    def look(self) -> None:
        """Notices that everything has arrived."""
        if self._pending is not None and self._pending.is_over():
            self._arrived.set()

    # -- rank 0's publishing thread ---------------------------------------------------------------------

    def store(self, records: Records, is_over: Callable[[], bool]) -> None:
        """Waits for what was requested, and stores it.

        Args:
            is_over: whether no polls look for it any more: then waits PATIENCE_SECONDS at most.

        Raises:
            DataStatesError: it did not arrive in that time.
        """
        if self._pending is None:
            return
        patience = PATIENCE_SECONDS
        while not self._arrived.wait(_LOOK_SECONDS):
            if not is_over():
                continue  # the trainer's polls look for it
            if self._pending.is_over():
                break
            patience -= _LOOK_SECONDS
            if patience <= 0.0:
                raise DataStatesError(
                    f"the ranks' indexes did not arrive within {PATIENCE_SECONDS:g} s of the end of the save"
                )
        sizes, sent = records.sent_bytes(), self._pending.result()
        for rank in np.flatnonzero(sizes.any(axis=1)).tolist():
            record, data, (first, second, listed) = records[rank], sent[rank], sizes[rank].tolist()
            if first:
                self._layouts.add(record.rank, record.layout_digest, data[:first])
            if second:
                self._layouts.add(record.rank, record.stable_layout_digest, data[first : first + second])
            if listed:
                self._layouts.add_providers(record.providers_digest, data[first + second :])

    def store_contributions(
        self, records: Records, contributions: Sequence[RankContribution]
    ) -> dict[int, SaveId]:
        """Stores what another program has brought here; returns the save ids of the ranks' files."""
        written_as = {}
        for number, one in enumerate(contributions):
            record = records[number]
            for digest, index in zip(record.layouts(), one.indexes, strict=True):
                self._layouts.add(record.rank, digest, index)
            self._layouts.add_providers(record.providers_digest, one.providers)
            written_as[record.rank] = one.save_id
        return written_as
