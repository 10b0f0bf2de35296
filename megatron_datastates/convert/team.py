"""The processes of one conversion: one, or the ranks of torchrun, which succeed or fail together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_datastates.errors import DataStatesError
from megatron_datastates.pipeline.agreement import gather_objects

T = TypeVar("T")
_LONGEST_STEP = timedelta(days=7)  # a rank may have all the large files


class Team:
    """The ranks of torch.distributed, or this process alone where that is not initialized."""

    def __init__(self) -> None:
        self._together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self._together else 0
        self.size = dist.get_world_size() if self._together else 1

    def gather(self, step: Callable[[], T]) -> list[T]:
        """Runs a step on every rank and returns all results, by rank. Any rank's error is raised on all.

        Raises:
            DataStatesError: the step failed on another rank; the message has that rank and its error.
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
        outcomes = gather_objects((None if error is None else f"{type(error).__name__}: {error}", value))
        if error is not None:
            raise error
        for rank, (text, _) in enumerate(outcomes):
            if text is not None:
                raise DataStatesError(f"the conversion failed on rank {rank}: {text}")
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
    dist.init_process_group("gloo", timeout=_LONGEST_STEP)
    try:
        yield Team()
    finally:
        dist.destroy_process_group()
