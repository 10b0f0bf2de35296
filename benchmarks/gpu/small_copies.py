"""Measures how long small operations of the trainer's take while a save's copies run, by the order of copies.

From a save's start until its copies are done, three operations take turns: launches of small kernels,
`.item()`, and a copy of a few bytes to the device. Where the first take longer, the driver's locks or the
processor are to blame; where the others do, the device's copy engines. The start of the save is timed, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.context import Part
from benchmarks.gpu.device import make_shard
from benchmarks.gpu.environment import CONNECTIONS_LIMIT, IS_FAKE
from benchmarks.gpu.memory import fitting, pool_for
from benchmarks.gpu.saves import DeviceSaves
from benchmarks.states import Tensors, bytes_of
from megatron_datastates.config import GIB, MIB

ORDERS: dict[str, dict[str, Any]] = {
    "bursts_of_8_mib": {},  # the default
    "bursts_of_4_mib": {"most_in_flight": 4 * MIB},
    "bursts_of_16_mib": {"most_in_flight": 16 * MIB},
    "at_once": {"most_in_flight": 1 << 40},
    "without_samples": {"tripwire": False},  # for what they cost the start
}
_LAUNCHES = 16  # of small kernels, in each sample
_ALONE_SECONDS = 0.05
_OPERATIONS = ("launch_us", "item_us", "to_device_us")
_MOST_SECONDS = 60.0

Sample = dict[str, float]  # seconds of each operation
Outcome = tuple[list[Sample], float, float]  # seconds of the copies, and of their start


def measure_small_copies(part: Part) -> None:
    """Reports, by order of copies, medians and maxima of each operation, and the rate of the copies."""
    sizes, left_out = fitting([4 * MIB] if part.is_small else [GIB, 4 * GIB], part.device, host_copies=4.0)
    shard = make_shard(sizes[-1], 20 if part.is_small else 400)
    total, pool, trainer = bytes_of(shard), pool_for(shard), SmallOperations()
    saves = {
        name: DeviceSaves(part.device, part.folder, pool, discard=True, **options)
        for name, options in ORDERS.items()
    }
    copies: dict[str, Callable[[], Outcome]] = {
        "alone": lambda: _alone(trainer),
        "bare": BareCopies(shard, trainer).run,
    }
    for name, one in saves.items():
        one.make_pool()
        copies[name] = lambda one=one: _during_a_save(one, shard, trainer)  # type: ignore[misc]
    part.report(connections=CONNECTIONS_LIMIT, bytes=total, tensors=len(shard), left_out=left_out)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in copies}
    for run in copies.values():
        run()
    for number in part.rounds(2 if part.is_small else 12):
        for name, run in copies.items():
            found[name].append(_summary(run(), total))
        results = {name: _over_rounds(rounds, found["alone"]) for name, rounds in found.items()}
        part.report(repeats=number + 1, orders=results)
    for one in saves.values():
        one.close()


class SmallOperations:
    """What a trainer does beside large kernels."""

    def __init__(self) -> None:
        self._numbers = torch.ones(256, device="cuda")
        self._host = torch.ones(256)
        if not IS_FAKE:
            self._host = self._host.pin_memory()

    def sample(self) -> Sample:
        """Does each operation once, and returns its seconds; a launch is the mean of several."""
        begin = time.perf_counter()
        for _ in range(_LAUNCHES):
            self._numbers.mul_(1.0001)
        launched = time.perf_counter()
        self._numbers[0].item()
        taken = time.perf_counter()
        self._numbers.copy_(self._host, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        end = time.perf_counter()
        return {
            "launch_us": (launched - begin) / _LAUNCHES,
            "item_us": taken - launched,
            "to_device_us": end - taken,
        }


class BareCopies:
    """All tensors copied by torch, enqueued at once, on a stream of its own, into page-locked memory."""

    def __init__(self, shard: Tensors, trainer: SmallOperations) -> None:
        self._shard, self._trainer, self._stream = shard, trainer, torch.cuda.Stream()
        self._copies = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not IS_FAKE)
            for key, tensor in shard.items()
        }

    def run(self) -> Outcome:
        """Takes samples until the copies are done."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.cuda.stream(self._stream):
            for key, tensor in self._shard.items():
                self._copies[key].copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        started = time.perf_counter() - begin
        samples = [self._trainer.sample()]
        while not done.query():
            samples.append(self._trainer.sample())
        return samples, time.perf_counter() - begin, started


def _alone(trainer: SmallOperations) -> Outcome:
    begin, samples = time.perf_counter(), []
    while time.perf_counter() - begin < _ALONE_SECONDS:
        samples.append(trainer.sample())
    return samples, time.perf_counter() - begin, 0.0


def _during_a_save(saves: DeviceSaves, shard: Tensors, trainer: SmallOperations) -> Outcome:
    """Takes samples from the first poll until the copies are done."""
    torch.cuda.synchronize()
    called = time.perf_counter()
    publication = saves.start_shard(shard)
    started = time.perf_counter() - called
    publication.poll()
    save, samples = publication.save, []
    begin = time.perf_counter()
    while not (copied := save.times()["staging"]):
        samples.append(trainer.sample())
        if time.perf_counter() - begin > _MOST_SECONDS:
            raise TimeoutError(f"copies were not done after {_MOST_SECONDS:g} s")
    samples = samples or [trainer.sample()]
    saves.fence()
    saves.discard(publication)
    return samples, copied, started


def _summary(outcome: Outcome, total: int) -> dict[str, float]:
    samples, copies, start = outcome
    found = {"copies_ms": 1e3 * copies, "start_ms": 1e3 * start, "samples": float(len(samples))}
    found["gb_per_s"] = total / copies / 1e9
    for name in _OPERATIONS:
        values = [sample[name] for sample in samples]
        found[name] = 1e6 * statistics.median(values)
        found[f"{name}_mean"] = 1e6 * statistics.fmean(values)
        found[f"{name}_most"] = 1e6 * max(values)
    found["sample_us_mean"] = 1e6 * statistics.fmean(
        _LAUNCHES * sample["launch_us"] + sample["item_us"] + sample["to_device_us"] for sample in samples
    )
    return found


def _over_rounds(rounds: list[dict[str, float]], alone: list[dict[str, float]]) -> dict[str, float]:
    """Returns medians over rounds, and by how much longer a sample takes than alone, in percent."""
    found = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    pairs = zip(rounds, alone, strict=True)
    ratios = [one["sample_us_mean"] / other["sample_us_mean"] for one, other in pairs]
    return found | {"longer_percent": 100 * (statistics.median(ratios) - 1)}
