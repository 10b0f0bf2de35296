"""SIGKILL of one rank or of all, at named points and at random times, while saves run.

A round: ranks save into a run that holds whole checkpoints, perhaps two saves at once, perhaps with
`datastates prune` beside them; a kill ends them. Then other processes judge every directory, save into the
one under attack, sweep, and judge that once more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from megatron_datastates.engine.faults import REMOVAL_OPERATIONS, SMALL_FILE_OPERATIONS
from tests.faults.campaign.history import History
from tests.faults.campaign.job import notes_in, place
from tests.faults.campaign.oracle import Verdict
from tests.faults.campaign.tally import Campaign, Tally
from tests.support.ranks import Job

ROUNDS = 620  # most of them kill; the rest end before their point is reached
JOB_SECONDS = 120.0  # a job that runs longer hangs
MODULE = "tests.faults.campaign.job"
NEXT = 900  # the iteration of the save that follows
# Operations and how often they happen in a save of the oracle's state, as cuda/os/faults.h names them.
OF_EVERY_RANK = {"open": 1, "reserve": 1, "write": 5, "truncate": 1, "sync": 1, "sync directory": 1}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one round does."""

    ranks: int
    victim: int
    point: str  # where it is killed; empty for a random time
    wait_seconds: float  # after the save that is to be interrupted has begun
    interrupted: int  # which save of the sequence that is
    kills_all: bool
    peers_live_seconds: float
    has_prune: bool
    prune_point: str
    recipe: dict[str, Any]
    judges: int


def plan(rng: random.Random, root: Path) -> Plan:
    ranks = 4 if rng.random() < 0.12 else 2
    victim = rng.randrange(ranks)
    before = [(number, 10 + number) for number in range(1, rng.randint(2, 3))]
    pattern = rng.choice(["new", "again", "mixed", "old and new"])
    numbers = {
        "new": [2, 3, 4, 5],
        "again": [len(before)] * 4,
        "mixed": [2, 2, 3, 3],
        "old and new": [rng.randint(1, 3) for _ in range(4)],
    }[pattern]
    by_point = rng.random() < 0.6
    interrupted = rng.randrange(len(numbers) - 1)
    mode = rng.choice(["sync", "async", "async"])
    return Plan(
        ranks=ranks,
        victim=victim,
        point=_point(rng, victim, interrupted) if by_point else "",
        wait_seconds=rng.random() ** 2 * 0.25,
        interrupted=interrupted,
        kills_all=rng.random() < 0.5,
        peers_live_seconds=rng.choice([0.0, 0.02, 0.3]),
        has_prune=rng.random() < 0.35,
        prune_point=_point_of_prune(rng) if rng.random() < 0.2 else "",
        recipe={
            "root": str(root),
            "before": before,
            "saves": list(zip(numbers, range(100, 100 + len(numbers)), strict=True)),
            "mode": mode,
            "overlap": rng.choice([0, 1, 2]) if mode == "async" else 0,
            "victim": victim,
            "options": {"write_limit": 8_000_000} if rng.random() < 0.25 else {},
        },
        judges=rng.choice([1, 1, 2, 2, 2, 4]),
    )


def _point_of_prune(rng: random.Random) -> str:
    return f"{rng.choice(REMOVAL_OPERATIONS)}:{rng.randint(1, 3)}:kill"


def _point(rng: random.Random, victim: int, interrupted: int) -> str:
    if victim == 0 and rng.random() < 0.6:
        return f"{rng.choice(SMALL_FILE_OPERATIONS)}:{interrupted + 1}:kill"
    name = rng.choice(sorted(OF_EVERY_RANK))
    return f"{name}:{OF_EVERY_RANK[name] * interrupted + rng.randint(1, OF_EVERY_RANK[name])}:kill"


def run(campaign: Campaign) -> Tally:
    return campaign.play("kills", ROUNDS, lambda *one: _Round(campaign, *one).play())


