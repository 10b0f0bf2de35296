"""Saves by the whole pipeline, as gpu.py measures them: rates, the time the trainer is held, device memory.

Every save goes through pipeline.saver.Saver, so that what a trainer would wait for is counted: collecting
the tensors, looking up the layout, the native call, the fence and the polls.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from gpu_device import BareCopies, Device, cut, make_memory, make_shard, runs_of

from megatron_datastates.config import GIB, KIB, MIB
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.memory import free_bytes
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.saver import Run, Saver
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider

SLOT = 4 * MIB
Tell = Callable[..., None]  # records results under names
Shard = dict[str, torch.Tensor]
_PATIENCE = 120.0  # seconds
_ORDINALS = itertools.count(1)


class Saving:
    """Saves into folders of their own, by one Saver."""

    def __init__(self, device: Device, folder: Path, staging_bytes: int, **options: Any) -> None:
        slots = max(staging_bytes // SLOT, 2)
        self.device, self._folder = device, folder
        self._saver = Saver(device.options(staging_memory=slots * SLOT, slot_size=SLOT, **options), Run())

    def start(self, shard: Shard) -> Publication:
        directory = self._folder / f"save{next(_ORDINALS)}"
        return self._saver.start(directory, TensorProvider(shard, Mutability.AT_FENCE))

    def copied(self, shard: Shard, watch: Callable[[], None] = lambda: None) -> dict[str, float]:
        """One save, given up once its copies are done; seconds by part."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        publication = self.start(shard)
        started = time.perf_counter()
        FENCE.wait("the benchmark")
        fenced = time.perf_counter()
        staging = await_copies(publication, watch)
        times = publication.save.times()
        self.drop(publication)
        return {
            "start": started - begin,
            "fence": fenced - started,
            "held": fenced - begin,
            "staging": staging,
            "slot_wait": times["slot_wait"],
        }

    def published(self, shard: Shard) -> dict[str, float]:
        """One save until it is published, polled every 10 ms as by a trainer with short steps.

        The first and the last tensor are read back and compared.
        """
        torch.cuda.synchronize()
        begin = time.perf_counter()
        publication = self.start(shard)
        FENCE.wait("the benchmark")
        fenced = polled = time.perf_counter() - begin
        deadline = time.monotonic() + _PATIENCE
        while publication.outcome is Outcome.PENDING:
            assert time.monotonic() < deadline, "the save does not end"
            time.sleep(0.01)
            before = time.perf_counter()
            publication.poll()
            polled += time.perf_counter() - before
        assert publication.outcome is Outcome.PUBLISHED, publication.error
        seconds = time.perf_counter() - begin
        publication.join()
        times = publication.save.times()
        checkpoint = Checkpoint.open(publication.save.context.directory)
        for key in (next(iter(shard)), next(reversed(shard))):
            assert torch.equal(checkpoint.read_tensor(key), shard[key].cpu()), (
                f"{key} was not stored as it is"
            )
        shutil.rmtree(publication.save.context.directory)
        return {
            "held": fenced,
            "held_with_polls": polled,
            "staging": times["staging"],
            "durable": times["durable"],
            "published": seconds,
        }

    def kept(self, shard: Shard) -> Path:
        """One save, published and left where it is."""
        publication = self.start(shard)
        FENCE.wait("the benchmark")
        assert publication.wait() is Outcome.PUBLISHED, publication.error
        publication.join()
        return publication.save.context.directory

    def drop(self, publication: Publication) -> None:
        """Gives a save up and removes what it wrote."""
        publication.abandon("it was measured")
        publication.join()
        shutil.rmtree(publication.save.context.directory, ignore_errors=True)

    def close(self) -> None:
        self._saver.close()


def await_copies(publication: Publication, watch: Callable[[], None] = lambda: None) -> float:
    """Polls until nothing is read any more; seconds since the save began, by the engine."""
    deadline = time.monotonic() + _PATIENCE
    while not (staging := publication.save.times()["staging"]):
        publication.save.advance()
        assert publication.save.failure is None, publication.save.failure
        assert time.monotonic() < deadline, "the copies do not end"
        watch()
        time.sleep(0.0005)
    publication.save.advance()  # the sources are dropped
    return staging


