"""Worlds of ranks on this machine: processes of one gloo group, which import Megatron once and then run jobs.

What belongs here: starting ranks, passing jobs to them and results back. What does not: what a job does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CPU_RECIPE = Path(__file__).parents[1] / "recipes" / "cpu"
Serve = Callable[[Any], Any]  # runs a job in a rank, and returns what the rank reports
_PATIENCE_SECONDS = 20.0  # for the other ranks, when one has failed
Prepare = Callable[[Sequence[Any]], Serve]  # makes that function in a rank, from the arguments of its world


class World:
    """Processes of one gloo world, ready for jobs.

    Args:
        ranks: how many.
        prepare: a function of a module; called once in each rank, it returns what runs each job.
        arguments: for `prepare`.
        environment: variables that are set in each rank first.
    """

    def __init__(
        self,
        ranks: int,
        prepare: Prepare,
        arguments: Sequence[Any] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="datastates-world-")
        self.is_dead = False
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            place = (rank, ranks, self._folder.name)
            everything = (place, theirs, prepare, arguments, environment or {})
            process = context.Process(target=_run_rank, args=everything)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """The process ids of all ranks."""
        return [process.pid for process in self._processes if process.pid is not None]

    def do(self, job: Any, limit_seconds: float | None = None) -> list[Any]:
        """Runs a job on all ranks and returns their reports.

        Raises:
            JobFailedError: it failed on a rank, or ran into the limit. If ranks then wait for others, all are
                killed, and this world `is_dead`.
        """
        for pipe in self._pipes:
            pipe.send(job)
        waiting = dict.fromkeys(self._pipes)
        failed: Failure | None = None
        while pipes := [pipe for pipe, result in waiting.items() if result is None]:
            ready = connection.wait(pipes, _PATIENCE_SECONDS if failed else limit_seconds)
            if not ready:
                self.kill()
                failed = failed or Failure(f"it did not end within {limit_seconds} s")
                break
            for pipe in pipes:
                if pipe in ready:
                    waiting[pipe] = result = self._receive(pipe)
                    failed = failed or (result if isinstance(result, Failure) else None)
        if failed:
            raise JobFailedError(job, failed.cause)
        return list(waiting.values())

    def kill(self) -> None:
        """Kills all ranks."""
        self.is_dead = True
        for process in self._processes:
            process.kill()

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            self.is_dead = True
            return Failure("a rank ended; its standard error says why")

    def close(self) -> None:
        """Ends all ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has ended by itself
                pipe.send(None)
        for process in self._processes:
            process.join(_PATIENCE_SECONDS)
            process.kill()  # one that does not end
            process.join()
        self._folder.cleanup()


class Failure:
    """What a rank reports in place of a result."""

    def __init__(self, cause: str) -> None:
        self.cause = cause


class JobFailedError(RuntimeError):
    """A job failed; `cause` says on which rank, and why."""

    def __init__(self, job: Any, cause: str) -> None:
        super().__init__(f"{job}: {cause}")
        self.cause = cause


def install_stand_ins() -> None:
    """Lets Megatron run where there is no GPU; does nothing where there is one."""
    if not torch.cuda.is_available():
        sys.path.insert(0, str(CPU_RECIPE))
        importlib.import_module("stand_ins").install()
        torch.accelerator.is_available = lambda: False  # or DCP's stagers would make a stream of the GPU


def release_memory() -> None:
    """Returns freed memory to the system; cycles of DCP's planners keep states of gigabytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _run_rank(
    place: tuple[int, int, str],
    pipe: Connection,
    prepare: Prepare,
    arguments: Sequence[Any],
    environment: dict[str, str],
) -> None:
    rank, ranks, folder = place
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)} | environment  # as torchrun does
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")  # other packages warn in every load
    install_stand_ins()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    serve = prepare(arguments)
    while (job := _next_job(pipe)) is not None:
        try:
            pipe.send(serve(job))
        except Exception as error:
            pipe.send(Failure(f"rank {rank}: {error!r}"))
        release_memory()
    with contextlib.suppress(AttributeError):  # not every one has something to close
        serve.close()  # type: ignore[attr-defined]
    dist.destroy_process_group()


def _next_job(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the process that sent the jobs has ended
        return None
