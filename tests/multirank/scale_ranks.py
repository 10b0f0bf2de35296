"""Ranks of test_scale.py: real models and optimizers, whose checkpoints the simulator must predict."""

from pathlib import Path
from typing import Any

import model_ranks
from saving_rank import join, report


def save_in_buckets(root: str, layouts: list[dict[str, Any]], bucket_elements: int, folder: str) -> None:
    """Saves a fully parallel checkpoint of each layout, its optimizer in buckets of about this size."""
    join()
    for number, layout in enumerate(layouts):
        layout = layout | {"bucket_size": bucket_elements}
        model_ranks.save_both(str(Path(root, str(number))), layout, "dp_reshardable", parallel=True)
    report(folder)
