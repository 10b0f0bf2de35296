"""Measures loads to a device and to host memory: their rates next to the disk's, and device memory."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch

from benchmarks import disk
from benchmarks.gpu.context import Part
from benchmarks.gpu.device import Device, make_shard
from benchmarks.gpu.memory import fitting
from benchmarks.gpu.saves import SMALL_POOL_BYTES, DeviceSaves
from benchmarks.rounds import medians
from benchmarks.states import Tensors, bytes_of, lazy
from megatron_datastates.config import GIB, MIB
from megatron_datastates.engine.reader import SLOT_BYTES
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.plan.reads import ScheduledRead, plan_slice


def measure_loads(part: Part) -> None:
    """Reports rates of loads of one rank's file, to the device and to resident host memory."""
    # The device holds the tensors twice; host memory holds them once, and the page cache of what is read.
    sizes, left_out = fitting([16 * MIB] if part.is_small else [GIB, 4 * GIB], part.device, part.folder)
    shard = make_shard(sizes[-1], 20 if part.is_small else 500)
    total = bytes_of(shard)
    saves = DeviceSaves(part.device, part.folder, SMALL_POOL_BYTES)
    directory = saves.keep(lazy(shard))
    saves.close()
    targets = {
        "to_device": {key: torch.zeros_like(tensor) for key, tensor in shard.items()},
        "to_host": {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in shard.items()},
    }
    caches_dropped = disk.drop_caches()
    part.report(bytes=total, tensors=len(shard), slot_bytes=SLOT_BYTES, caches_dropped=caches_dropped)
    part.report(left_out=left_out)
    samples = []
    for number in part.rounds(1 if part.is_small else 7):
        sample = {"disk": _read_by_the_disk(part, total)}
        for name, tensors in targets.items():
            disk.drop_caches()
            part.device.reset_peak()
            sample[name] = _load(part.device, directory, tensors, name == "to_device")
            if number == 0:
                if name == "to_device":
                    part.report(device_bytes_by_torch=part.device.peak_bytes())
                _compare(tensors, shard)
        samples.append(sample)
        middle = medians(samples)
        part.report(
            repeats=number + 1,
            **{f"{name}_gb_per_s": total / seconds / 1e9 for name, seconds in middle.items()},
            device_to_disk=middle["disk"] / middle["to_device"],
        )
    shutil.rmtree(directory)


def _load(device: Device, directory: Path, targets: Tensors, on_device: bool) -> float:
    """Loads all targets; returns the seconds until their bytes have arrived and are checked."""
    if on_device:
        device.adopt(targets.values())
    torch.cuda.synchronize()
    begin = time.perf_counter()
    checkpoint = Checkpoint.open(directory, device.options())
    reads = [
        ScheduledRead(part, tensor.data_ptr(), on_device)
        for key, tensor in targets.items()
        for part in plan_slice(checkpoint.index.tensor(key), [0], tensor.shape)[0]
    ]
    checkpoint.read(reads)
    return time.perf_counter() - begin


def _compare(found: Tensors, wanted: Tensors) -> None:
    for key, tensor in wanted.items():
        if not torch.equal(found[key].to(tensor.device), tensor):
            raise RuntimeError(f"{key} was not loaded as it was saved")


def _read_by_the_disk(part: Part, size: int) -> float:
    """Returns the seconds that reading `size` bytes takes with plain threads."""
    config = disk.DiskConfig("threads", (1 if part.is_small else 4) * MIB, 4)
    files = part.folder / "disk-reads"
    files.mkdir(exist_ok=True)
    return size / disk.read_rate(config, files, size // config.block * config.block)
