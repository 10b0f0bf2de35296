"""torchtitan: its manager, derived from by ours, resumes exactly, and still loads DCP's own steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import RankForge
from tests.support.world import PATH, World

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-frameworks")


@pytest.fixture(scope="module")
def forge() -> Iterator[RankForge]:
    with RankForge(("titan_ranks",), (Path(__file__).parent, *PATH)) as parent:
        yield parent


@pytest.mark.conformance
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_manager_saves_and_resumes(forge: RankForge, tmp_path: Path, mode: str) -> None:
    world = World(forge, tmp_path / "runs")
    for rank in world.run("titan_ranks:save_and_resume", tmp_path / "checkpoint", mode):
        assert rank["newest"] == [5, True] and rank["chosen"] == [4, True]
        assert rank["of_dcp"] == [8, True, "torch_dist"]
        assert {"step-4", "step-5"} <= set(rank["formats"])
        assert set(rank["formats"].values()) == {"datastates"}
