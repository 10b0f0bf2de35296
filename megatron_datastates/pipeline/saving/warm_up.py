"""Staging memory that is ready before the first save asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.staging import StagingEngine

logger = logging.getLogger(__name__)
# For header, tail and gaps between tensors. A save that lacks them allocates them while its copies run.
_SLOTS_BESIDE = 4
_FIRST_FENCES = 8  # at which staging memory is prepared; about two optimizer steps


class AtFirstFences:
    """Waits at the first fences, as a save would, to allocate the memory that the first save will need.

    By its first step, a program that uses CUDA has initialized it: the staging memory is page-locked then. At
    later fences the pool grows to `shard_bytes`, within the budget: optimizers create their states in their
    first step, one after another.
    """

    def __init__(self, engine: StagingEngine, is_locked: bool, shard_bytes: Callable[[], int]) -> None:
        self._engine = engine
        self._is_locked = is_locked
        self._shard_bytes = shard_bytes
        self._fences_seen = 0

    def fence(self, reason: str) -> None:
        self._prepare(has_stepped=self._fences_seen > 0)

    def mark_torn(self, reason: str) -> None:
        self._prepare(has_stepped=True)

    def _prepare(self, *, has_stepped: bool) -> None:
        engine = self._engine
        self._fences_seen += 1
        try:
            self._is_locked = self._is_locked or engine.page_lock()
            if not self._is_locked or engine.options.staging_memory:
                return
            if has_stepped and (tensors := self._shard_bytes()):
                engine.grow(tensors + _SLOTS_BESIDE * engine.slot_bytes)
            if self._fences_seen < _FIRST_FENCES:
                FENCE.add(self)
        except Exception as error:  # the first save tries again, and fails on all ranks if it cannot
            logger.warning("staging memory was not allocated before the first save: %s", error)
