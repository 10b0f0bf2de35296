"""Loads to a device and to host memory, as gpu.py measures them: rates beside the disk's, device memory."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import disk
import torch
from gpu_device import IS_FAKE, Device, bytes_of, make_shard
from gpu_saves import SMALL_POOL, Saving, Shard, Tell, fitting, medians, rounds

from megatron_datastates.config import GIB, MIB
from megatron_datastates.engine.reader import SLOT_BYTES
from megatron_datastates.pipeline.load import Checkpoint, ScheduledRead
from megatron_datastates.plan.reads import plan_slice


def measure_loads(device: Device, folder: Path, small: bool, until: float, tell: Tell) -> None:
    """Whole loads of one rank's file: to the device, and to host memory that is already there."""
    # On the device twice; in host memory once, beside the page cache of what is read.
    sizes, left_out = fitting([16 * MIB] if small else [GIB, 4 * GIB], device, folder)
    shard = make_shard(sizes[-1], 20 if small else 500)
    total = bytes_of(shard)
    saving = Saving(device, folder, SMALL_POOL)
    directory = saving.kept(shard)
    saving.close()
    targets = {
        "to_device": {key: torch.zeros_like(tensor) for key, tensor in shard.items()},
        "to_host": {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in shard.items()},
    }
    tell(bytes=total, tensors=len(shard), slot_bytes=SLOT_BYTES, caches_dropped=disk.drop_caches())
    tell(left_out=left_out)
    samples = []
    for number in rounds(until, 1 if small else 7):
        sample = {"disk": _read_by_the_disk(folder, total, small)}
        for name, shapes in targets.items():
            disk.drop_caches()
            device.reset_peak()
            sample[name] = _load(device, directory, shapes, name == "to_device")
            if number == 0:
                if name == "to_device":
                    tell(device_bytes_by_torch=device.peak_bytes())
                _compare(shapes, shard)
        samples.append(sample)
        middle = medians(samples)
        tell(
            repeats=number + 1,
            **{f"{name}_gb_per_s": total / seconds / 1e9 for name, seconds in middle.items()},
            device_to_disk=middle["disk"] / middle["to_device"],
        )
    shutil.rmtree(directory)


def _load(device: Device, directory: Path, targets: Shard, on_device: bool) -> float:
    """Seconds until all is there and checked."""
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


def _compare(found: Shard, wanted: Shard) -> None:
    for key, tensor in wanted.items():
        assert torch.equal(found[key].to(tensor.device), tensor), f"{key} was not loaded as it was saved"


def _read_by_the_disk(folder: Path, size: int, small: bool) -> float:
    yardstick = disk.Yardstick("threads", (1 if small or IS_FAKE else 4) * MIB, 4)
    files = folder / "yardstick"
    files.mkdir(exist_ok=True)
    return size / disk.read_rate(yardstick, files, size // yardstick.block * yardstick.block)
