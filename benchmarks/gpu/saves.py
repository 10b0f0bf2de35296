"""Saves of device tensors, as the parts of benchmarks.gpu time them.

Every save uses the product's defaults, unless options say otherwise. `discard=True` leaves the disk out:
it drops what is written, and fails the save once the copies are done.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import megatron_datastates as ds
from benchmarks.gpu.device import Device
from benchmarks.gpu.environment import IS_FAKE
from benchmarks.gpu.memory import SEGMENT_BYTES
from benchmarks.saves import Saves, expect_published
from benchmarks.states import Tensors, lazy
from megatron_datastates.config import MIB
from megatron_datastates.pipeline.publication import Outcome, Publication

SMALL_POOL_BYTES = (64 if IS_FAKE else 256) * MIB
_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.002


class DeviceSaves(Saves):
    """Saves shards of a device into directories of their own.

    Args:
        staging_bytes: rounded up to whole segments; 0: the product's default.
        options: others than the product's defaults.
    """

    def __init__(self, device: Device, folder: Path, staging_bytes: int, **options: Any) -> None:
        self.staging_bytes = -(-staging_bytes // SEGMENT_BYTES) * SEGMENT_BYTES
        super().__init__(folder, device.options(staging_memory=self.staging_bytes, **options))
        self.slot_bytes = 0  # known once the pool is made

    def make_pool(self) -> dict[str, Any]:
        """Waits until all staging memory is page-locked, or until it is clear that it will not be.

        By default, staging memory grows with the first shard; then only what is made before that is waited
        for.
        """
        begin = time.perf_counter()
        self.saver.warm_up()
        engine = self.saver._get_engine()
        while True:
            facts, slots = engine.pool_facts(), int(engine.native.pool()["slots"])
            trouble = facts["staging_trouble"]
            if trouble or int(str(facts["page_locked_bytes"])) >= max(self.staging_bytes, 1):
                break
            _expect_in_time(begin, f"staging memory is not ready: {facts}")
            time.sleep(0.001)
        self.slot_bytes = int(str(facts["staging_bytes"])) // slots if slots else 0
        made = {"bytes": self.staging_bytes, "slot_bytes": self.slot_bytes}
        return made | {"seconds": time.perf_counter() - begin} | ({"trouble": trouble} if trouble else {})

    def start_shard(self, shard: Tensors) -> Publication:
        """Starts a save of tensors that stay as they are until the next fence."""
        return self.start(lazy(shard))

    def copied(self, shard: Tensors) -> dict[str, float]:
        """Saves, fences at once, and abandons the save when its copies are done; returns their seconds."""
        torch.cuda.synchronize()
        publication = self.start_shard(shard)
        self.fence()
        staging = _await_copies(publication)
        times = publication.save.times()
        self.discard(publication)
        return {"staging": staging, "slot_wait": times["slot_wait"]}

    def held(
        self,
        shard: Tensors,
        *,
        synchronize: bool,
        work: Callable[[], None] | None,
        watch: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Saves as a training loop does; returns the seconds that it held the loop, by part.

        "staging" has the seconds of the copies, which the loop does not wait for. The parts are the start, a
        synchronize (as Megatron's timers do), the first poll, the fence, what the stream waits after it, and
        all later polls. `work` lies between the first poll and the fence, and does not count.

        Args:
            shard: what is saved.
            synchronize: whether the device is synchronized after the start.
            work: the next forward and backward; None: the fence follows at once, with no poll before it.
            watch: called between polls.
        """
        torch.cuda.synchronize()
        parts: dict[str, float] = {"synchronize": 0.0, "first_poll": 0.0}
        with timed(parts, "start"):
            publication = self.start_shard(shard)
        if synchronize:
            with timed(parts, "synchronize"):
                torch.cuda.synchronize()
        if work is not None:
            with timed(parts, "first_poll"):
                publication.poll()
            work()
        stream = StreamTimer()
        with stream, timed(parts, "fence"):
            self.fence()
        staging = _poll_until_copied(publication, parts, watch)
        self.discard(publication)
        parts["stream_wait"] = max(stream.seconds() - parts["fence"], 0.0)  # what the host waited counts once
        return parts | {"held": sum(parts.values()), "staging": staging}

    def published(self, shard: Tensors) -> dict[str, float]:
        """Saves until the save is published, polling every 10 ms like a trainer with short steps.

        Reads the first and the last tensor back and compares them.
        """
        torch.cuda.synchronize()
        begin = time.perf_counter()
        publication = self.start_shard(shard)
        self.fence()
        fenced = polled = time.perf_counter() - begin
        while publication.outcome is Outcome.PENDING:
            _expect_in_time(begin, "the save does not end")
            time.sleep(0.01)
            before = time.perf_counter()
            publication.poll()
            polled += time.perf_counter() - before
        expect_published(publication)
        seconds = time.perf_counter() - begin
        publication.join()
        times = publication.save.times()
        _compare(publication.save.context.directory, shard)
        shutil.rmtree(publication.save.context.directory)
        return {
            "held": fenced,
            "held_with_polls": polled,
            "staging": times["staging"],
            "durable": times["durable"],
            "published": seconds,
        }


class StreamTimer:
    """Measures the time from entry to exit as the current stream sees it."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __enter__(self) -> None:
        self._begin.record()

    def __exit__(self, *exception: object) -> None:
        self._end.record()

    def seconds(self) -> float:
        """Waits for the stream, and returns the seconds."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


@contextlib.contextmanager
def timed(parts: dict[str, float], part: str) -> Iterator[None]:
    """Adds the seconds for which this is entered to a part."""
    begin = time.perf_counter()
    yield
    parts[part] = parts.get(part, 0.0) + time.perf_counter() - begin


def _compare(directory: Path, shard: Tensors) -> None:
    checkpoint = ds.open(directory)
    for key in (next(iter(shard)), next(reversed(shard))):
        if not torch.equal(checkpoint.read_tensor(key), shard[key].cpu()):
            raise RuntimeError(f"{directory}: {key} was not stored as it is in memory")


def _await_copies(publication: Publication) -> float:
    """Waits until no source is read any more; returns the engine's seconds since the save began."""
    begin = time.perf_counter()
    while not (staging := publication.save.times()["staging"]):
        publication.save.advance()
        _expect_copies(publication)
        _expect_in_time(begin, "the copies do not end")
        time.sleep(0.0005)
    publication.save.advance()  # drops the sources
    return staging


def _poll_until_copied(publication: Publication, parts: dict[str, float], watch: Callable[[], None]) -> float:
    """Polls until no source is read any more; returns the engine's seconds of the copies."""
    parts["polls"] = staging = 0.0
    begin = time.perf_counter()
    while not staging:
        staging = publication.save.times()["staging"]  # before the poll, so that the last poll knows it
        with timed(parts, "polls"):
            publication.poll()
        _expect_copies(publication)
        _expect_in_time(begin, "the copies do not end")
        watch()
        time.sleep(_POLL_SECONDS)
    return staging


def _expect_copies(publication: Publication) -> None:
    """Raises RuntimeError if the save failed before its copies were done; `discard` fails it later."""
    failure = publication.save.failure
    if failure is not None and not publication.save.times()["staging"]:
        raise RuntimeError(f"the save failed before its copies were done: {failure}")


def _expect_in_time(begin: float, trouble: str) -> None:
    if time.perf_counter() - begin > _PATIENCE_SECONDS:
        raise TimeoutError(f"{trouble} (after {_PATIENCE_SECONDS:g} s)")
