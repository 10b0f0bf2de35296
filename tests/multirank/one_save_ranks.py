"""Ranks that load a directory into which another save publishes meanwhile."""

from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from saving_rank import failure_of, join, save, state, tell

from megatron_datastates.mcore import DataStatesSaveStrategy
from megatron_datastates.mcore.load import opening


def load_different_saves(root: str, folder: str) -> None:
    """Rank 0 opens the directory before the second save is published, rank 1 after it."""
    rank, _ = join()
    directory = Path(root, "ck")
    save(directory, state(1), DataStatesSaveStrategy(), "sync")
    early = opening.open_checkpoint(directory)
    save(directory, state(2), DataStatesSaveStrategy(), "sync")
    if rank == 0:
        opening._open = lambda directory: early  # type: ignore[assignment]
        early.read_objects(early.objects)  # as if it had read all that it needs
    error = failure_of(lambda: dist_checkpointing.load(state(-1), str(directory), validate_access_integrity=True))
    dist.barrier()
    tell(folder, error=error)
