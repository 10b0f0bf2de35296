"""What ranks do in the tests of tests/multirank and tests/faults: save and load small sharded states.

What belongs here: a state whose every byte follows from one number, saving it, and telling what happened.
What does not: launching and judging. Runs in forked ranks (`ranks.py`), with Megatron-Core, without its
training loop.
"""

import inspect
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

ROWS, COLUMNS = 6, 50_000  # of one rank's shard: 1.2 MB
# Requests for the queue used here; before 0.17 there was no other.
_CHOICE = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
MCORE_QUEUE: dict[str, Any] = {"async_strategy": "mcore"} if _CHOICE else {}


def join() -> tuple[int, int]:
    """Enters the world; gives (rank, ranks)."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def full_tensor(value: int, ranks: int) -> torch.Tensor:
    """The global tensor `weight` of the state with this value."""
    count = ranks * ROWS * COLUMNS
    return (torch.arange(count, dtype=torch.float32) + value).reshape(ranks * ROWS, COLUMNS)


def state(value: int, *, shards: int | None = None) -> dict[str, Any]:
    """This rank's part of the state. Give the number of shards of the world that saved it to load it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = (shards or ranks) * ROWS // ranks
    shard = full_tensor(value, shards or ranks)[rank * rows : (rank + 1) * rows].clone()
    same = torch.full((33,), value, dtype=torch.bfloat16)
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", shard, (0, rank, ranks), replica_id=0),
        "same": ShardedTensor.from_rank_offsets("same", same, replica_id=rank),
        "object": ShardedObject("object", {"value": value, "rank": 0}, (1,), (0,), replica_id=rank),
        "iteration": value,
    }


def assert_loads(directory: Path, value: int, *, shards: int | None = None) -> None:
    """The checkpoint is the whole state with this value, bit for bit. Collective."""
    wanted = state(value, shards=shards)
    blank = state(-1, shards=shards)
    found = dist_checkpointing.load(blank, str(directory))
    assert torch.equal(found["weight"], wanted["weight"].data), directory
    assert torch.equal(found["same"], wanted["same"].data), directory
    assert found["object"] == {"value": value, "rank": 0}
    assert found["iteration"] == value


def make_directory(directory: Path) -> None:
    """As Megatron does: rank 0 alone, nobody waits for it."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)


def save(directory: Path, sharded: dict[str, Any], strategy: Any, mode: str) -> None:
    """Saves through Megatron's entry point and, if `mode` is async, through its stock queue."""
    make_directory(directory)
    request = dist_checkpointing.save(
        sharded, str(directory), strategy, async_sharded_save=mode == "async", **MCORE_QUEUE
    )
    if request is not None:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(request)
        while queue.get_num_unfinalized_calls():
            queue.maybe_finalize_async_calls(blocking=False)
            time.sleep(0.005)


def wait_for(path: Path) -> None:
    """Returns when the file is there: how ranks meet without a collective call."""
    while not path.exists():  # the job's own time limit ends it
        time.sleep(0.01)


def failure_of(action: Callable[[], object]) -> str | None:
    """The text of the CheckpointingException that `action` raises, if it does."""
    try:
        action()
    except CheckpointingException as error:
        return str(error)
    return None


def tell(folder: str, **facts: Any) -> None:
    """Leaves what this rank has to say for the test to read (`told`)."""
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(facts))


def set_faults(plan: str, rank: int) -> None:
    """The options read from the environment carry `plan` on one rank, and nothing on the others."""
    if dist.get_rank() == rank:
        os.environ["MEGATRON_DATASTATES_FAULTS"] = plan


def clear_faults() -> None:
    os.environ.pop("MEGATRON_DATASTATES_FAULTS", None)
