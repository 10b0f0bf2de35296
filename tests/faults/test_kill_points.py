"""Saves and removals pass every point at which the campaign kills: elsewhere a kill would prove nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_datastates.engine.faults import REMOVAL_OPERATIONS, SMALL_FILE_OPERATIONS
from tests.faults.campaign import kills
from tests.faults.campaign.__main__ import ROOT
from tests.faults.campaign.job import notes_in
from tests.support.ranks import POLL_SECONDS, RankForge
from tests.support.world import PATH, PRELOAD

RANKS = 2
POINTS = [(rank, f"{name}:{nth}") for rank in range(RANKS) for name, nth in kills.OF_EVERY_RANK.items()]
POINTS += [(0, f"{name}:1") for name in SMALL_FILE_OPERATIONS]


@pytest.fixture(scope="module")
def forge() -> Iterator[RankForge]:
    with RankForge((*PRELOAD, kills.MODULE), (*PATH, ROOT)) as forge:
        yield forge


def saving(root: Path, **changes: Any) -> dict[str, Any]:
    """Returns a recipe for one synchronous save."""
    recipe = {
        "root": str(root),
        "before": [],
        "saves": [[1, 10]],
        "mode": "sync",
        "overlap": 0,
        "options": {},
    }
    return recipe | {"victim": 0, "plan": ""} | changes


@pytest.mark.parametrize(("rank", "point"), POINTS)
def test_one_save_passes_every_point_at_which_a_rank_is_killed(
    forge: RankForge, tmp_path: Path, rank: int, point: str
) -> None:
    (tmp_path / "run").mkdir()
    recipe = saving(tmp_path / "run", victim=rank, plan=f"{point}:kill")
    job = forge.start(
        f"{kills.MODULE}:save_until_killed", ranks=RANKS, arguments=[recipe, str(tmp_path)], logs=tmp_path
    )
    while job.exits()[rank] is None:
        time.sleep(POLL_SECONDS)
    assert job.kill().exits[rank] == -signal.SIGKILL


def test_one_save_passes_no_point_more_often_than_the_campaign_counts(
    forge: RankForge, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    beyond = [f"{name}:{times + 1}:kill" for name, times in kills.OF_EVERY_RANK.items()]
    recipe = saving(tmp_path / "run", plan=",".join(beyond))
    forge.run(
        f"{kills.MODULE}:save_until_killed", ranks=RANKS, arguments=[recipe, str(tmp_path)], logs=tmp_path
    ).succeeded()


@pytest.mark.parametrize("point", REMOVAL_OPERATIONS)
def test_one_removal_passes_every_point_at_which_prune_is_killed(
    forge: RankForge, tmp_path: Path, point: str
) -> None:
    (tmp_path / "run").mkdir()
    recipe = saving(tmp_path / "run", saves=[[1, 10], [2, 20]])
    forge.run(f"{kills.MODULE}:save_until_killed", ranks=1, arguments=[recipe, str(tmp_path)], logs=tmp_path)
    assert [note["number"] for note in notes_in(tmp_path) if note["event"] == "done"] == [1, 2]
    recipe = {"root": str(tmp_path / "run"), "keep_last": 1, "plan": f"{point}:1:kill"}
    (tmp_path / "prune").mkdir()
    job = forge.start(
        f"{kills.MODULE}:prune_until_killed",
        ranks=1,
        arguments=[recipe, str(tmp_path)],
        logs=tmp_path / "prune",
    )
    assert job.wait(kills.JOB_SECONDS).exits == [-signal.SIGKILL]
