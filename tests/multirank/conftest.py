"""Fixtures of tests with several ranks and no training loop."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import RankForge
from tests.support.world import PATH, PRELOAD, World


@pytest.fixture(scope="session")
def world_forge() -> Iterator[RankForge]:
    with RankForge(PRELOAD, PATH) as parent:
        yield parent


@pytest.fixture
def world(world_forge: RankForge, tmp_path: Path) -> World:
    return World(world_forge, tmp_path / "runs")