class _Round:
    def __init__(
        self, campaign: Campaign, tally: Tally, round_: int, rng: random.Random, folder: Path
    ) -> None:
        self._forge, self._tally, self._round = campaign.forge, tally, round_
        self._folder, self._root = folder, folder / "run"
        self._plan = plan(rng, self._root)

    def play(self) -> None:
        self._root.mkdir(parents=True)
        exits = self._kill()
        killed = exits.count(-signal.SIGKILL)
        how = f"at {self._plan.point.split(':')[0]}" if self._plan.point else "at a random time"
        self._tally.outcomes["ranks killed"] += killed
        self._tally.count(f"killed {how}" if killed else "ended before the kill")
        history = History(notes_in(self._folder / "saving"))
        if self._plan.has_prune:
            self._tally.outcomes["removed by prune"] += len(history.removed)
        self._judge(history)

    def _start(self, name: str, ranks: int, recipe: dict[str, Any], logs: Path) -> Job:
        notes = self._folder / logs.parts[-1].partition("-")[0]
        notes.mkdir(exist_ok=True)
        return self._forge.start(f"{MODULE}:{name}", ranks=ranks, arguments=[recipe, str(notes)], logs=logs)

    # -- the job that dies ------------------------------------------------------------------------------

    def _kill(self) -> list[int]:
        plan, logs = self._plan, self._folder / "saving"
        job = self._start("save_until_killed", plan.ranks, plan.recipe | {"plan": plan.point}, logs)
        prune = None
        if plan.has_prune:
            recipe = {"root": str(self._root), "keep_last": 1, "plan": plan.prune_point}
            prune = self._start("prune_until_killed", 1, recipe, self._folder / "saving-prune")
        try:
            if not plan.point:
                self._await_begin(job)
                time.sleep(plan.wait_seconds)
                victims = job.pids if plan.kills_all else [job.pids[plan.victim]]
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError):  # it has ended
                        os.kill(pid, signal.SIGKILL)
            self._await_death(job)
            if plan.point and not plan.kills_all:
                time.sleep(plan.peers_live_seconds)
        finally:
            outcome = job.kill()
            pruned = prune.kill() if prune is not None else None
        self._require_no_other_end(outcome.exits, outcome.log)
        if prune is not None and pruned is not None and pruned.exits != [-signal.SIGKILL]:
            self._violate(f"prune ended by itself with {pruned.exits}: {pruned.log[-800:]}")
        return outcome.exits

    def _await_begin(self, job: Job) -> None:
        """Waits until the save that is to be interrupted has begun, or the job is over."""
        iteration, notes = self._plan.recipe["saves"][self._plan.interrupted][1], self._folder / "saving"
        deadline = time.monotonic() + JOB_SECONDS
        while time.monotonic() < deadline and None in job.exits():
            if any(note["iteration"] == iteration for note in notes_in(notes)):
                return
            time.sleep(0.005)

    def _await_death(self, job: Job) -> None:
        deadline = time.monotonic() + JOB_SECONDS
        while all(code is None for code in job.exits()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no rank ended within {JOB_SECONDS:g} s; log:\n{job.log()[-3000:]}")
            time.sleep(0.002)

    def _require_no_other_end(self, exits: list[int], log: str) -> None:
        """Requires that each rank was killed, succeeded, or ended because a peer was killed."""
        strange = [code for code in exits if code not in (0, 1, -signal.SIGKILL)]
        if strange:
            self._violate(f"a rank ended with {strange}: {log[-1500:]}")
        taken = any(words in log for words in ("datastates prune", "FileNotFoundError"))
        if 1 in exits and self._plan.has_prune and taken:
            self._tally.count("a save failed since prune took the old checkpoint from under it")
        elif 1 in exits and -signal.SIGKILL not in exits:
            self._violate(f"a rank failed although none was killed: {log[-1500:]}")

    # -- what it left -----------------------------------------------------------------------------------

    def _judge(self, history: History) -> None:
        plan, logs = self._plan, self._folder / "judging"
        number = history.last_begun
        published = {each for each in history.numbers if self._has_manifest(each)}
        recipe = {
            "root": str(self._root),
            "numbers": history.numbers,
            "candidates": history.iterations,
            "next": [number, NEXT],
            "mode": plan.recipe["mode"],
        }
        outcome = self._start("look_and_save", plan.judges, recipe, logs).wait(JOB_SECONDS)
        if any(outcome.exits):
            self._violate(f"the next save into iteration {number} failed: {outcome.log[-2500:]}")
        for note in notes_in(logs):
            verdict = Verdict.read(json.loads(note["text"])) if note["text"] else None
            if note["event"] == "judged" and verdict is not None:
                self._tally.count(f"found {verdict.what}")
                has_manifest = note["number"] in published
                self._violate_if(history.complaint(note["number"], verdict, has_manifest, plan.has_prune))
            elif note["event"] == "again" and verdict is not None and verdict.iteration != NEXT:
                self._violate(f"saved {NEXT} into {note['number']} after the kill, and found {verdict}")
        self._violate_if(self._left_over(number))

    def _has_manifest(self, number: int) -> bool:
        return (place(self._root, number) / "datastates.manifest").exists()

    def _left_over(self, number: int) -> str | None:
        """Returns a complaint if a directory holds more than one save's files after a save and a sweep."""
        names = {path.name for path in place(self._root, number).iterdir()}
        data = {name for name in names if name.startswith("data-")}
        index = {name for name in names if name.startswith("index-")}
        rest = names - data - index - {"datastates.manifest", "metadata.json"}
        if len(data) == self._plan.judges and len(index) == 1 and not rest:
            return None
        return f"after a save and a sweep, iteration {number} still holds {sorted(names)}"

    def _violate(self, what: str) -> None:
        self._tally.violate(self._round, f"{what}\n        of the plan {self._plan}")

    def _violate_if(self, what: str | None) -> None:
        if what is not None:
            self._violate(what)
