"""The distributed optimizer's buckets (`dp_reshardable`), and the parts of them that each rank stores.

The buckets come from Megatron's own planner.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from benchmarks.scale.models import Parallel, Weight
from megatron_datastates.format.values import OPTIMIZER_MAP_NAME, Fragment

STATES = ("param", "exp_avg", "exp_avg_sq")
_BUFFER = "gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
WHOLE = "shard_0_1"  # ends the key of an object that has no other shards


class Piece(NamedTuple):
    """Consecutive elements of a bucket that one rank stores: of one parameter, or of the padding after it."""

    start: int
    size: int
    is_padding: bool


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One bucket of a distributed optimizer's buffer; ranks hold equal ranges of it."""

    starts: list[int]  # of parameters, elements
    ends: list[int]
    elements: int  # padded to a multiple of the ranks
    unpadded: int

    def pieces(self, rank: int, ranks: int) -> Iterator[Piece]:
        """Yields what a rank stores, as DistributedOptimizer.sharded_param_state_dp_reshardable does."""
        each = self.elements // ranks
        first, end = rank * each, (rank + 1) * each
        at = first
        for i in range(bisect.bisect_right(self.ends, first), len(self.starts)):
            start = max(self.starts[i], first)
            if start >= end:
                break
            if start > at:
                yield Piece(at, start - at, True)
            at = min(self.ends[i], end)
            yield Piece(start, at - start, False)
        if at < end and at < self.unpadded:
            yield Piece(at, end - at, True)


def plan_buckets(weights: Sequence[Weight], parallel: Parallel, pp: int, shards: int) -> list[Bucket]:
    """Plans as Megatron does with --overlap-grad-reduce, where all stages but the first have one bucket."""
    size = parallel.bucket_elements or max(40_000_000, 1_000_000 * parallel.dp)
    params = [torch.empty(weight.elements, device="meta") for weight in weights]
    layout = DistributedOptimizer._compute_per_buffer_param_layout(
        params, size if pp == 0 else None, shards, DistributedDataParallelConfig()
    )
    buckets = [
        Bucket([], [], end - start, unpadded)
        for (start, end), unpadded in zip(
            layout.bucket_indices, layout.per_bucket_numel_unpadded, strict=True
        )
    ]
    for start, end, number in layout.param_index_map.values():  # in the order of the buffer
        buckets[number].starts.append(start - layout.bucket_indices[number][0])
        buckets[number].ends.append(end - layout.bucket_indices[number][0])
    return buckets


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One distributed optimizer of a rank, whose state `shards` ranks share."""

    prefix: str
    buckets: list[Bucket]
    shards: int

    def fragments(self, rank: int) -> Iterator[tuple[Fragment, bool]]:
        """Yields what a rank stores, and whether it is padding, which Megatron makes anew at every save."""
        for number, bucket in enumerate(self.buckets):
            keys = [f"{self.prefix}.{_BUFFER}.bucket_idx_{number}.{state}" for state in STATES]
            for piece in bucket.pieces(rank, self.shards):
                for key in keys:
                    yield (
                        Fragment(key, "float32", (bucket.unpadded,), (piece.start,), (piece.size,)),
                        piece.is_padding,
                    )

    def elements(self, rank: int) -> int:
        """Returns how many elements of one state a rank stores."""
        return sum(piece.size for bucket in self.buckets for piece in bucket.pieces(rank, self.shards))

    def objects(self) -> list[str]:
        """Returns the keys of the objects that the optimizer's first rank stores."""
        names = ("optimizer", "per_bucket_numel", "per_bucket_numel_unpadded", OPTIMIZER_MAP_NAME)
        return [f"{self.prefix}.{name}/{WHOLE}" for name in names]
