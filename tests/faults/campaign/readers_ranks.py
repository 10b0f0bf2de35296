"""What the processes of `readers` do. Runs in forked ranks; a file `over` in the root ends the readers.

One directory is saved again and again; others are saved once, and pruned. The n-th save is iteration n of
`patterns`, whatever directory it goes to.
"""

from __future__ import annotations

import collections
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_datastates.errors import DataStatesError
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.upkeep.prune import prune as prune_run
from megatron_datastates.pipeline.upkeep.retention import RetentionRules
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.faults.campaign import judging, patterns

AGAIN = "iter_0000999"  # is saved again and again; the newest by its name, which prune leaves
# What a reader may meet: nothing was published yet, the directory is being removed, or it was replaced.
CLEAR = re.compile(
    r"is not a directory|holds an unfinished datastates checkpoint|holds no datastates checkpoint"
    r"|was replaced by another save|ranks have opened different checkpoints"
    r"|is not a distributed checkpoint|No such file|is being removed|cannot be listed|does not exist"
    r"|was removed while it was checked"
)
Look = Callable[[Path, list[tuple[int, str]]], judging.Outcome]


def directories(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("iter_*"))


def save(plan: dict[str, Any], target: str) -> None:
    """Saves, every other time into the same directory, else into a new one."""
    import saving_rank

    from megatron_datastates.mcore import DataStatesSaveStrategy

    rank, ranks = saving_rank.join()
    strategy = DataStatesSaveStrategy()
    for number in range(1, plan["saves"] + 1):
        name = AGAIN if number % 2 else f"iter_{number:07d}"
        state = patterns.sharded_state(number, "usual", ranks, rank)
        saving_rank.save(Path(plan["root"]) / name, state, strategy, plan["mode"])
        time.sleep(plan["pause_seconds"])


class Notes:
    """What a reader saw."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.violations: list[str] = []
        self.iterations: set[int] = set()

    def see(self, directory: Path, outcome: judging.Outcome) -> None:
        if outcome.iteration is not None:
            self.iterations.add(outcome.iteration)
            kind = "of the directory saved again" if directory.name == AGAIN else "of a directory saved once"
            self.outcomes[f"exactly one iteration, {kind}"] += 1
            if directory.name != AGAIN and directory.name != f"iter_{outcome.iteration:07d}":
                self.violations.append(f"{directory.name} holds iteration {outcome.iteration}")
        elif outcome.refused and CLEAR.search(outcome.refused) and str(directory) in outcome.refused:
            said = CLEAR.search(outcome.refused)
            self.outcomes[f"refused: {said[0] if said else ''}"] += 1
        else:
            self.violations.append(f"{directory.name}: {outcome}"[:1500])

    def write(self, target: str) -> None:
        self.outcomes["different iterations seen"] = len(self.iterations)
        Path(target).write_text(json.dumps({"outcomes": self.outcomes, "violations": self.violations[:5]}))


def _loop(plan: dict[str, Any], target: str, look: Look) -> None:
    root, notes, rng = Path(plan["root"]), Notes(), random.Random(plan["seed"])
    candidates = [(number, "usual") for number in range(plan["saves"], 0, -1)]
    while not (root / "over").exists():
        found = directories(root)
        if found:
            directory = rng.choice([root / AGAIN, rng.choice(found)])
            notes.see(directory, look(directory, candidates))
        else:
            time.sleep(0.01)
    for directory in directories(root):  # nobody writes any more: most are whole
        notes.see(directory, look(directory, candidates))
    notes.write(target)


def load_by_reader(plan: dict[str, Any], target: str) -> None:
    def look(directory: Path, candidates: list[tuple[int, str]]) -> judging.Outcome:
        return judging.looked(lambda: patterns.load_by_reader(Checkpoint.open(directory)), candidates)

    _loop(plan, target, look)


def load_by_megatron(plan: dict[str, Any], target: str) -> None:
    patterns.join_alone()

    def look(directory: Path, candidates: list[tuple[int, str]]) -> judging.Outcome:
        return judging.looked(lambda: patterns.load_by_megatron(directory, "usual"), candidates)

    _loop(plan, target, look)


def verify_and_list(plan: dict[str, Any], target: str) -> None:
    """Requires a good verdict, or faults that say that the directory was saved anew or is being removed."""
    root, notes, rng = Path(plan["root"]), Notes(), random.Random(plan["seed"])
    while not (root / "over").exists():
        found = directories(root)
        if not found:
            time.sleep(0.01)
            continue
        directory = rng.choice([root / AGAIN, rng.choice(found)])
        _verify(directory, notes)
        code, _ = judging.command("ls", root)
        notes.outcomes[f"ls: {code}"] += 1
    notes.write(target)


def _verify(directory: Path, notes: Notes) -> None:
    try:
        verdict = verify(directory)
    except DataStatesError as error:
        notes.see(directory, judging.Outcome(refused=str(error)))
        return
    if verdict.good:
        notes.outcomes["verify: exactly good"] += 1
        return
    for fault in verdict.faults:
        notes.see(directory, judging.Outcome(refused=fault))


def prune(plan: dict[str, Any], target: str) -> None:
    root, notes = Path(plan["root"]), Notes()
    while not (root / "over").exists():
        if not directories(root):
            time.sleep(0.01)
            continue
        gone = prune_run(root, RetentionRules(keep_last=2, keep_every=None, min_age_seconds=3600))
        notes.outcomes["removed"] += len(gone)
        time.sleep(0.05)
    notes.outcomes["exactly"] += 1
    notes.write(target)
