"""Whether two optimizers' buckets hold the same parts of a model at the same places."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import msgspec

from megatron_datastates.format.optimizer_map import OptimizerMap
from megatron_datastates.mcore.parallel import parallel_sizes
from megatron_datastates.pipeline.loading.load import Checkpoint

_SPLITS = ("tensor", "pipeline", "expert")  # the parallel sizes that split a model


def holds_the_same(stored: OptimizerMap, own: OptimizerMap, checkpoint: Checkpoint) -> bool:
    """Returns whether the buckets of a checkpoint and of this run hold the same shards.

    verl makes its request after it has loaded the model, whose sharded state no longer says where each
    parameter lies. Such a parameter must then be at the same place of its bucket, and the model be split as
    the stored one. So, too, where the stored map lacks its place.
    """
    buckets = (*own.buckets, *stored.buckets)
    unplaced = {(b.name, p.begin) for b in buckets for p in b.parameters if not p.shards}
    if unplaced and not _is_split_as(checkpoint.manifest.parallel):
        return False
    return _places(stored, unplaced) == _places(own, unplaced)


def _is_split_as(stored: dict[str, int]) -> bool:
    own = parallel_sizes()
    return bool(stored) and all(stored.get(name) == own.get(name) for name in _SPLITS)


def _places(described: OptimizerMap, unplaced: Set[tuple[str, int]]) -> list[Any]:
    """Returns what two maps have in common if their buckets hold the same shards.

    Names may differ, and so may main replicas: in a load, each rank describes its own view of them.
    """
    return sorted(
        (
            bucket.name,
            bucket.elements,
            sorted(
                (
                    p.begin,
                    p.end,
                    [
                        msgspec.structs.astuple(msgspec.structs.replace(s, main=True))
                        for s in p.shards
                        if (bucket.name, p.begin) not in unplaced
                    ],
                )
                for p in bucket.parameters
            ),
        )
        for bucket in described.buckets
    )
