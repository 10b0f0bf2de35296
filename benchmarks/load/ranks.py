"""What the ranks of benchmarks.load do: they save and load states on request."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.load.optimizer import Layout, make
from benchmarks.load.states import Model, Sharding, State, check, fill, make_state
from benchmarks.worlds import World


@dataclasses.dataclass(frozen=True)
class Job:
    """What every rank of a world does next."""

    verb: str  # save or load
    directory: str
    sharding: Sharding
    model: Model
    backend: str = ""  # of a save: datastates or torch_dist
    check: bool = False  # compare every element that was loaded
    optimizer: Layout | None = None  # its state is saved or loaded in place of the model's
    forget: bool = False  # drop what this process remembers of checkpoints that it has read, before the load


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What a rank reports of its job."""

    seconds: float  # from the moment that all ranks began
    bytes: int  # of its tensors
    peak_bytes: int = 0  # the greatest growth of resident memory, targets not included
    bytes_read: int = 0  # from disk, as our reader counts them


def start_world(ranks: int) -> World:
    """Starts ranks that save and load; they have little staging memory, as saves are not what is measured."""
    return World(ranks, _prepare, environment={"MEGATRON_DATASTATES_STAGING_MEMORY": "64MiB"})


def _prepare(arguments: Sequence[Any]) -> Callable[[Job], RankResult]:
    return lambda job: _load(job) if job.verb == "load" else _save(job)


def _save(job: Job) -> RankResult:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from megatron_datastates.mcore import DataStatesSaveStrategy

    state: dict[str, Any]
    if job.optimizer is not None:
        state, parts = make(job.optimizer, job.model, dist.get_rank())
        for part in parts:
            part.fill()
        size = sum(part.memory.nbytes for part in parts)
    else:
        tensors = make_state(job.sharding, job.model, dist.get_rank())
        for tensor in tensors.values():
            fill(tensor)
        state, size = {"state": tensors, "iteration": 1}, _bytes(tensors)
    Path(job.directory).mkdir(parents=True, exist_ok=True)
    strategy = DataStatesSaveStrategy() if job.backend == "datastates" else TorchDistSaveShardedStrategy()
    dist.barrier()
    begin = time.perf_counter()
    dist_checkpointing.save(state, job.directory, strategy)
    return RankResult(time.perf_counter() - begin, size)


def _load(job: Job) -> RankResult:
    from megatron.core import dist_checkpointing

    from megatron_datastates.mcore.load import opening
    from megatron_datastates.pipeline.runs import opening as indexes

    if job.forget:
        opening.forget()
        indexes._decoded.clear()
    state: dict[str, Any]
    checks: list[Callable[[], None]]
    if job.optimizer is not None:
        state, parts = make(job.optimizer, job.model, dist.get_rank())
        state.pop("map", None)
        memory, checks = [part.memory for part in parts], [part.check for part in parts]
    else:
        tensors = make_state(job.sharding, job.model, dist.get_rank())
        state, memory = {"state": tensors}, [tensor.data for tensor in tensors.values()]
        checks = [functools.partial(check, tensor) for tensor in tensors.values()]
    for target in memory:
        target.view(torch.uint8).fill_(0xA5)  # resident before anything is measured
    before = machine.status_bytes("VmRSS")
    machine.reset_peak()
    dist.barrier()
    begin = time.perf_counter()
    dist_checkpointing.load(state, job.directory)
    seconds = time.perf_counter() - begin
    peak = machine.status_bytes("VmHWM") - before
    if job.check:
        for look in checks:
            look()
    size = sum(target.nbytes for target in memory)
    return RankResult(seconds, size, peak, _take_bytes_read(job.directory))


def _take_bytes_read(directory: str) -> int:
    """Returns how many bytes loads of a directory have read from disk, and sets the count to zero."""
    from megatron_datastates.mcore.load import opening
    from megatron_datastates.pipeline.runs import runs

    if not runs.is_ours(directory):
        return 0
    checkpoint = opening.open_checkpoint(directory)  # the one that was loaded from is still open
    read, checkpoint.costs.bytes_read = checkpoint.costs.bytes_read, 0
    return read


def _bytes(state: State) -> int:
    return sum(tensor.data.nbytes for tensor in state.values())
