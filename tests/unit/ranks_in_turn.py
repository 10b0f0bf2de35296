"""Checkpoints of several ranks, saved in one process: each rank has a saver and a data file of its own.

Everything but the messages between ranks is real. Ranks take turns, the last one first. What they send in
one turn is read in the next, when all have sent it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.runs.branches import Origin
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession
from megatron_datastates.providers.base import StateProvider
from tests.unit.states import OPTIONS

RUN_ID = 0x0123456789ABCDEF
Parts = defaultdict[tuple[str, int], dict[int, Any]]  # by kind and number of the call, each rank's part


class CollectivesInTurn:
    """Stands in for collectives.Collectives."""

    distributed = True

    def __init__(self, rank: int, size: int, parts: Parts) -> None:
        self.rank, self.size = rank, size
        self.calls: dict[str, int] = {}
        self._parts = parts

    def is_current(self) -> bool:
        return True

    def share_and_compare(self, value: int, digest: bytes) -> tuple[int, bool]:
        return RUN_ID, True  # ranks differ in what a test wants them to

    def start_sum(self, values: Sequence[int]) -> ResultInTurn:
        parts = self._contribute("sum", list(values))
        return ResultInTurn(lambda: [sum(values) for values in zip(*parts.values(), strict=True)])

    def start_gather(self, record: bytes) -> ResultInTurn:
        parts = self._contribute("gather", record)
        return ResultInTurn(lambda: b"".join(parts[rank] for rank in range(self.size)))

    def gather_to_first(self, data: bytes, sizes: Sequence[int]) -> ResultInTurn:
        """Returns all ranks' data on rank 0, which has the last turn: all others have called this."""
        parts = self._contribute("gather layouts", data)
        return ResultInTurn(lambda: [parts[rank] for rank in range(self.size)] if self.rank == 0 else [])

    def send_from_first(self, data: bytes, size: int) -> ResultInTurn:
        parts = self._contribute("send small files", data)
        return ResultInTurn(lambda: parts[0])

    def _contribute(self, kind: str, value: Any) -> dict[int, Any]:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        parts = self._parts[kind, self.calls[kind]]
        parts[self.rank] = value
        return parts


class ResultInTurn:
    """A result that is read after all ranks' next turns."""

    def __init__(self, result: Callable[[], Any]) -> None:
        self.result = result

    def is_over(self) -> bool:
        return True


class RanksInTurn:
    """The ranks of one run.

    Args:
        own: options of single ranks, by rank.
        changes: options that differ from OPTIONS.
    """

    def __init__(self, size: int, own: Sequence[Mapping[str, Any]] = (), **changes: Any) -> None:
        parts: Parts = defaultdict(dict)
        self.far: list[SaveId] = []  # in the order in which rank 0's near tier reported them
        self.savers = []
        for rank in range(size):
            options = dataclasses.replace(OPTIONS, **changes, **(own[rank] if own else {}))
            self.savers.append(Saver(options, self._session(rank, size, parts)))

    @staticmethod
    def _session(rank: int, size: int, parts: Parts) -> SaveSession:
        session = SaveSession()
        session.begin_world(CollectivesInTurn(rank, size, parts))  # type: ignore[arg-type]
        return session

    def save(
        self, directory: Path, states: Sequence[StateProvider], origin: Origin | None = None
    ) -> Publication:
        """Saves each rank's state and waits for the outcome; returns rank 0's publication."""
        pairs, extras = zip(self.savers, states, strict=True), PublicationExtras(origin=origin)
        publications = [
            saver.start(directory, state, extras=extras, far_published=self.note_far)
            for saver, state in pairs
        ]
        while publications[0].outcome is Outcome.PENDING:
            for publication in reversed(publications):
                publication.poll()
            time.sleep(0.001)
        for publication in publications:
            publication.join()
        return publications[0]

    def note_far(self, save_id: SaveId, is_retried: bool) -> None:
        self.far.append(save_id)

    def close(self) -> None:
        for saver in self.savers:
            saver.close()
