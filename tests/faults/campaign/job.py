"""What ranks of the campaign do: save as a trainer does, note what happened, and judge what is there.

Runs in forked ranks. Notes are lines of JSON, written one by one: they outlive a SIGKILL.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

import megatron_datastates as ds
from megatron_datastates.config import MIB, Options
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.mcore.save.strategy import TrainingSaveStrategy
from megatron_datastates.pipeline.upkeep import left_overs, prune
from tests.faults.campaign import oracle

POLL_SECONDS = 0.003
# Small slots and few threads: several chunks of a small state, little memory to make in each new process.
SMALL = {"slot_size": MIB, "staging_memory": 8 * MIB, "copy_threads": 1, "write_threads": 2}


def place(root: Path, number: int) -> Path:
    return root / f"iter_{number:07d}"


class Notes:
    """What happened on this rank, in order."""

    def __init__(self, folder: str, name: str) -> None:
        self._path = Path(folder, f"{name}.notes")

    def __call__(self, event: str, number: int, iteration: int, text: str = "") -> None:
        note = {"event": event, "number": number, "iteration": iteration, "text": text}
        with self._path.open("a") as file:
            file.write(json.dumps(note | {"at": time.time()}) + "\n")


def notes_in(folder: Path) -> list[dict[str, Any]]:
    """Returns all ranks' notes, by time. A line that a kill cut short is left out."""
    found = []
    for path in folder.glob("*.notes"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                found.append(json.loads(line))
    return sorted(found, key=lambda note: float(note["at"]))


class Trainer:
    """Saves iterations into numbered directories of a run, one at a time or overlapping."""

    def __init__(self, root: Path, note: Notes, mode: str, *, tracker: bool = True, **options: Any) -> None:
        self._root, self._note, self._mode, self._tracker = root, note, mode, tracker
        self._strategy = TrainingSaveStrategy(
            Options.from_environment(SMALL | options), in_loop=lambda: mode == "async"
        )
        self._queue = AsyncCallsQueue()
        self._begun: dict[int, tuple[int, int]] = {}

    @property
    def unfinished(self) -> int:
        return int(self._queue.get_num_unfinalized_calls())

    def save(self, number: int, iteration: int) -> None:
        """Begins a save of that iteration; a synchronous one is done when this returns."""
        directory = place(self._root, number)
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
        sharded = oracle.state(iteration)
        self._note("begin", number, iteration)
        request = dist_checkpointing.save(
            sharded,
            str(directory),
            self._strategy,
            async_sharded_save=self._mode == "async",
            validate_access_integrity=False,  # it divides by the size of a tensor without elements
            **_QUEUE,
        )
        oracle.overwrite(sharded, lazy=False)
        if request is None:
            self._done(number, iteration)
            return
        self._begun[self._queue.schedule_async_request(request)] = number, iteration
        self.poll()
        ds.fence()
        oracle.overwrite(sharded, lazy=True)

    def poll(self) -> None:
        for call in self._queue.maybe_finalize_async_calls(blocking=False):
            self._done(*self._begun.pop(call))

    def finish(self, at_most: int = 0) -> None:
        """Polls until no more saves than that are under way."""
        while self.unfinished > at_most:
            time.sleep(POLL_SECONDS)
            self.poll()

    def _done(self, number: int, iteration: int) -> None:
        self._note("done", number, iteration)
        if self._tracker and dist.get_rank() == 0:
            (self._root / TRACKER_NAME).write_text(str(number))


_QUEUE = {"async_strategy": "mcore"}


def save_until_killed(recipe: dict[str, Any], folder: str) -> None:
    """Saves one iteration after the other as the recipe says; somebody kills this rank, or it ends."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    root, note = Path(recipe["root"]), Notes(folder, f"rank{rank}")
    first = Trainer(root, note, "sync")
    for number, iteration in recipe["before"]:
        first.save(number, iteration)
    note("armed", 0, 0)
    plan = recipe["plan"] if rank == recipe["victim"] else ""
    trainer = Trainer(root, note, recipe["mode"], faults=plan, **recipe["options"])
    for number, iteration in recipe["saves"]:
        trainer.save(number, iteration)
        trainer.finish(at_most=recipe["overlap"])
    trainer.finish()
    leave()


def look_and_save(recipe: dict[str, Any], folder: str) -> None:
    """Judges every directory; saves into the one under attack, sweeps what was left there, judges again."""
    dist.init_process_group("gloo")
    root, note = Path(recipe["root"]), Notes(folder, f"rank{dist.get_rank()}")
    candidates = recipe["candidates"]
    for number in recipe["numbers"]:
        write_verdict(note, "judged", number, oracle.judge(place(root, number), candidates))
    number, iteration = recipe["next"]
    trainer = Trainer(root, note, recipe["mode"])
    trainer.save(number, iteration)
    trainer.finish()
    if dist.get_rank() == 0:
        sweep(root)
    dist.barrier()
    write_verdict(note, "again", number, oracle.judge(place(root, number), [*candidates, iteration]))
    leave()


def leave() -> NoReturn:
    """Ends a rank whose work is done, with all others; an interpreter that ends as usual takes a second."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def write_verdict(note: Notes, event: str, number: int, verdict: oracle.Verdict) -> None:
    note(event, number, verdict.iteration or 0, json.dumps(dataclasses.asdict(verdict)))


def sweep(root: Path) -> None:
    """Removes what killed saves have left; no save is alive."""
    plan = prune.plan_prune(root, prune.RetentionRules(keep_last=1000, min_age_seconds=0.0))
    left_overs.remove_left_overs(plan.left_overs, 0.0)


def prune_until_killed(recipe: dict[str, Any], folder: str) -> None:
    """Runs `datastates prune` over and over, beside whoever saves."""
    root, note = Path(recipe["root"]), Notes(folder, "prune")
    rules = prune.RetentionRules(keep_last=recipe["keep_last"])
    while True:
        try:
            for one in prune.prune(root, rules, faults=recipe["plan"]):
                note("removed", one.number, 0)
            left_overs.remove_left_overs(prune.plan_prune(root, rules).left_overs)
        except DataStatesError as error:
            note("prune refused", 0, 0, str(error))
        except OSError as error:
            note("prune refused", 0, 0, f"{type(error).__name__}: {error}")
        time.sleep(0.002)


def files_in(directory: Path) -> Sequence[str]:
    return sorted(os.listdir(directory)) if directory.is_dir() else []
