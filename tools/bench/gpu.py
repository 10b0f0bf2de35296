"""What a save costs a GPU that trains: copy rate, time the trainer is held, device memory.

Compares the engine's copies with the least that such a copy can cost: a bare loop of asynchronous copies
into page-locked memory, through torch, of the same bytes. Needs a GPU, torch and numpy; prints JSON.
Run by gpu.sh, or alone: PYTHONPATH=. python tools/bench/gpu.py --gib 4 --folder /tmp
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_datastates.config import GIB, MIB, Options
from megatron_datastates.engine.staging import StagingEngine
from tests.gpu.device_save import DeviceSave, Tensors

SLOT = 4 * MIB


def describe_machine(folder: Path) -> dict[str, Any]:
    """Hardware and versions; nothing that names the machine."""
    properties = torch.cuda.get_device_properties(0)
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / GIB, 1),
        "cpu": cpu[0].split(":")[1].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB),
        "kernel": platform.release(),
        "file_system": file_system(folder),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def file_system(folder: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(inside)[1] if inside else "unknown"


def make_shard(gib: float) -> Tensors:
    """Mostly large tensors, and a thousand small ones, as a rank of a real model has."""
    count = max(int(gib * GIB) // (64 * MIB), 1)
    large = {f"large{i}": torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda") for i in range(count)}
    small = {f"small{i}": torch.zeros(8192, dtype=torch.uint8, device="cuda") for i in range(1000)}
    return large | small


def bare_copy_seconds(shard: Tensors) -> float:
    """A loop of asynchronous copies of a slot each into page-locked memory, on a stream of its own."""
    ring = torch.empty(16 * SLOT, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    begin, at = time.perf_counter(), 0
    with torch.cuda.stream(stream):
        for tensor in shard.values():
            for piece in tensor.split(SLOT):
                ring[at : at + len(piece)].copy_(piece, non_blocking=True)
                at = (at + SLOT) % len(ring)
    stream.synchronize()
    return time.perf_counter() - begin


def save_once(engine: StagingEngine, folder: Path, shard: Tensors) -> dict[str, float]:
    """Seconds of one save, by part; its file is removed."""
    torch.cuda.synchronize()
    save = DeviceSave(engine, folder, shard)
    save.fence()
    save.finish()
    times = save.save.times()
    save.path.unlink()
    return {
        "start": save.start_seconds,
        "fence": save.fence_seconds,
        "staging": times["staging"],
        "durable": times["durable"],
    }


def step_ms(matrix: torch.Tensor, is_over: Callable[[], bool]) -> float:
    """Mean time of a training-like step, of at least one."""
    begin, steps = time.perf_counter(), 0
    while steps == 0 or not is_over():
        for _ in range(20):
            torch.mm(matrix, matrix)
        torch.cuda.current_stream().synchronize()
        steps += 1
    return 1e3 * (time.perf_counter() - begin) / steps


def interference(engine: StagingEngine, folder: Path, shard: Tensors) -> dict[str, float]:
    """How much slower steps are while copies run."""
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    step_ms(matrix, lambda: True)
    end = time.perf_counter() + 0.5
    alone = step_ms(matrix, lambda: time.perf_counter() > end)
    save = DeviceSave(engine, folder, shard)
    beside = step_ms(matrix, lambda: save.save.times()["staging"] > 0)
    save.fence()
    save.finish()
    save.path.unlink()
    return {"step_alone_ms": alone, "step_beside_copies_ms": beside}


def measure(gib: float, repeats: int, folder: Path) -> dict[str, Any]:
    shard = make_shard(gib)
    total = sum(tensor.nbytes for tensor in shard.values())
    bare = statistics.median(bare_copy_seconds(shard) for _ in range(repeats + 1))
    engine = StagingEngine(Options(staging_memory=total + 64 * SLOT, slot_size=SLOT))
    save_once(engine, folder, shard)  # memory is page-locked, the layout's code is warm
    free = torch.cuda.mem_get_info()[0]
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    saves = [save_once(engine, folder, shard) for _ in range(repeats)]
    taken = max(free - torch.cuda.mem_get_info()[0], torch.cuda.max_memory_allocated() - held)
    median = {part: statistics.median(save[part] for save in saves) for part in saves[0]}
    steps = interference(engine, folder, shard)
    engine.close()
    small = StagingEngine(Options(staging_memory=64 * SLOT, slot_size=SLOT))
    save_once(small, folder, shard)
    streamed = save_once(small, folder, shard)
    small.close()
    return {
        "bytes": total,
        "repeats": repeats,
        "bare_copy_gb_per_s": total / bare / 1e9,
        "staging_gb_per_s": total / median["staging"] / 1e9,
        "staging_to_bare": bare / median["staging"],
        "held_ms": {"start": 1e3 * median["start"], "fence": 1e3 * median["fence"]},
        "device_bytes_allocated": taken,
        "durable_gb_per_s": total / median["durable"] / 1e9,
        "small_pool": {
            "slots": 64,
            "staging_gb_per_s": total / streamed["staging"] / 1e9,
            "fence_ms": 1e3 * streamed["fence"],
        },
        **steps,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="bytes of the shard (default 4)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu.py: there is no GPU here", file=sys.stderr)
        return 3
    torch.cuda.init()
    folder = Path(tempfile.mkdtemp(prefix="datastates-bench-", dir=arguments.folder))
    try:
        results = measure(arguments.gib, arguments.repeats, folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps({"machine": describe_machine(arguments.folder), **results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
