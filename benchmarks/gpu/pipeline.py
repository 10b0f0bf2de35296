"""Measures whole saves until they are published, with the product's defaults and with a small pool."""

from __future__ import annotations

from benchmarks.gpu.context import Part
from benchmarks.gpu.device import make_shard
from benchmarks.gpu.memory import fitting
from benchmarks.gpu.saves import SMALL_POOL_BYTES, DeviceSaves
from benchmarks.rounds import medians
from benchmarks.states import bytes_of
from megatron_datastates.config import GIB, MIB


def measure_pipeline(part: Part) -> None:
    """Reports for each pool how long the trainer is held, rates, and when the save is published."""
    sizes, left_out = fitting([16 * MIB] if part.is_small else [GIB, 4 * GIB], part.device, part.folder)
    shard = make_shard(sizes[-1], 20 if part.is_small else 500)
    total = bytes_of(shard)
    pools = {"default_pool": SMALL_POOL_BYTES if part.is_small else 0, "small_pool": SMALL_POOL_BYTES}
    contenders = {name: DeviceSaves(part.device, part.folder, pool) for name, pool in pools.items()}
    part.report(bytes=total, tensors=len(shard), left_out=left_out)
    for saves in contenders.values():
        saves.make_pool()
        saves.copied(shard)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in part.rounds(1 if part.is_small else 5):
        for name, saves in contenders.items():
            samples[name].append(saves.published(shard))
            middle = medians(samples[name])
            values = {
                "repeats": number + 1,
                "held_ms": 1e3 * middle["held"],
                "held_with_polls_ms": 1e3 * middle["held_with_polls"],
                "staging_gb_per_s": total / middle["staging"] / 1e9,
                "durable_gb_per_s": total / middle["durable"] / 1e9,
                "published_seconds": middle["published"],
            }
            part.report(**{name: values})
    for saves in contenders.values():
        saves.close()
