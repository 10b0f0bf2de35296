"""Measures all the time that a save holds the trainer, and how much device memory the first save takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.context import Part
from benchmarks.gpu.device import Device, LeastFree, cut_shard, make_memory, make_shard
from benchmarks.gpu.driver import Driver, HostMemory
from benchmarks.gpu.environment import CONNECTIONS_LIMIT, IS_FAKE
from benchmarks.gpu.memory import fitting, pool_for
from benchmarks.gpu.saves import DeviceSaves, StreamTimer
from benchmarks.rounds import medians
from benchmarks.states import Tensors, bytes_of
from megatron_datastates.config import GIB, KIB, MIB

# The next forward and backward, whatever the disk or the copies do: 16 GiB are copied in it at 22 GB/s.
_WORK_SECONDS = 0.02 if IS_FAKE else 0.75
_PARTS = ("start", "synchronize", "first_poll", "fence", "stream_wait", "polls")


class Work:
    """Runs small kernels on the current stream for a fixed time, in place of a forward and a backward."""

    def __init__(self, seconds: float = _WORK_SECONDS) -> None:
        self._seconds = seconds
        self._x = torch.ones(1 << 16, device="cuda")
        with StreamTimer():  # so that the first save does not pay for the first event with a time
            self()  # loads its kernels

    def __call__(self) -> None:
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            for _ in range(50):
                self._x.mul_(1.0001)
            torch.cuda.current_stream().synchronize()  # not the stream of the copies


# How the trainer behaves around a save; the first is the one that is judged.
_MODES = ("held", "without_synchronize", "fenced_at_once")


def measure_held(part: Part) -> None:
    """Reports the held time by size and number of tensors, with and without a synchronize after the start."""
    wanted = [4 * MIB, 16 * MIB] if part.is_small else [1 * GIB, 4 * GIB, 16 * GIB]
    sizes, left_out = fitting(wanted, part.device, host_copies=1.25)
    part.report(connections=CONNECTIONS_LIMIT, left_out=left_out, work_ms=1e3 * _WORK_SECONDS)
    memory, work = make_memory(sizes[-1]), Work()
    largest = f"{sizes[-1] / GIB:g} GiB"
    usual, few, most = (100, 20, 200) if part.is_small else (1000, 200, 20_000)
    cases = {f"{size / GIB:g} GiB": cut_shard(memory[:size], usual) for size in reversed(sizes)}
    pool = max(map(pool_for, cases.values()))
    saves = DeviceSaves(part.device, part.folder, pool, discard=True)
    part.report(first_save=measure_first_save(part.device, saves, cases[largest], work))
    cases[f"{largest}, few tensors"] = cut_shard(memory, few)
    cases["many tensors"] = make_shard(most * 32 * KIB, most)
    for shard in cases.values():
        saves.held(shard, synchronize=True, work=work)
    all_modes = (largest, "many tensors")
    modes = {case: [m for m in _MODES if m != "fenced_at_once" or case in all_modes] for case in cases}
    _measure_rounds(part, saves, cases, modes, work)
    saves.close()


def _measure_rounds(
    part: Part, saves: DeviceSaves, cases: dict[str, Tensors], modes: dict[str, list[str]], work: Work
) -> None:
    """Saves every case in each of its modes once a round; reports held time and device memory."""
    free = LeastFree(part.device)
    before = free.bytes
    part.device.reset_peak()
    samples: dict[str, dict[str, list[dict[str, float]]]] = {
        case: {mode: [] for mode in modes[case]} for case in cases
    }
    for number in part.rounds(1 if part.is_small else 7):
        # Watched in one round only: asking the driver takes its lock.
        watch: Callable[[], None] = free.look if number == 0 else lambda: None
        for case, by_mode in samples.items():
            for mode, found in by_mode.items():
                is_held, worked = mode == "held", None if mode == "fenced_at_once" else work
                found.append(saves.held(cases[case], synchronize=is_held, work=worked, watch=watch))
            measured = {name: shard for name, shard in cases.items() if samples[name]["held"]}
            part.report(cases={name: _summary(samples[name], shard) for name, shard in measured.items()})
        free.look()
        part.report(
            repeats=number + 1,
            device_bytes_of_later_saves=before - free.bytes,
            device_bytes_by_torch=part.device.peak_bytes(),
        )


def _summary(samples: dict[str, list[dict[str, float]]], shard: Tensors) -> dict[str, Any]:
    """Returns milliseconds by mode, each with its parts."""
    summary: dict[str, Any] = {"tensors": len(shard), "bytes": bytes_of(shard)}
    for mode, found in samples.items():
        middle = medians(found)
        summary[f"{mode}_ms"] = 1e3 * middle["held"]
        summary[f"{mode}_ms_most"] = 1e3 * max(sample["held"] for sample in found)
        summary[f"{mode}_parts_ms"] = {part: 1e3 * middle[part] for part in _PARTS}
        summary[f"{mode}_staging_ms"] = 1e3 * middle["staging"]
    return summary


def measure_first_save(device: Device, saves: DeviceSaves, shard: Tensors, work: Work) -> dict[str, Any]:
    """Measures the device memory that the first save of this process takes, page-locking included.

    "Named" is what the driver itself takes for what any such copy needs (_driver_costs); the rest is "not
    named".
    """
    named = _driver_costs(device)
    device.reset_peak()
    free = LeastFree(device)
    before = free.bytes
    pool = saves.make_pool()
    free.look()
    parts = saves.held(shard, synchronize=True, work=work, watch=free.look)
    free.look()
    taken = before - free.bytes
    allowed = named["second_bare_stream_and_event"]
    allowed += named["page_locking_per_gib"] * saves.staging_bytes / GIB
    return {
        "pool": pool,
        "held_ms": 1e3 * parts["held"],
        "parts_ms": {part: 1e3 * parts[part] for part in _PARTS},
        "device_bytes": taken,
        "device_bytes_named": named,
        "device_bytes_not_named": max(taken - allowed, 0),
        "device_bytes_by_torch": device.peak_bytes(),
    }


def _driver_costs(device: Device) -> dict[str, float]:
    """Returns the device memory that a stream and an event take, and that each page-locked GiB takes.

    A second pair of stream and event is made, since the first may pay for both.
    """
    named: dict[str, float] = {}
    driver = Driver(device.driver)
    for name in ("first_bare_stream_and_event", "second_bare_stream_and_event"):
        before = device.free_bytes()
        driver.make_stream()
        driver.make_event()
        named[name] = before - device.free_bytes()
    before, size = device.free_bytes(), 16 * MIB if IS_FAKE else GIB
    memory = HostMemory(size)
    memory.touch()
    driver.lock(memory.address, memory.bytes)
    named["page_locking_per_gib"] = (before - device.free_bytes()) * GIB / size
    driver.unlock(memory.address)
    memory.free()
    return named
