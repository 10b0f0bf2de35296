"""The processes of one conversion: one, or the ranks of torchrun, which succeed or fail together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron_datastates.errors import CorruptDataError, DataStatesError, is_damage
from megatron_datastates.pipeline.publishing.collectives import gather_objects

T = TypeVar("T")
_LONGEST_STEP = timedelta(days=7)  # a rank may have all the large files
_PUBLISHED_EVERY_SECONDS = 0.2


class TeamCount:
    """A count that all ranks add to while they work. Thread-safe.

    Args:
        store: of the ranks; None where there is one process.
        key: the same on all ranks, and of no other count.
    """

    def __init__(self, store: Store | None, key: str) -> None:
        self._store, self._key = store, key
        self._lock = threading.Lock()
        self._own = self._pending = 0  # guarded by the lock
        self._published_at = 0.0  # likewise

    def add(self, count: int) -> None:
        """Adds to the count; other ranks see that a moment later."""
        with self._lock:
            self._own += count
            self._pending += count
            if time.monotonic() - self._published_at >= _PUBLISHED_EVERY_SECONDS:
                self._publish()

    def total(self) -> int:
        """Returns the count of all ranks, as far as they have published it."""
        with self._lock:
            return self._own if self._store is None else self._publish()

    def _publish(self) -> int:
        """Publishes what this rank has added; returns the sum over all ranks."""
        pending, self._pending = self._pending, 0
        self._published_at = time.monotonic()
        return 0 if self._store is None else self._store.add(self._key, pending)


class Team:
    """The ranks of torch.distributed, or this process alone where that is not initialized."""

    def __init__(self, store: Store | None = None) -> None:
        """Args: store: shared by the ranks; without it, each rank counts its own work only."""
        self._store, self._counts = store, 0
        self._together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self._together else 0
        self.size = dist.get_world_size() if self._together else 1

    def new_count(self) -> TeamCount:
        """Returns a count of all ranks. Each has to ask for its counts in the same order."""
        self._counts += 1
        return TeamCount(self._store, f"count {self._counts}")

    def gather(self, step: Callable[[], T]) -> list[T]:
        """Runs a step on every rank and returns all results, by rank. Any rank's error is raised on all.

        Raises:
            DataStatesError: the step failed on another rank; the message has that rank and its error. A
                CorruptDataError if that says that a checkpoint is damaged.
            what the step raises, on the rank where it failed.
        """
        if not self._together:
            return [step()]
        error: Exception | None = None
        value: Any = None
        try:
            value = step()
        except Exception as raised:
            error = raised
        failure = None if error is None else (f"{type(error).__name__}: {error}", is_damage(error))
        outcomes = gather_objects((failure, value))
        if error is not None:
            raise error
        for rank, (failed, _) in enumerate(outcomes):
            if failed is not None:
                text, damaged = failed
                # The same exit code on all ranks: launchers report that of the rank that ends first.
                cls = CorruptDataError if damaged else DataStatesError
                raise cls(f"the conversion failed on rank {rank}: {text}")
        return [result for _, result in outcomes]

    def on_every_rank(self, step: Callable[[], T]) -> T:
        """Runs a step on every rank and returns this rank's result, which is not sent. Raises as `gather`."""
        kept: list[T] = []
        self.gather(lambda: kept.append(step()))
        return kept[0]

    def on_rank_zero(self, step: Callable[[], T]) -> T:
        """Runs a step on rank 0 while the others wait; returns its result on all. Raises as `gather`."""
        return self.gather(lambda: step() if self.rank == 0 else None)[0]  # type: ignore[return-value]


@contextmanager
def team_of_torchrun() -> Iterator[Team]:
    """Yields the team of all ranks that torchrun started, or of this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield Team()
        return
    store, rank, size = next(rendezvous("env://", timeout=_LONGEST_STEP))
    own = PrefixStore("datastates", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=_LONGEST_STEP)
    try:
        yield Team(PrefixStore("progress", store))
    finally:
        dist.destroy_process_group()
