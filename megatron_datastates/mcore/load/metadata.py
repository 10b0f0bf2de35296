"""Which parts of the global tensors Megatron's sharded state asks for."""

from __future__ import annotations

from collections.abc import Iterable
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
