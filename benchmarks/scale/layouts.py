"""The layouts that benchmarks.scale measures: models, and how ranks share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.scale.models import Model, Parallel

LARGEST = 16_384  # ranks, which the bars are about

LLAMA = Model("Llama 3 70B", 80, 8192, 28672, heads=64, groups=8, vocabulary=128256)
DENSE = Model("dense 1T", 128, 25600, 102400, heads=160, groups=160, vocabulary=51200, gated=False)
EXPERTS = Model("MoE 1T", 64, 7168, 2048, heads=64, groups=8, vocabulary=163840, experts=384)
TINY = Model("tiny", 4, 64, 128, heads=8, groups=8, vocabulary=1000)
FEW = dataclasses.replace(TINY, name="tiny MoE", experts=8)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One training, and the line of the picture that it belongs to (None: it is a point by itself)."""

    name: str
    model: Model
    parallel: Parallel
    curve: str | None = None


def _grown(name: str, model: Model, first: Parallel, sizes: Sequence[int]) -> list[Layout]:
    """Returns layouts of one model with growing numbers of data-parallel ranks."""
    grown = [dataclasses.replace(first, dp=ranks // (first.tp * first.pp)) for ranks in sizes]
    return [Layout(f"{name}-{parallel.ranks}", model, parallel, name) for parallel in grown]


# Megatron's default buckets grow with the data-parallel size, so that each of 16,384 ranks has only tens of
# fragments. The last layout has buckets so small that there are six million fragments in all.
LAYOUTS = [
    *_grown("70B", LLAMA, Parallel(tp=8), (8, 512, 4096, LARGEST)),
    *_grown("1T", DENSE, Parallel(tp=8, pp=64), (512, 4096, LARGEST)),
    *_grown("1T-MoE", EXPERTS, Parallel(tp=8, ep=128), (512, 4096, LARGEST)),
    Layout(
        "1T-MoE-small-buckets-16384",
        EXPERTS,
        Parallel(tp=8, dp=2048, ep=128, bucket_elements=80_000_000),
    ),
]
QUICK = [
    *_grown("tiny", TINY, Parallel(tp=2, bucket_elements=20_000), (8,)),
    Layout("tiny-MoE-16", FEW, Parallel(tp=2, pp=2, dp=4, ep=4, bucket_elements=20_000)),
]
