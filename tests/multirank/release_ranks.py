"""Ranks of test_releases.py. `write` made tests/golden/megatron-*; `read` reads them with any release."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from saving_rank import join, make_directory, report, save

from megatron_datastates.mcore import DataStatesSaveStrategy

ROWS, COLUMNS = 8, 16


def state(weight: torch.Tensor) -> dict[str, Any]:
    """Returns this rank's part of a small state, with `weight` as the global tensor."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = weight.chunk(ranks)[rank].clone()
    return {
        "model": {"weight": ShardedTensor.from_rank_offsets("weight", mine, (0, rank, ranks), replica_id=0)},
        "rng": ShardedObject("rng", {"state": torch.arange(3)}, (1,), (0,), replica_id=rank),
        "iteration": 7,
        "names": ["a", "b"],
    }


def values() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def write(directory: str, folder: str) -> None:
    join()
    save(Path(directory), state(values()), DataStatesSaveStrategy(), "sync")
    report(folder)


def write_stock(directory: str, folder: str) -> None:
    """Saves the same state by Megatron as torch_dist."""
    join()
    make_directory(Path(directory))
    dist_checkpointing.save(state(values()), directory)
    report(folder)


def read(directory: str, folder: str) -> None:
    """Loads the state, strictly, the common state, and plain tensors."""
    rank, ranks = join()
    blank = state(torch.zeros(ROWS, COLUMNS))
    found, missing, unexpected = dist_checkpointing.load(blank, directory, strict=StrictHandling.RETURN_ALL)
    common = dist_checkpointing.load_common_state_dict(directory)
    plain = dist_checkpointing.load_plain_tensors(directory)
    assert torch.equal(found["model"]["weight"], values().chunk(ranks)[rank])
    assert torch.equal(found["rng"]["state"], torch.arange(3))
    assert (found["iteration"], found["names"]) == (7, ["a", "b"])
    assert (common["iteration"], common["names"]) == (7, ["a", "b"])
    assert {key for key, item in plain.items() if isinstance(item, torch.Tensor)} == {"weight"}, plain
    assert torch.equal(plain["weight"], values())
    report(folder, missing=sorted(missing), unexpected=sorted(unexpected))