def rounds(until: float, most: int) -> Iterable[int]:
    """Numbers of repeats: as many as there is time for, by the longest so far, but at least one."""
    longest = 0.0
    for number in range(most):
        begin = time.monotonic()
        if number and begin + longest > until:
            return
        yield number
        longest = max(longest, time.monotonic() - begin)


def medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}


def fitting(wanted: Iterable[int], device: Device, folder: Path) -> list[int]:
    """Those of these shard sizes for which device, host memory (pool and system) and disk have room."""
    most = min(device.free_bytes() * 0.8, free_bytes() * 0.4, shutil.disk_usage(folder).free * 0.8)
    fits = [size for size in wanted if size <= most]
    if not fits:
        raise RuntimeError(
            f"there is room for {most / GIB:.1f} GiB only, on the device, in memory or in {folder}"
        )
    return fits


# -- parts ------------------------------------------------------------------------------------------------


def measure_copies(device: Device, folder: Path, small: bool, until: float, tell: Tell) -> None:
    """Copy rates beside those of a bare loop, over the same sources, interleaved."""
    begin = time.monotonic()
    few = make_shard(16 * MIB if small else 4 * GIB, 4 if small else 64)
    shard = few | _renamed(make_shard((20 if small else 1000) * 8192, 20 if small else 1000))
    count = 100 if small else 20_000
    many = make_shard(count * 32768, count)
    total = max(map(_bytes, (shard, many)))
    bare = BareCopies(device.driver, total)
    large = Saving(device, folder, total + 8 * SLOT)
    tight_bytes = (2 if small else 64) * SLOT
    tight = Saving(device, folder, tight_bytes)
    for warm in (large, tight):
        warm.copied(shard)

    def by(share: float) -> float:
        return begin + share * (until - begin)

    _compare(large, bare, shard, rounds(by(0.5), 2 if small else 15), lambda values: tell(**values))
    _compare(large, bare, many, rounds(by(0.7), 1 if small else 9), lambda v: tell(many_tensors=v))
    streamed = []
    for number in rounds(until, 1 if small else 5):
        streamed.append(tight.copied(shard))
        middle = medians(streamed)
        tell(
            small_pool={
                "repeats": number + 1,
                "bytes": tight_bytes,
                "engine_gb_per_s": _bytes(shard) / middle["staging"] / 1e9,
                "fence_ms": 1e3 * middle["fence"],
                "slot_wait_ms": 1e3 * middle["slot_wait"],
            }
        )
    bare.close()
    large.close()
    tight.close()


def _compare(
    saving: Saving, bare: BareCopies, shard: Shard, numbers: Iterable[int], tell: Callable[[Any], None]
) -> None:
    """The engine's copies and two bare loops: a copy a tensor, and copies of a slot at most."""
    whole, slots, total = runs_of(shard, 1 << 40), runs_of(shard, SLOT), _bytes(shard)
    samples = []
    saving.copied(shard)
    for number in numbers:
        torch.cuda.synchronize()
        sample = {"bare": bare.seconds(whole), "bare_slots": bare.seconds(slots)}
        saved = saving.copied(shard)
        sample |= {"engine": saved["staging"], "slot_wait": saved["slot_wait"]}
        sample["to_bare"] = min(sample["bare"], sample["bare_slots"]) / saved["staging"]
        samples.append(sample)
        middle = medians(samples)
        tell(
            {
                "bytes": total,
                "tensors": len(shard),
                "repeats": number + 1,
                "bare_gb_per_s": total / middle["bare"] / 1e9,
                "bare_of_slots_gb_per_s": total / middle["bare_slots"] / 1e9,
                "engine_gb_per_s": total / middle["engine"] / 1e9,
                "engine_to_bare": middle["to_bare"],  # to the faster of the two, round by round
                "engine_to_bare_least": min(sample["to_bare"] for sample in samples),
                "slot_wait_ms": 1e3 * middle["slot_wait"],
            }
        )


