"""Readers beside writers: loads, `verify`, `ls` and `prune` in a loop while two ranks save and save again.

Each read is exactly one iteration or a refusal that says what happened to the directory; nothing is mixed.
"""

from __future__ import annotations

import collections
import json
import shutil
from pathlib import Path

from tests.faults.campaign import specimens
from tests.faults.campaign.tally import Campaign, Tally
from tests.support.ranks import Job

ROUNDS = 12
JOB_SECONDS = 300.0
SAVES = 12  # in a round
READERS = ("load_by_reader", "load_by_megatron", "verify_and_list")
MODULE = "tests.faults.campaign.readers_ranks"


def run(campaign: Campaign) -> Tally:
    tally = Tally("readers")
    for round_, rng in campaign.each_round(tally, ROUNDS):
        folder = campaign.folder / "readers" / str(round_)
        (folder / "run").mkdir(parents=True)
        plan = {
            "root": str(folder / "run"),
            "saves": SAVES,
            "mode": rng.choice(["sync", "async"]),
            "prunes": rng.random() < 0.7,
            "seed": rng.getrandbits(32),
            "pause_seconds": rng.choice([0.0, 0.0, 0.05]),
        }
        try:
            _play(campaign, tally, round_, plan, folder)
        except Exception as error:
            tally.violate(round_, f"{type(error).__name__}: {error} \n        of {plan}")
        shutil.rmtree(folder)
    return tally


def _play(campaign: Campaign, tally: Tally, round_: int, plan: dict[str, object], folder: Path) -> None:
    def start(what: str, ranks: int) -> Job:
        logs = folder / what
        return campaign.forge.start(
            f"{MODULE}:{what}", ranks=ranks, logs=logs, arguments=[plan, str(logs / "found.json")]
        )

    jobs = {what: start(what, 1) for what in (*READERS, *(["prune"] if plan["prunes"] else []))}
    try:
        start("save", specimens.RANKS).wait(JOB_SECONDS).succeeded()
        (folder / "run" / "over").touch()
        for job in jobs.values():
            job.wait(JOB_SECONDS).succeeded()
    finally:
        for job in jobs.values():
            job.kill()
    outcomes: collections.Counter[str] = collections.Counter()
    for what in jobs:
        found = json.loads((folder / what / "found.json").read_text())
        outcomes.update({f"{what}: {outcome}": count for outcome, count in found["outcomes"].items()})
        for violation in found["violations"]:
            tally.violate(round_, f"{what}: {violation}\n        of {plan}")
    tally.outcomes.update(outcomes)
    if not any(count for outcome, count in outcomes.items() if "exactly" in outcome):
        tally.violate(round_, f"no read succeeded, of {dict(outcomes)}")
