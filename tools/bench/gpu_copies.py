"""Copy rates of the engine beside bare loops, measured against memory: the disk has no part in them.

The engine drains into a back end that discards, and into files on tmpfs. A bare loop copies the same sources
into page-locked memory: one copy a tensor, and copies of a slot at most; the faster of the two is the bar.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpu_device import CONNECTIONS, Device, bytes_of, make_shard, make_small, runs_of
from gpu_driver import BareCopies
from gpu_saves import SMALL_POOL, Saving, Shard, Tell, fitting, medians, pool_for, rounds, tmpfs

from megatron_datastates.config import GIB, KIB, MIB

_SHARES = {"large": 0.5, "many": 0.75, "small": 1.0}  # of the time, when each case is over


def measure_copies(device: Device, folder: Path, small: bool, until: float, tell: Tell) -> None:
    """Few large tensors, thousands of 32 KiB, and thousands of 512 B to 8 KiB; in rounds, interleaved."""
    sizes, left_out = fitting([16 * MIB] if small else [GIB, 4 * GIB], device, host_copies=5.0)
    count = 100 if small else 20_000
    shards = {
        "large": make_shard(sizes[-1], 4 if small else 64),
        "many": make_shard(count * 32 * KIB, count),
        "small": make_small(count),
    }
    most = max(map(bytes_of, shards.values()))
    room = max(map(pool_for, shards.values()))
    memory = tmpfs(folder, 2 * most)
    if memory is None:
        left_out.append("tmpfs: /dev/shm is not there, or has no room")
    savings = {"discard": Saving(device, folder, room, backend="discard")}
    if memory is not None:
        savings["tmpfs"] = Saving(device, memory, room)
    savings["small_pool"] = Saving(device, folder, SMALL_POOL, backend="discard")
    try:
        tell(connections=CONNECTIONS, left_out=left_out)
        tell(pools={name: saving.make_pool() for name, saving in savings.items()})
        bare = BareCopies(device.driver, most, folder)
        tell(bare_loop_in=bare.language)
        begin = time.monotonic()
        for case, shard in shards.items():
            end = begin + _SHARES[case] * (until - begin)
            most_rounds = 1 if small else 15
            for values in _compare(savings, bare, shard, rounds(end, most_rounds)):
                tell(**{case: values})
        bare.close()
        for saving in savings.values():
            saving.close()
    finally:
        if memory is not None:
            shutil.rmtree(memory, ignore_errors=True)


def _compare(
    savings: dict[str, Saving], bare: BareCopies, shard: Shard, numbers: Iterable[int]
) -> Iterator[dict[str, float]]:
    """All contestants once a round; results so far. Ratios are medians of those of single rounds."""
    total, slot = bytes_of(shard), max(savings["discard"].slot_bytes, MIB)
    whole, slots = runs_of(shard, 1 << 40), runs_of(shard, slot)
    for saving in savings.values():
        saving.copied(shard)
    samples: list[dict[str, float]] = []
    for number in numbers:
        sample = {"bare": bare.seconds(whole), "bare_slots": bare.seconds(slots)}
        best = min(sample.values())
        for name, saving in savings.items():
            saved = saving.copied(shard)
            sample |= {name: saved["staging"], f"{name}_to_bare": best / saved["staging"]}
            sample[f"{name}_slot_wait"] = saved["slot_wait"]
        samples.append(sample)
        middle = medians(samples)
        yield (
            {"bytes": total, "tensors": len(shard), "repeats": number + 1}
            | {f"{name}_gb_per_s": total / middle[name] / 1e9 for name in ("bare", "bare_slots", *savings)}
            | {f"{name}_to_bare": middle[f"{name}_to_bare"] for name in savings}
            | {
                "discard_to_bare_least": min(one["discard_to_bare"] for one in samples),
                "small_pool_slot_wait_ms": 1e3 * middle["small_pool_slot_wait"],
            }
        )
