"""Two live runs that save into the same iterations of one directory, at times with prune beside them.

As when a job is requeued while the old one is not quite dead. Each has ranks and a process group of its own;
their saves begin at random offsets. While both live, a third process loads what is published, over and over.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from megatron_datastates.format.values import MANIFEST_NAME
from tests.faults.campaign.job import notes_in, place
from tests.faults.campaign.oracle import Verdict
from tests.faults.campaign.tally import Campaign, Tally
from tests.support.ranks import Job

ROUNDS = 60
RANKS = 2
SAVES = 6
JOB_SECONDS = 180.0
MODULE = "tests.faults.campaign.two_runs_job"
JUDGES = "tests.faults.campaign.job"
NEXT = 900
LOST = 3  # the exit code of a rank whose directory was removed before its save began


def run(campaign: Campaign) -> Tally:
    return campaign.play("two_runs", ROUNDS, lambda *one: _Round(campaign, *one).play())


class _Round:
    def __init__(
        self, campaign: Campaign, tally: Tally, round_: int, rng: random.Random, folder: Path
    ) -> None:
        self._forge, self._tally, self._round, self._rng = campaign.forge, tally, round_, rng
        self._folder, self._root = folder, folder / "run"
        self._has_prune = rng.random() < 0.4

    def play(self) -> None:
        self._root.mkdir(parents=True)
        numbers = self._rng.choice([[1] * SAVES, [1, 1, 2, 2, 3, 3], [1, 2, 1, 2, 1, 2], [3, 2, 1, 3, 2, 1]])
        self._save_twice(numbers)
        notes = notes_in(self._folder / "saving")
        self._count(notes)
        self._judge(notes, sorted(set(numbers)))

    # -- both runs --------------------------------------------------------------------------------------

    def _save_twice(self, numbers: list[int]) -> None:
        pause, rng = self._rng.choice([0.0, 0.02, 0.1]), self._rng
        beside = [self._start("watch", 1, {"numbers": sorted(set(numbers)), "candidates": _candidates()})]
        if self._has_prune:
            beside.append(self._start("prune_beside", 1, {"keep_last": 1, "plan": ""}))
        runs = []
        for run in (1, 2):
            recipe = {
                "run": run,
                "saves": [[number, run * 100 + at] for at, number in enumerate(numbers)],
                "pauses": [rng.random() * pause for _ in numbers],
                "mode": rng.choice(["sync", "async"]),
            }
            runs.append(self._start("save_beside", RANKS, recipe, run))
        for job in runs:
            outcome = job.wait(JOB_SECONDS)
            if LOST in outcome.exits and self._has_prune:
                # Megatron lists the directory on rank 0 before it calls a strategy: no save of ours began.
                self._tally.count("runs that ended since prune took the directory from Megatron's own check")
            elif any(outcome.exits):
                self._violate(f"ranks ended with {outcome.exits}: {outcome.log[-2500:]}")
        (self._folder / "saving" / "over").touch()
        for job in beside:
            outcome = job.wait(JOB_SECONDS)
            if any(outcome.exits):
                self._violate(f"beside the runs, {outcome.exits}: {outcome.log[-2500:]}")

    def _start(
        self, name: str, ranks: int, recipe: dict[str, Any], run: int = 0, module: str = MODULE
    ) -> Job:
        notes = self._folder / "saving"
        notes.mkdir(exist_ok=True)
        return self._forge.start(
            f"{module}:{name}",
            ranks=ranks,
            arguments=[recipe | {"root": str(self._root)}, str(notes)],
            logs=self._folder / f"logs-{name}{run}",
        )

    # -- what came of it --------------------------------------------------------------------------------

    def _count(self, notes: list[dict[str, Any]]) -> None:
        for note in notes:
            if note["event"] in ("done", "failed") and note["text"] == "rank 0":
                self._tally.count(f"saves {note['event']}")
            elif note["event"] == "violated":
                self._violate(note["text"])
            elif note["event"] == "removed":
                self._tally.count("removed by prune")
            elif note["event"] == "watched":
                self._tally.count(f"loads beside them: {json.loads(note['text'])['what']}")
        self._require_alike(notes)

    def _require_alike(self, notes: list[dict[str, Any]]) -> None:
        """Requires that both ranks of a run say the same of each of its saves."""
        events_by_iteration: dict[int, set[str]] = {}
        for note in notes:
            if note["event"] in ("done", "failed"):
                events_by_iteration.setdefault(note["iteration"], set()).add(note["event"])
        for iteration, events in events_by_iteration.items():
            if len(events) > 1:
                self._violate(f"ranks do not agree on the save of {iteration}")

    def _judge(self, notes: list[dict[str, Any]], numbers: list[int]) -> None:
        """Requires one save's whole state in each directory that a save reported as published."""
        done: dict[int, list[int]] = {}
        for note in notes:
            if note["event"] == "done":
                done.setdefault(note["number"], []).append(note["iteration"])
        manifests = {number for number in numbers if (place(self._root, number) / MANIFEST_NAME).exists()}
        recipe = {
            "numbers": numbers,
            "candidates": _candidates(),
            "next": [numbers[-1], NEXT],
            "mode": "async",
        }
        outcome = self._start("look_and_save", RANKS, recipe, module=JUDGES).wait(JOB_SECONDS)
        if any(outcome.exits):
            self._violate(f"the next save failed: {outcome.log[-2500:]}")
        newest = max(done, default=None)
        for note in notes_in(self._folder / "saving"):
            if note["event"] == "judged":
                verdict, number = Verdict.read(json.loads(note["text"])), note["number"]
                self._tally.count(f"at the end: {verdict.what}")
                may_go = self._has_prune and number != newest
                self._require(number, verdict, bool(done.get(number)) and not may_go, number in manifests)
            elif note["event"] == "again" and note["iteration"] != NEXT:
                self._violate(f"after the next save {note['number']} is {note['text']}")

    def _require(self, number: int, verdict: Verdict, was_published: bool, has_manifest: bool) -> None:
        if verdict.what == "violated":
            self._violate(f"iteration {number} at the end: {verdict.why}")
        elif verdict.what == "refused" and (was_published or has_manifest):
            self._violate(f"iteration {number} was published and is refused: {verdict.why}")

    def _violate(self, what: str) -> None:
        self._tally.violate(self._round, what)


def _candidates() -> list[int]:
    return [run * 100 + at for run in (1, 2) for at in range(SAVES)]
