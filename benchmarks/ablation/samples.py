"""One timed save after another, and the medians of contenders that took turns."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import time
from collections.abc import Callable, Mapping

from benchmarks.command import Result
from benchmarks.rounds import interleave, medians, spread
from benchmarks.saves import Saves, expect_published
from megatron_datastates.config import KIB, MIB
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.providers.base import StateProvider

POLL_SECONDS = 0.0005


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is saved, and how often."""

    bytes: int  # of the large tensors
    repeats: int
    tiny_tensors: int = 20_000  # of 4 KiB
    objects: int = 400
    object_bytes: int = 256 * KIB
    step_seconds: float = 0.25  # of a core's time: one simulated forward and backward pass


def quick() -> Sizes:
    """Returns sizes for a try that takes seconds, and whose figures mean little."""
    return Sizes(32 * MIB, 1, tiny_tensors=200, objects=10, object_bytes=64 * KIB, step_seconds=0.02)


Sample = dict[str, float]  # figures of one save: held_ms, durable_ms, mb_per_s, iteration_ms


def save_once(
    saves: Saves, provider: StateProvider, started: Callable[[Publication], object] = lambda _: None
) -> Sample:
    """Saves once, fences at once, and removes the checkpoint.

    Args:
        started: called with the save right after its call has returned.

    Raises:
        RuntimeError: the save failed.
    """
    os.sync()  # or this save would pay for what was removed before
    begin = time.perf_counter()
    publication = saves.start(provider)
    started(publication)
    saves.fence()
    held = time.perf_counter() - begin
    return finish(publication, begin, held)


def finish(publication: Publication, begin: float, held: float) -> Sample:
    """Waits until a save is published, and removes the checkpoint; `begin` is of time.perf_counter."""
    while publication.poll() is Outcome.PENDING:
        time.sleep(POLL_SECONDS)
    expect_published(publication)
    publication.join()
    save = publication.save
    durable = save.started_at + save.times()["durable"] - begin  # the engine's own clock, from its start
    directory = publication.save.context.directory
    size = sum(path.stat().st_size for path in directory.glob("data-*"))
    shutil.rmtree(directory)
    return figures(held, durable, size)


def figures(held: float, durable: float, size: int) -> Sample:
    """Returns the sample of a save, given seconds and bytes.

    Args:
        held: of the trainer: the call that saves, and the fence.
        durable: from the call until the file would survive a crash.
    """
    return {"held_ms": held * 1e3, "durable_ms": durable * 1e3, "mb_per_s": size / durable / 1e6}


def compare(repeats: int, contenders: Mapping[str, Callable[[], Sample]]) -> Result:
    """Measures contenders in turns; returns the median and the spread of each figure, by contender."""
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}

    def turn(name: str) -> float:
        samples[name].append(contenders[name]())
        return 0.0

    interleave(repeats, {name: functools.partial(turn, name) for name in contenders})
    return {name: _summary(found[1:]) for name, found in samples.items()}  # the first was a warm-up


def _summary(samples: list[Sample]) -> Result:
    middle = {name: round(value, 2) for name, value in medians(samples).items()}
    return middle | {"spread": {name: spread([sample[name] for sample in samples]) for name in middle}}
