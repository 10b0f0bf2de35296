"""Ranks that save, load and save again for minutes, and take samples of what they hold."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.faults.campaign import oracle
from tests.faults.campaign.job import Notes, Trainer, leave, place

SAMPLE_SECONDS = 3.0
NUMBERS = (1, 2, 3)


def soak(recipe: dict[str, Any], folder: str) -> None:
    """Saves until rank 0 says that the time is over; at times loads, or takes a new directory."""
    dist.init_process_group("gloo")
    rank, root, rng = dist.get_rank(), Path(recipe["root"]), random.Random(recipe["seed"])
    note = Notes(folder, f"rank{rank}")
    trainers = {mode: Trainer(root, _Silent(), mode, tracker=False) for mode in ("sync", "async")}
    held: dict[int, int] = {}
    end, sample_at, saves = time.monotonic() + recipe["seconds"], 0.0, 0
    while _first_says(time.monotonic() < end):
        saves += 1
        number, mode = rng.choice(NUMBERS), rng.choice(["sync", "async", "async"])
        if rng.random() < 0.05:
            _remove(place(root, number))
        trainers[mode].save(number, saves)
        if mode == "async" and rng.random() < 0.5:
            saves += 1
            trainers[mode].save(number, saves)
        trainers[mode].finish()
        held[number] = saves
        note("cycle", number, saves, f"{mode} saves")
        if rng.random() < 0.4:
            _load(root, number, held, note)
        if time.monotonic() > sample_at:
            sample_at = time.monotonic() + SAMPLE_SECONDS
            note("sample", rank, saves, json.dumps(sample(root) | {"saves": saves}))
    leave()


class _Silent(Notes):
    """A long-lived trainer's notes would be what grows."""

    def __init__(self) -> None:
        pass

    def __call__(self, event: str, number: int, iteration: int, text: str = "") -> None:
        pass


def _first_says(go_on: bool) -> bool:
    reported = [go_on]
    dist.broadcast_object_list(reported, src=0)
    return reported[0]


def _remove(directory: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
    dist.barrier()


def _load(root: Path, number: int, held: dict[int, int], note: Notes) -> None:
    verdict = oracle.judge(place(root, number), [held[number] - 1, held[number]])
    note("cycle", number, held[number], "loads")
    if verdict.what != "whole" or verdict.iteration != held[number]:
        note("violated", number, held[number], f"iteration {number} is to be {held[number]} and is {verdict}")


def sample(root: Path) -> dict[str, int]:
    """Returns what this process holds, and the most files that a directory has beyond those of one save."""
    gc.collect()
    memory = _kib(Path("/proc/self/smaps_rollup"), ("Rss", "Pss"))
    files = max((len(os.listdir(path)) for path in root.iterdir()), default=0)
    return {
        "rss_kib": memory["Rss"],
        "pss_kib": memory["Pss"],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "files": files,
    }


def _kib(path: Path, names: tuple[str, ...]) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0][:-1]: int(words[1]) for words in lines if words[0][:-1] in names}