def _renamed(shard: Shard) -> Shard:
    return {f"small{key}": tensor for key, tensor in shard.items()}


def _bytes(shard: Shard) -> int:
    return sum(tensor.nbytes for tensor in shard.values())


def measure_held(device: Device, folder: Path, small: bool, until: float, tell: Tell) -> None:
    """Start and fence by size and by number of tensors; and what of the device's memory that takes."""
    wanted = [4 * MIB, 16 * MIB] if small else [1 * GIB, 4 * GIB, 16 * GIB]
    sizes = fitting(wanted, device, folder)
    tell(left_out=[f"{size / GIB:g} GiB: no room" for size in wanted if size not in sizes])
    memory = make_memory(sizes[-1])
    usual, few, most = (100, 20, 200) if small else (1000, 200, 20_000)
    cases = {f"{size / GIB:g} GiB": cut(memory[:size], usual) for size in sizes}
    cases[f"{sizes[-1] / GIB:g} GiB, few tensors"] = cut(memory, few)
    cases["many tensors"] = make_shard(most * 32 * KIB, most)
    saving = Saving(device, folder, sizes[-1] + 8 * SLOT)
    free = device.free_bytes()
    first = {case: saving.copied(tensors) for case, tensors in reversed(list(cases.items()))}
    least = steady = device.free_bytes()
    tell(device_bytes_of_first_saves=free - steady)
    device.reset_peak()

    def watch() -> None:
        nonlocal least
        least = min(least, device.free_bytes())

    samples: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for number in rounds(until, 1 if small else 9):
        for case, tensors in cases.items():
            # Watched in one round only: asking the driver takes its lock.
            samples[case].append(saving.copied(tensors, watch if number == 0 else lambda: None))
        tell(
            repeats=number + 1,
            cases={case: _held(samples[case], first[case], cases[case]) for case in cases},
            device_bytes_by_driver=steady - min(least, device.free_bytes()),
            device_bytes_by_torch=device.peak_bytes(),
        )
    saving.close()


def _held(samples: list[dict[str, float]], first: dict[str, float], shard: Shard) -> dict[str, float]:
    middle = medians(samples)
    return {
        "tensors": len(shard),
        "held_ms": 1e3 * middle["held"],
        "held_ms_most": 1e3 * max(sample["held"] for sample in samples),
        "start_ms": 1e3 * middle["start"],
        "fence_ms": 1e3 * middle["fence"],
        "first_save_held_ms": 1e3 * first["held"],
        "staging_gb_per_s": _bytes(shard) / middle["staging"] / 1e9,
    }


def measure_pipeline(device: Device, folder: Path, small: bool, until: float, tell: Tell) -> None:
    """Whole saves until they are published, with a pool for all of the shard and with a small one."""
    size = fitting([16 * MIB] if small else [4 * GIB, GIB], device, folder)[0]
    shard = make_shard(size, 20 if small else 500)
    total = _bytes(shard)
    pools = {"large_pool": total + 8 * SLOT, "small_pool": (2 if small else 64) * SLOT}
    savings = {name: Saving(device, folder, pool) for name, pool in pools.items()}
    tell(bytes=total, tensors=len(shard))
    for saving in savings.values():
        saving.copied(shard)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in savings}
    for number in rounds(until, 1 if small else 5):
        for name, saving in savings.items():
            samples[name].append(saving.published(shard))
            middle = medians(samples[name])
            tell(
                **{
                    name: {
                        "repeats": number + 1,
                        "bytes": pools[name],
                        "held_ms": 1e3 * middle["held"],
                        "held_with_polls_ms": 1e3 * middle["held_with_polls"],
                        "staging_gb_per_s": total / middle["staging"] / 1e9,
                        "durable_gb_per_s": total / middle["durable"] / 1e9,
                        "published_seconds": middle["published"],
                    }
                }
            )
    for saving in savings.values():
        saving.close()
