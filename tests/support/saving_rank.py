"""What ranks do in the tests of tests/multirank and tests/faults: save and load small sharded states.

What belongs here: a state whose every byte follows from one number, saving it, and reporting to the test.
What does not: launching ranks and judging what they report. Runs in forked ranks (`ranks.py`), with
Megatron-Core and without its training loop.
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

from megatron_datastates.pipeline.saver_pool import directories_at_work

ROWS, COLUMNS = 6, 50_000  # of one rank's shard: 1.2 MB
# Asks for requests that AsyncCallsQueue accepts; before 0.17 there was no other kind.
_CHOICE = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
MCORE_QUEUE: dict[str, Any] = {"async_strategy": "mcore"} if _CHOICE else {}


def join() -> tuple[int, int]:
    """Initializes torch.distributed; returns this rank and the number of ranks."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def full_tensor(value: int, ranks: int) -> torch.Tensor:
    """Returns the global tensor `weight` of the state with this value."""
    count = ranks * ROWS * COLUMNS
    return (torch.arange(count, dtype=torch.float32) + value).reshape(ranks * ROWS, COLUMNS)


def state(value: int, *, shards: int | None = None) -> dict[str, Any]:
    """Returns this rank's part of the state with this value.

    `shards`: the number of ranks that saved it, where other ranks load it.
    """
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
    """Checks that the checkpoint is the whole state with this value, bit for bit. Collective."""
    wanted = state(value, shards=shards)
    blank = state(-1, shards=shards)
    found = dist_checkpointing.load(blank, str(directory))
    assert torch.equal(found["weight"], wanted["weight"].data), directory
    assert torch.equal(found["same"], wanted["same"].data), directory
    assert found["object"] == {"value": value, "rank": 0}
    assert found["iteration"] == value


def make_directory(directory: Path) -> None:
    """Makes the directory as Megatron does: on rank 0 only, and no rank waits for it."""
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


def names_left(directory: Path) -> list[str]:
    """Returns what a directory holds once no rank's thread removes files of failed saves. Collective."""
    deadline = time.monotonic() + 30.0
    while directories_at_work() and time.monotonic() < deadline:
        time.sleep(0.01)
    dist.barrier()
    return sorted(os.listdir(directory))


def wait_for(path: Path) -> None:
    """Returns once the file exists: a rendezvous without a collective call."""
    while not path.exists():  # ended by the job's time limit
        time.sleep(0.01)


def failure_of(action: Callable[[], object]) -> str | None:
    """Runs `action`; returns the text of the CheckpointingException that it raised, if it did."""
    try:
        action()
    except CheckpointingException as error:
        return str(error)
    return None


def report(folder: str, **facts: Any) -> None:
    """Writes FOLDER/rankN.json, which `World.run` returns to the test."""
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(facts))


def set_faults(plan: str, rank: int) -> None:
    """Sets the fault plan in the environment of one rank; options made later on that rank carry it."""
    if dist.get_rank() == rank:
        os.environ["MEGATRON_DATASTATES_FAULTS"] = plan


def clear_faults() -> None:
    os.environ.pop("MEGATRON_DATASTATES_FAULTS", None)
