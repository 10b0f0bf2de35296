"""Ranks of test_restart.py: what an in-process restart does to Megatron's queue and to torch.distributed."""

import os
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from saving_rank import (
    MCORE_QUEUE,
    assert_loads,
    join,
    make_directory,
    names_left,
    report,
    save,
    state,
    wait_for,
)

from megatron_datastates.config import Options
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.mcore import DataStatesSaveStrategy
from megatron_datastates.pipeline.loading.load import Checkpoint

SLOW = Options(copy_limit=2_000_000, write_limit=1_000_000)


def begin_anew(name: str, ranks: list[int]) -> None:
    """Forms a new world of some ranks of the old one, renumbered; the others leave."""
    old = int(os.environ["RANK"])
    dist.destroy_process_group()
    if old in ranks:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(name, store), rank=ranks.index(old), world_size=len(ranks)
        )


def abort_and_begin_anew(root: str, folder: str) -> None:
    """Aborts the queue in mid-save, as reset_persistent_async_worker does, and saves in a new world."""
    join()
    whole, torn, later = (Path(root, name) for name in ("whole", "torn", "later"))
    save(whole, state(1), DataStatesSaveStrategy(options=SLOW), "sync")
    make_directory(torn)
    queue = AsyncCallsQueue()
    strategy = DataStatesSaveStrategy(assume_immutable=True, options=SLOW)
    queue.schedule_async_request(
        dist_checkpointing.save(state(2), str(torn), strategy, async_sharded_save=True, **MCORE_QUEUE)
    )
    queue.maybe_finalize_async_calls(blocking=False)
    dist.barrier()  # so that both ranks are in the middle of it
    queue.close(abort=True)
    left = queue.get_num_unfinalized_calls()
    begin_anew("again", [1, 0])
    FENCE.wait("nothing of the aborted save may hold the trainer")
    save(later, state(3), DataStatesSaveStrategy(options=SLOW), "async")
    assert_loads(later, 3)
    assert_loads(whole, 1)
    report(
        folder,
        left=left,
        torn=names_left(torn),
        runs=[Checkpoint.open(path).manifest.run_id for path in (whole, later)],
        ordinals=[Checkpoint.open(path).manifest.ordinal for path in (whole, later)],
    )


def restart_without_queue(root: str, folder: str) -> None:
    """Saves again with one rank fewer after ranks were interrupted at different saves."""
    rank, _ = join()
    strategy = DataStatesSaveStrategy()
    save(Path(root, "first"), state(1), strategy, "sync")
    if rank == 1:  # further than its peers: it had started a save that never ends
        strategy.async_save({}, Path(root, "never"))
    begin_anew("fewer", [2, 1])
    if rank == 0:  # serves the store of the new world
        wait_for(Path(folder, "survivor0"))
        wait_for(Path(folder, "survivor1"))
        return
    save(Path(root, "second"), state(2), strategy, "sync")
    assert_loads(Path(root, "second"), 2)
    dist.barrier()
    Path(folder, f"survivor{dist.get_rank()}").touch()
