"""The time that a save holds the trainer, all of it, and what of the device's memory the first save takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_device import CONNECTIONS, IS_FAKE, Device, bytes_of, cut, make_memory, make_shard
from gpu_driver import Driver, HostMemory
from gpu_saves import Saving, Shard, StreamWait, Tell, fitting, medians, pool_for, rounds

from megatron_datastates.config import GIB, KIB, MIB

# The next forward and backward, whatever the disk or the copies do; 16 GiB are copied in it at 22 GB/s.
_WORK_SECONDS = 0.02 if IS_FAKE else 0.75
_PARTS = ("start", "synchronize", "first_poll", "fence", "stream_wait", "polls")


class Work:
    """Small kernels on the current stream for a fixed time, in place of a forward and a backward."""

    def __init__(self, seconds: float = _WORK_SECONDS) -> None:
        self._seconds = seconds
        self._x = torch.ones(1 << 16, device="cuda")
        with StreamWait():  # what an event with a time takes is the yardstick's, not the save's
            self()  # its kernels are loaded

    def __call__(self) -> None:
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            for _ in range(50):
                self._x.mul_(1.0001)
            torch.cuda.current_stream().synchronize()  # not the copies' stream


def measure_held(device: Device, folder: Path, small: bool, until: float, tell: Tell) -> None:
    """By size and by number of tensors: with and without a synchronize after start, and fenced at once."""
    wanted = [4 * MIB, 16 * MIB] if small else [1 * GIB, 4 * GIB, 16 * GIB]
    sizes, left_out = fitting(wanted, device, host_copies=1.25)
    tell(connections=CONNECTIONS, left_out=left_out, work_ms=1e3 * _WORK_SECONDS)
    memory, work = make_memory(sizes[-1]), Work()
    largest = f"{sizes[-1] / GIB:g} GiB"
    usual, few, most = (100, 20, 200) if small else (1000, 200, 20_000)
    cases = {f"{size / GIB:g} GiB": cut(memory[:size], usual) for size in reversed(sizes)}
    saving = Saving(device, folder, max(map(pool_for, cases.values())), backend="discard")
    tell(first_save=_first_save(device, saving, cases[largest], work))
    cases[f"{largest}, few tensors"] = cut(memory, few)
    cases["many tensors"] = make_shard(most * 32 * KIB, most)
    modes: dict[str, dict[str, Any]] = {
        "held": {"synchronize": True, "work": work},
        "without_synchronize": {"synchronize": False, "work": work},
        "fenced_at_once": {"synchronize": False, "work": None},
    }
    for shard in cases.values():
        saving.held(shard, **modes["held"])
    least = steady = device.free_bytes()
    device.reset_peak()

    def watch() -> None:
        nonlocal least
        least = min(least, device.free_bytes())

    samples: dict[str, dict[str, list[dict[str, float]]]] = {
        case: {mode: [] for mode in modes if mode != "fenced_at_once" or case in (largest, "many tensors")}
        for case in cases
    }
    for number in rounds(until, 1 if small else 7):
        for case, by_mode in samples.items():
            for mode, found in by_mode.items():
                # Watched in one round only: asking the driver takes its lock.
                looking: Callable[[], None] = watch if number == 0 else lambda: None
                found.append(saving.held(cases[case], **modes[mode], watch=looking))
            measured = {name: shard for name, shard in cases.items() if samples[name]["held"]}
            tell(cases={name: _summary(samples[name], shard) for name, shard in measured.items()})
        tell(
            repeats=number + 1,
            device_bytes_of_later_saves=steady - min(least, device.free_bytes()),
            device_bytes_by_torch=device.peak_bytes(),
        )
    saving.close()


def _summary(samples: dict[str, list[dict[str, float]]], shard: Shard) -> dict[str, Any]:
    """Milliseconds by mode, each with its parts; those of the synchronized mode are the ones judged."""
    summary: dict[str, Any] = {"tensors": len(shard), "bytes": bytes_of(shard)}
    for mode, found in samples.items():
        middle = medians(found)
        summary[f"{mode}_ms"] = 1e3 * middle["held"]
        summary[f"{mode}_ms_most"] = 1e3 * max(sample["held"] for sample in found)
        summary[f"{mode}_parts_ms"] = {part: 1e3 * middle[part] for part in _PARTS}
        summary[f"{mode}_staging_ms"] = 1e3 * middle["staging"]
    return summary


def _first_save(device: Device, saving: Saving, shard: Shard, work: Work) -> dict[str, Any]:
    """Device memory over the first save of this process, page-locking included, beside what is named.

    Named is what the driver itself takes for what any such copy needs: a stream and an event, made bare
    here (a second pair, since the first may pay for both), and page-locked memory, by the GiB.
    """
    named: dict[str, float] = {}
    driver = Driver(device.driver)
    for name in ("first_bare_stream_and_event", "second_bare_stream_and_event"):
        before = device.free_bytes()
        driver.make_stream(), driver.make_event()
        named[name] = before - device.free_bytes()
    before, gib = device.free_bytes(), (16 * MIB if IS_FAKE else GIB) / GIB
    memory = HostMemory(int(gib * GIB))
    memory.touch()
    driver.lock(memory.address, memory.bytes)
    named["page_locking_per_gib"] = (before - device.free_bytes()) / gib
    driver.unlock(memory.address)
    memory.free()
    device.reset_peak()
    least = before = device.free_bytes()

    def watch() -> None:
        nonlocal least
        least = min(least, device.free_bytes())

    pool = saving.make_pool()
    watch()
    parts = saving.held(shard, synchronize=True, work=work, watch=watch)
    taken = before - min(least, device.free_bytes())
    allowed = named["second_bare_stream_and_event"]
    allowed += named["page_locking_per_gib"] * saving.staging_bytes / GIB
    return {
        "pool": pool,
        "held_ms": 1e3 * parts["held"],
        "parts_ms": {part: 1e3 * parts[part] for part in _PARTS},
        "device_bytes": taken,
        "device_bytes_named": named,
        "device_bytes_not_named": max(taken - allowed, 0),
        "device_bytes_by_torch": device.peak_bytes(),
    }
