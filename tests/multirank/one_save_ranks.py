"""Ranks that load a directory into which another save publishes meanwhile."""

from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from saving_rank import failure_of, join, save, state, tell

from megatron_datastates.mcore import DataStatesSaveStrategy
from megatron_datastates.mcore.load import opening


def load_different_saves(root: str, folder: str) -> None:
    """Rank 0 opens another save than rank 1, as if one had been published between the two."""
    rank, _ = join()
    for name, value in (("one", 1), ("other", 2)):
        save(Path(root, name), state(value), DataStatesSaveStrategy(), "sync")
    if rank == 0:
        original = opening._open
        opening._open = lambda directory: original(Path(root, "other"))  # type: ignore[assignment]
    error = failure_of(lambda: dist_checkpointing.load(state(-1), str(Path(root, "one"))))
    dist.barrier()
    tell(folder, error=error)
