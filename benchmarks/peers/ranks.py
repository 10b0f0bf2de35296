"""What the ranks of benchmarks.peers do: saves and loads by any contender, timed."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.peers.contenders import Contender
from benchmarks.peers.megatron import CONTENDERS
from benchmarks.peers.states import Model, State
from benchmarks.rounds import stopwatch
from benchmarks.worlds import World

_POLL_SECONDS = 0.01  # between a trainer's polls
_PATIENCE_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Job:
    """What every rank of a world does next: one save, or one load."""

    verb: str  # introduce, save or load
    contender: str
    directory: str = ""
    work_seconds: float = 0.0  # of a save: how long the pause is that stands for forward and backward
    steps: int = 0  # of a load: how many steps the state had been through


@dataclasses.dataclass(frozen=True)
class Save:
    """Seconds of one save on one rank."""

    parts: dict[str, float]  # prepare, call, fence, polls: in all of them the trainer waits
    step: float  # of the step that follows, which the program may slow down
    finished: float  # from the beginning until the program said that the checkpoint is complete
    durable: float  # and until all its files were synced, by the program or by this benchmark
    steps: int  # that the saved state had been through

    @property
    def held(self) -> float:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Load:
    """One load on one rank."""

    seconds: float
    difference: str | None  # what was not loaded as it was saved


class Ranks:
    """One rank's state and its contenders, each made when it is first asked for."""

    def __init__(self, model: Model) -> None:
        self.state = State(model, dist.get_rank(), dist.get_world_size())
        self.state.step()  # from now on, its optimizer is known to step
        self._made: dict[str, Contender] = {}

    def __call__(self, job: Job) -> Any:
        contender = self._contender(job.contender)
        if job.verb == "introduce":
            return contender.facts
        if job.verb == "save":
            return self._save(contender, Path(job.directory), job.work_seconds)
        return self._load(contender, Path(job.directory), job.steps)

    def close(self) -> None:
        """Ends the processes and threads of all contenders."""
        for contender in self._made.values():
            contender.close()

    def _contender(self, name: str) -> Contender:
        if name not in self._made:
            self._made[name] = CONTENDERS[name]()
        return self._made[name]

    def _save(self, contender: Contender, directory: Path, work_seconds: float) -> Save:
        parts: dict[str, float] = {}
        steps = self.state.steps
        dist.barrier()
        begin = time.perf_counter()
        with stopwatch(parts, "prepare"):
            prepared = contender.prepare(self.state)
        with stopwatch(parts, "call"):
            contender.start(prepared, directory)
        del prepared
        with stopwatch(parts, "polls"):
            is_complete = contender.poll()
        finished = time.perf_counter() - begin
        if not is_complete:
            time.sleep(work_seconds)
        with stopwatch(parts, "fence"):
            contender.fence()
        step: dict[str, float] = {}
        with stopwatch(step, "seconds"):
            self.state.step()
        if not is_complete:
            self._poll(contender, parts)
            finished = time.perf_counter() - begin
        begin_of_sync = time.perf_counter()
        dist.barrier()
        if self.state.rank == 0:
            _sync(directory)
        dist.barrier()
        durable = finished + time.perf_counter() - begin_of_sync
        return Save(parts, step["seconds"], finished, durable, steps)

    def _poll(self, contender: Contender, parts: dict[str, float]) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        is_complete = False
        while not is_complete:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the save did not end within {_PATIENCE_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
            with stopwatch(parts, "polls"):
                is_complete = contender.poll()

    def _load(self, contender: Contender, directory: Path, steps: int) -> Load:
        self.state.poison()
        dist.barrier()
        begin = time.perf_counter()
        contender.load(self.state, directory)
        seconds = time.perf_counter() - begin
        difference = self.state.difference(steps)
        self.state.steps = steps
        return Load(seconds, difference)


def _sync(directory: Path) -> None:
    """Syncs every file and folder: what is durable already takes no time."""
    for path in (*directory.rglob("*"), directory, directory.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def start_world(ranks: int, model: Model) -> World:
    """Starts ranks that hold a state of this model."""
    # A name that resolves everywhere: DCP's process looks up its host's name otherwise.
    return World(ranks, _prepare, [model], {"MASTER_ADDR": "127.0.0.1"})


def _prepare(arguments: Sequence[Any]) -> Callable[[Job], Any]:
    return Ranks(arguments[0])
