"""Worlds of ranks on this machine, which save and load states on request.

A world imports Megatron once, and then runs one job after another.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.load.optimizer import Layout, make
from benchmarks.load.states import Model, Sharding, State, check, fill, make_state

_STAND_INS = Path(__file__).parents[2] / "recipes" / "cpu"


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


class World:
    """Processes of one gloo world, ready for jobs."""

    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="datastates-world-")
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            arguments = (rank, ranks, self._folder.name, theirs)
            process = context.Process(target=_serve, args=arguments)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def do(self, job: Job) -> list[RankResult]:
        """Runs a job on all ranks; raises RuntimeError if it fails on one."""
        for pipe in self._pipes:
            pipe.send(job)
        results = [pipe.recv() for pipe in self._pipes]
        failed = [text for text in results if isinstance(text, str)]
        if failed:
            raise RuntimeError(failed[0])
        return results

    def close(self) -> None:
        """Ends all ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has ended by itself
                pipe.send(None)
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(rank: int, ranks: int, folder: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")  # other packages warn in every load
    if not torch.cuda.is_available():  # torch_dist's save asks for a device
        sys.path.insert(0, str(_STAND_INS))
        importlib.import_module("stand_ins").install()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["MEGATRON_DATASTATES_STAGING_MEMORY"] = "64MiB"  # saves are not what is measured
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    while (job := _next_job(pipe)) is not None:
        try:
            pipe.send(_load(job) if job.verb == "load" else _save(job))
        except Exception as error:
            pipe.send(f"rank {rank}, {job}: {error!r}")
        gc.collect()  # cycles of DCP's planners keep states of gigabytes
        ctypes.CDLL(None).malloc_trim(0)
    dist.destroy_process_group()


def _next_job(pipe: Connection) -> Job | None:
    try:
        job: Job | None = pipe.recv()
    except EOFError:  # the process that sent the jobs has ended
        return None
    return job


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
    from megatron_datastates.pipeline import opening as indexes

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
    from megatron_datastates.pipeline import runs

    if not runs.is_ours(directory):
        return 0
    checkpoint = opening.open_checkpoint(directory)  # the one that was loaded from is still open
    read, checkpoint.costs.bytes_read = checkpoint.costs.bytes_read, 0
    return read


def _bytes(state: State) -> int:
    return sum(tensor.data.nbytes for tensor in state.values())
