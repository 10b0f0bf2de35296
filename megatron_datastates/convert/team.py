"""The processes of one conversion: alone, or ranks that torchrun started. They do steps together, or none."""

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
    """Alone where torch.distributed is not initialized."""

    def __init__(self) -> None:
        self._together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self._together else 0
        self.size = dist.get_world_size() if self._together else 1

    def every_told(self, step: Callable[[], T]) -> list[T]:
        """What each rank's step gives, on all ranks. An error of any is raised on all.

        Raises:
            what the step raises, on its own rank; DataStatesError with the same text on the others.
        """
        if not self._together:
            return [step()]
        error: Exception | None = None
        value: Any = None
        try:
            value = step()
        except Exception as raised:
            error = raised
        told = gather_objects((None if error is None else f"{type(error).__name__}: {error}", value))
        if error is not None:
            raise error
        for rank, (text, _) in enumerate(told):
            if text is not None:
                raise DataStatesError(f"rank {rank}: {text}")
        return [given for _, given in told]

    def every(self, step: Callable[[], T]) -> T:
        """Each rank's own."""
        kept: list[T] = []
        self.every_told(lambda: kept.append(step()))
        return kept[0]

    def first(self, step: Callable[[], T]) -> T:
        """Done by rank 0 while the others wait; all have what it gives."""
        return self.every_told(lambda: step() if self.rank == 0 else None)[0]  # type: ignore[return-value]


@contextmanager
def team_of_torchrun() -> Iterator[Team]:
    """All ranks that torchrun started, if it did."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield Team()
        return
    dist.init_process_group("gloo", timeout=_LONGEST_STEP)
    try:
        yield Team()
    finally:
        dist.destroy_process_group()
