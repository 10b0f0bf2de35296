"""The bytes that all ranks together read from disk: replicas may share reads and exchange the data."""

from pathlib import Path

import pytest

from tests.support.ranks import RankForge
from tests.support.world import World

pytestmark = pytest.mark.conformance

# Bytes read by those stored (half weights, half optimizer; saved with TP 2, DP 2): at least, at most.
# Above 1 is padding: whole blocks of 1 MiB are read, two of them in part wherever a piece is cut out. Each
# replica by itself reads the weights through the page cache, and a block that they share with others twice.
SHARES = {
    "the same layout": (2, "parallel", 1.0, 1.1),
    "more tensor parallelism": (4, "parallel", 1.0, 1.15),
    "more data parallelism": (1, "parallel", 1.0, 1.1),
    "each replica by itself": (2, "plain", 1.5, 1.65),
}


@pytest.fixture(scope="module")
def saved(world_forge: RankForge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    World(world_forge, folder / "runs").run("reading_ranks:save_replicas", folder / "ck", 2, ranks=4)
    return folder / "ck"


@pytest.mark.parametrize("name", SHARES)
def test_replicas_that_share_their_reads_read_a_checkpoint_once(world: World, saved: Path, name: str) -> None:
    tensor_parallel, how, least, most = SHARES[name]
    reports = world.run("reading_ranks:count_reads", saved, tensor_parallel, how, ranks=4)
    read = sum(each["read"] for each in reports)
    assert least <= read / reports[0]["stored"] <= most, (read, reports[0]["stored"])
    for rank, each in enumerate(reports):
        saved_by = rank % tensor_parallel * 2 // tensor_parallel
        assert (each["first"], each["norm"]) == (2 + saved_by / 8, 4096)
