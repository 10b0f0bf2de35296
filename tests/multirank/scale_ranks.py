"""Ranks of test_scale.py: real models and optimizers, whose checkpoints the simulator must predict."""

import functools
from pathlib import Path
from typing import Any

import model_ranks
from megatron.core.distributed import DistributedDataParallelConfig
from saving_rank import join, report


def save_in_buckets(root: str, layouts: list[dict[str, Any]], bucket_elements: int, folder: str) -> None:
    """Saves a fully parallel checkpoint of each layout, its optimizer in buckets of about this size."""
    join()
    model_ranks.DistributedDataParallelConfig = functools.partial(
        DistributedDataParallelConfig, overlap_grad_reduce=True, bucket_size=bucket_elements
    )
    for number, layout in enumerate(layouts):
        model_ranks.save_both(str(Path(root, str(number))), layout, "dp_reshardable", parallel=True)
    report(folder)
