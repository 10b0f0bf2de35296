"""Which parts of the global tensors Megatron's sharded state asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megatron_datastates.dcp.metadata import Boxes


def requested_boxes(items: Iterable[Any]) -> Boxes:
    """Returns the boxes that ShardedTensors request, with the prepended axes, which local_shape lacks."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    found: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for item in items:
        if isinstance(item, ShardedTensor) and getattr(item, "flattened_range", None) is None:
            shape = (1,) * item.prepend_axis_num + tuple(item.local_shape)
            found.setdefault(item.key, []).append((tuple(item.global_offset), shape))
    return {
        key: (np.array([o for o, _ in boxes], np.int64), np.array([s for _, s in boxes], np.int64))
        for key, boxes in found.items()
    }


def keys_read_beside(
    gathered: Sequence[Iterable[Any]], ranks: Sequence[int], rank: int, local_ranks: int
) -> frozenset[str]:
    """Returns the keys of ShardedTensors of which other ranks of this node request the same shards.

    Args:
        gathered: the state that each rank requests.
        ranks: their numbers in the world, in the same order. Nodes have `local_ranks` of them, one after
            the other; in another order, reads may be slower.
        rank: this one's number.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    beside: set[tuple[Any, ...]] = set()
    mine: set[tuple[Any, ...]] = set()
    for number, items in zip(ranks, gathered, strict=True):
        if number // local_ranks == rank // local_ranks:
            tensors = [item for item in items if isinstance(item, ShardedTensor)]
            shards = {(one.key, tuple(one.global_offset), tuple(one.local_shape)) for one in tensors}
            (mine if number == rank else beside).update(shards)
    alone = {key for key, *_ in mine - beside}
    return frozenset(key for key, *_ in mine if key not in alone)
