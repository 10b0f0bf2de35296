"""Saving, loading and saving again in one long-lived job, watching what it holds.

A round is a minute. After the warm-up, what the ranks hold has to stay: growth is the slope of a line through
all samples, times the time that they span, and more of it than the bounds here is a violation.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np

from tests.faults.campaign.job import notes_in
from tests.faults.campaign.tally import Campaign, Tally

MINUTES = 10
RANKS = 2
WARM_UP = 0.25  # of the samples
SPARE_SECONDS = 240.0  # for starting and ending on a busy machine
TARGET = "tests.faults.campaign.soak_job:soak"
# The most that a rank may come to hold more, from the end of the warm-up on.
BOUNDS = {"rss_kib": 24 << 10, "pss_kib": 24 << 10, "descriptors": 2.0, "threads": 2.0, "files": 2.0}


def run(campaign: Campaign) -> Tally:
    """Runs all rounds as one job, so `only` is a soak of one minute."""
    tally = Tally("soak")
    minutes = len([round_ for round_, _ in campaign.each_round(tally, MINUTES)])
    if not minutes:
        return tally
    folder = campaign.folder / "soak"
    logs = folder / "logs"
    recipe = {"root": str(folder / "run"), "seconds": minutes * 60, "seed": campaign.seed}
    try:
        outcome = campaign.forge.run(
            TARGET,
            ranks=RANKS,
            arguments=[recipe, str(logs)],
            logs=logs,
            timeout_seconds=minutes * 60 + SPARE_SECONDS,
        )
        if any(outcome.exits):
            tally.violate(0, f"ranks ended with {outcome.exits}: {outcome.log[-3000:]}")
        _judge(tally, notes_in(logs))
    except Exception as error:
        tally.violate(0, f"{type(error).__name__}: {error}")
    tally.seconds = minutes * 60.0
    shutil.rmtree(folder, ignore_errors=True)
    return tally


def _judge(tally: Tally, notes: list[dict[str, Any]]) -> None:
    for note in notes:
        if note["event"] == "violated":
            tally.violate(0, note["text"])
        elif note["event"] == "cycle":
            tally.outcomes[note["text"]] += 1
    for rank in range(RANKS):
        samples = [json.loads(n["text"]) for n in notes if n["event"] == "sample" and n["number"] == rank]
        warm = samples[int(len(samples) * WARM_UP) :]
        if len(warm) < 3:
            tally.violate(0, f"rank {rank} took {len(samples)} samples: too few to say anything")
            continue
        for name in BOUNDS:
            _judge_one(tally, rank, name, warm)


def _judge_one(tally: Tally, rank: int, name: str, warm: list[dict[str, float]]) -> None:
    values, saves = np.array([each[name] for each in warm]), np.array([each["saves"] for each in warm])
    tally.outcomes[f"rank {rank}: {name}, first"] = int(values[0])
    tally.outcomes[f"rank {rank}: {name}, last"] = int(values[-1])
    span = saves[-1] - saves[0]
    slope = float(np.polyfit(saves, values, 1)[0]) if span else 0.0
    bound = BOUNDS[name]
    if slope * span > bound:
        tally.violate(
            0,
            f"rank {rank}: {name} grew by {slope:.3g} a save, {slope * span:.4g} over {span} saves, "
            f"from {values[0]:g} to {values[-1]:g}; at most {bound:g} is expected",
        )
