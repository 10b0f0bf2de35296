"""Timed saves of host tensors, and how much of everything the benchmark saves."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.saves import Saves, expect_published
from benchmarks.states import host_tensors, lazy
from megatron_datastates.config import GIB, KIB, MIB, Options
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.providers.base import StateProvider
from megatron_datastates.providers.tensors import TensorProvider

POOL_BYTES = 256 * MIB
_POLL_SECONDS = 0.0005


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is saved, and how often."""

    bytes: int  # of the large state
    repeats: int  # rounds of a comparison of long saves; shorter ones have more
    counts: tuple[int, ...] = (10, 1_000, 100_000)  # tensors, or spans of one, when a start is timed
    tensor_sizes: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB)  # of 1,000 tensors whose start is timed
    start_pool_bytes: int = 2 * GIB  # staging memory while a start is timed: more than any of these states
    tiny_tensors: int = 100_000  # of 4 KiB
    traffic_bytes: int = GIB  # that another core copies without end
    sweep_bytes: int = 2 * GIB


def quick() -> Sizes:
    """Returns sizes for a try that takes seconds, and whose figures mean little."""
    return Sizes(
        bytes=64 * MIB,
        repeats=1,
        counts=(10, 100, 1_000),
        tensor_sizes=(4 * KIB,),
        start_pool_bytes=POOL_BYTES,
        tiny_tensors=1_000,
        traffic_bytes=64 * MIB,
        sweep_bytes=64 * MIB,
    )


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one save: of the fence itself, all others since the save was asked for."""

    start: float
    fence: float
    durable: float
    published: float


class TimedSaves(Saves):
    """Times saves, and removes each when it is published."""

    def once(self, provider: StateProvider) -> Timing:
        """Saves once; raises RuntimeError if the save fails."""
        os.sync()  # or this save would pay for what was removed before
        begin = time.perf_counter()
        publication = self.start(provider)
        started = time.perf_counter()
        self.fence()
        fenced = time.perf_counter()
        durable = 0.0
        while publication.poll() is Outcome.PENDING:
            if publication.save.is_durable and not durable:
                durable = time.perf_counter()
            time.sleep(_POLL_SECONDS)
        expect_published(publication)
        end = time.perf_counter()
        publication.join()
        shutil.rmtree(publication.save.context.directory)
        return Timing(started - begin, fenced - started, (durable or end) - begin, end - begin)


@contextlib.contextmanager
def timed_saves(folder: Path, **options: Any) -> Iterator[TimedSaves]:
    """Yields saves with the given options, whose staging memory is being made; closes them at the end."""
    saves = TimedSaves(folder, Options(**({"staging_memory": POOL_BYTES} | options)))
    saves.saver.warm_up()
    try:
        yield saves
    finally:
        saves.close()


def large_state(size_bytes: int) -> TensorProvider:
    """Returns a state of tensors of 64 MiB, at least one."""
    return lazy(host_tensors(max(size_bytes // (64 * MIB), 1), 64 * MIB))
