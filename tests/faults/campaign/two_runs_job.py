"""Ranks of two runs that share a directory, and of those who load and prune beside them."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException

from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.upkeep import prune
from tests.faults.campaign import oracle
from tests.faults.campaign.job import Notes, Trainer, leave, place, write_verdict

_LOUD = (
    "does another job",
    "datastates prune",
    "is gone",
    "removed",
    "were not found",
    "are missing now",
    "No such file",
)


def save_beside(recipe: dict[str, Any], folder: str) -> None:
    """Saves as one of two runs. A save may fail, if it says why; the run goes on with its next one."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note = Notes(folder, f"run{recipe['run']}-rank{rank}")
    for (number, iteration), pause in zip(recipe["saves"], recipe["pauses"], strict=True):
        time.sleep(pause)
        trainer = Trainer(Path(recipe["root"]), Silent(), recipe["mode"])
        try:
            trainer.save(number, iteration)
            trainer.finish()
            note("done", number, iteration, f"rank {rank}")
        except FileNotFoundError as error:  # of Megatron's look at the directory, on rank 0
            note("lost", number, iteration, str(error))
            os._exit(3)
        except CheckpointingException as error:
            note("failed", number, iteration, f"rank {rank}")
            if not any(words in str(error) for words in _LOUD):
                note("violated", number, iteration, f"a save failed without a reason that helps: {error}")
    leave()


class Silent(Notes):
    """Notes nothing, for a trainer whose caller takes the notes."""

    def __init__(self) -> None:
        pass

    def __call__(self, event: str, number: int, iteration: int, text: str = "") -> None:
        pass


def watch(recipe: dict[str, Any], folder: str) -> None:
    """Loads what is published while others save. A load that a removal overtook may fail, but never lie."""
    dist.init_process_group("gloo")
    note, over = Notes(folder, "watch"), Path(folder, "over")
    while not over.exists():
        for number in recipe["numbers"]:
            directory = place(Path(recipe["root"]), number)
            before = _manifest(directory)
            if before is None:
                continue
            verdict = oracle.judge(directory, recipe["candidates"])
            same = _manifest(directory) == before
            if verdict.what == "violated" or (verdict.what == "refused" and same):
                note("violated", number, 0, f"beside the runs, {number} is {verdict}")
            write_verdict(note, "watched", number, verdict)
        time.sleep(0.01)
    leave()


def _manifest(directory: Path) -> bytes | None:
    try:
        return (directory / MANIFEST_NAME).read_bytes()
    except FileNotFoundError:
        return None


def prune_beside(recipe: dict[str, Any], folder: str) -> None:
    note, over, root = Notes(folder, "prune"), Path(folder, "over"), Path(recipe["root"])
    rules = prune.RetentionRules(keep_last=recipe["keep_last"])
    while not over.exists():
        with contextlib.suppress(DataStatesError, OSError):
            for one in prune.prune(root, rules):
                note("removed", one.number, 0)
        time.sleep(0.003)
    os._exit(0)
