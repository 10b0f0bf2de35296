"""Measures copy rates of the engine and of bare loops, into memory: the disk plays no part.

The engine discards what it writes, and into files on tmpfs. A bare loop copies the same sources
into page-locked memory, with one copy a tensor, and with copies of at most a slot; the faster of the two is
the reference.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from benchmarks.gpu.context import Part
from benchmarks.gpu.device import make_shard, make_small, spans_of
from benchmarks.gpu.driver import BareCopies
from benchmarks.gpu.environment import CONNECTIONS_LIMIT
from benchmarks.gpu.memory import NO_TMPFS, fitting, pool_for, tmpfs
from benchmarks.gpu.saves import SMALL_POOL_BYTES, DeviceSaves
from benchmarks.rounds import medians
from benchmarks.states import Tensors, bytes_of
from megatron_datastates.config import GIB, KIB, MIB

_SHARES = {"large": 0.5, "many": 0.75, "small": 1.0}  # of the part's time that is over when a case ends


def measure_copies(part: Part) -> None:
    """Reports rates for few large tensors, thousands of 32 KiB, and thousands of 512 B to 8 KiB."""
    sizes, left_out = fitting([16 * MIB] if part.is_small else [GIB, 4 * GIB], part.device, host_copies=5.0)
    count = 100 if part.is_small else 20_000
    shards = {
        "large": make_shard(sizes[-1], 4 if part.is_small else 64),
        "many": make_shard(count * 32 * KIB, count),
        "small": make_small(count),
    }
    most = max(map(bytes_of, shards.values()))
    pool = max(map(pool_for, shards.values()))
    with tmpfs(part.folder, 2 * most) as memory:
        contenders = {"discard": DeviceSaves(part.device, part.folder, pool, discard=True)}
        if memory is None:
            left_out.append(NO_TMPFS)
        else:
            contenders["tmpfs"] = DeviceSaves(part.device, memory, pool)
        contenders["small_pool"] = DeviceSaves(part.device, part.folder, SMALL_POOL_BYTES, discard=True)
        part.report(connections=CONNECTIONS_LIMIT, left_out=left_out)
        part.report(pools={name: saves.make_pool() for name, saves in contenders.items()})
        bare = BareCopies(part.device.driver, most, part.folder)
        part.report(bare_loop_in=bare.language)
        begin = time.monotonic()
        for case, shard in shards.items():
            end = begin + _SHARES[case] * (part.deadline - begin)
            for values in compare(contenders, bare, shard, part.rounds(1 if part.is_small else 15, end)):
                part.report(**{case: values})
        bare.close()
        for saves in contenders.values():
            saves.close()


def compare(
    contenders: dict[str, DeviceSaves], bare: BareCopies, shard: Tensors, rounds: Iterable[int]
) -> Iterator[dict[str, float]]:
    """Runs all contenders once a round; yields the results so far, with medians of each round's ratios."""
    total, slot = bytes_of(shard), max(contenders["discard"].slot_bytes, MIB)
    whole, slots = spans_of(shard, 1 << 40), spans_of(shard, slot)
    for saves in contenders.values():
        saves.copied(shard)
    samples: list[dict[str, float]] = []
    for number in rounds:
        sample = {"bare": bare.seconds(whole), "bare_slots": bare.seconds(slots)}
        best = min(sample.values())
        for name, saves in contenders.items():
            saved = saves.copied(shard)
            sample |= {name: saved["staging"], f"{name}_to_bare": best / saved["staging"]}
            sample[f"{name}_slot_wait"] = saved["slot_wait"]
        samples.append(sample)
        middle = medians(samples)
        yield (
            {"bytes": total, "tensors": len(shard), "repeats": number + 1}
            | {f"{name}_gb_per_s": total / middle[name] / 1e9 for name in ("bare", "bare_slots", *contenders)}
            | {f"{name}_to_bare": middle[f"{name}_to_bare"] for name in contenders}
            | {
                "discard_to_bare_least": min(one["discard_to_bare"] for one in samples),
                "small_pool_slot_wait_ms": 1e3 * middle["small_pool_slot_wait"],
            }
        )
