"""Ranks of test_mutations.py: every kind of training state changes as early as Megatron changes it."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject
from model_ranks import Layout, build, leaves, random_values, step
from saving_rank import MCORE_QUEUE, failure_of, join, make_directory, report, save

from megatron_datastates.config import Options
from megatron_datastates.mcore import DataStatesSaveStrategy
from megatron_datastates.mcore.save.strategy import TrainingSaveStrategy
from megatron_datastates.pipeline.loading.load import Checkpoint

# Slots of the smallest size: what shares a slot with eager bytes is copied with them. Fences begin copies.
SLOW = Options(slot_size=1 << 20, copy_limit=12_000_000, lazy_delay=3600.0)
MARK = -7.0


def contents(directory: Path) -> dict[str, str]:
    """Returns everything that a checkpoint holds, padding included, by key."""
    checkpoint = Checkpoint.open(directory)
    found = {key: checkpoint.read_tensor(key) for key in checkpoint.index.tensors}
    return dict(leaves(found | checkpoint.read_objects(checkpoint.index.objects), ""))


def paddings(state: Any) -> list[Any]:
    """Returns the tensors that fill gaps of buckets in a sharded state."""
    if isinstance(state, dict):
        mark = state.get("padding")
        if isinstance(mark, LocalNonpersistentObject) and mark.obj is True:
            return [item for key, item in state.items() if key != "padding"]
        return [found for item in state.values() for found in paddings(item)]
    return [found for item in state for found in paddings(item)] if isinstance(state, list) else []


def mutate_everything(root: str, layout: Layout, sharding: str, promise_all: bool, folder: str) -> None:
    """Saves to ROOT/before, then to ROOT/during, which is copied while everything changes."""
    rank, ranks = join()
    training = build(layout, sharding, random_values())
    step(training)  # from here on the optimizer's memory is known to change after a fence only
    args = Namespace(iteration=1, values=[1, 2])
    generators = tensor_parallel.get_cuda_rng_tracker().get_states()

    def state() -> dict[str, Any]:
        rng = {"torch": torch.get_rng_state(), "tracker": generators}
        return training.sharded() | {
            "args": args,
            "rng_state": ShardedObject("rng_state", rng, (ranks,), (rank,), replica_id=0),
        }

    save(Path(root, "before"), state(), DataStatesSaveStrategy(), "sync")
    make_directory(Path(root, "during"))
    strategy = (
        DataStatesSaveStrategy(assume_immutable=True, options=SLOW)
        if promise_all
        else TrainingSaveStrategy(options=SLOW)
    )
    sharded = state()
    padded = [(item.key, item.global_offset, item.data.shape) for item in paddings(sharded)]
    request = dist_checkpointing.save(
        sharded, str(Path(root, "during")), strategy, async_sharded_save=True, **MCORE_QUEUE
    )
    job = request.async_fn.publication.save
    under_way = job.times()["staging"] == 0

    args.iteration = 99
    args.values.append(3)
    for generator in generators.values():
        generator.fill_(7)
    buffers = [b for chunk in training.chunks for _, b in chunk.named_buffers() if b.is_floating_point()]
    for buffer in buffers:
        buffer.fill_(MARK)
    step(training)

    error = failure_of(request.execute_sync)
    different: list[str] = []
    zeros = None
    if error is None and rank == 0:
        before, during = contents(Path(root, "before")), contents(Path(root, "during"))
        different = sorted(key for key in before.keys() | during.keys() if before.get(key) != during.get(key))
        checkpoint = Checkpoint.open(Path(root, "during"))
        zeros = [bool((checkpoint.read_tensor(key, at, shape) == 0).all()) for key, at, shape in padded]
    report(
        folder,
        under_way=under_way,
        fence=job.fence_seconds,
        lazy=job.plan.lazy_bytes,
        eager=job.plan.eager_bytes,
        buffers=len(buffers),
        generators=len(generators),
        error=error,
        different=different,
        zeros=zeros,
    )
    dist.barrier()
