"""Agreement over a device's backend, on several ranks: no poll waits for what it enqueued.

The device is a stand-in (late_device.py), which also fails on anything that would synchronize it.
"""

import socket
from pathlib import Path

import pytest

from tests.support.world import World

several = pytest.mark.parametrize("ranks", [2, 4])
either = pytest.mark.parametrize("transport", ["device", "host"])
MANIFEST = "datastates.manifest"


@several
def test_results_arrive_late_and_share_no_memory(world: World, ranks: int) -> None:
    world.run("device_ranks:collectives_alone", ranks=ranks)


@either
@several
def test_values_of_any_sizes_are_shared(world: World, ranks: int, transport: str) -> None:
    world.run("device_ranks:values_shared", transport, ranks=ranks)


@either
@several
def test_saves_are_published_with_exactly_these_calls(
    world: World, tmp_path: Path, ranks: int, transport: str
) -> None:
    reports = world.run("device_ranks:saves", tmp_path, transport, ranks=ranks)
    rounds = -(-max(each["index"] for each in reports) // 256)
    assert rounds > 1
    for each in reports:
        first, *others = each["counts"]
        calls = {"share and compare": 1, "sum": each["polls"][0] - 1, "gather": 1, "gather layouts": rounds}
        assert first == calls
        assert others == [{"sum": polls - 1, "gather": 1} for polls in each["polls"][1:]]
        assert each["made"][0] == each["made"][2], "later saves allocate nothing on the device"
    assert all(each["polls"] == reports[0]["polls"] for each in reports)


@either
@pytest.mark.parametrize("overtake", [False, True], ids=["by turns", "overtaking"])
def test_two_saves_under_way_at_once_share_no_memory(
    world: World, tmp_path: Path, overtake: bool, transport: str
) -> None:
    """The layout is new to both, and the second may be published before the first sends it."""
    for each in world.run("device_ranks:two_saves_at_once", tmp_path, transport, overtake):
        assert (each["gathers"], each["layouts"]) == (2, 2)


@either
@several
def test_failure_on_one_rank_is_agreed_on(world: World, tmp_path: Path, ranks: int, transport: str) -> None:
    reports = world.run("device_ranks:fail_while_writing", tmp_path, transport, 1, ranks=ranks)
    assert len({each["error"] for each in reports}) == 1
    assert f"failed on 1 of {ranks} ranks: rank 1:" in reports[0]["error"]
    assert "Nothing was published" in reports[0]["error"] and reports[0]["left"] == []
    for (
        each
    ) in reports:  # flags at every poll, but for the one that asks for errors and the one that reads them
        assert each["calls"] == {"share and compare": 1, "sum": each["polls"] - 2, "gather": 1}


@either
def test_failure_before_records_were_read_publishes_nothing(
    world: World, tmp_path: Path, transport: str
) -> None:
    reports = world.run("device_ranks:fail_as_records_go_out", tmp_path, transport, 1, False)
    for each in reports:
        assert f"rank 1: OSError: just now (on node {socket.gethostname()}). Nothing was" in each["error"]
        assert not each["began"] and each["left"] == []


@either
def test_failure_while_rank_0_publishes_leaves_a_whole_checkpoint(
    world: World, tmp_path: Path, transport: str
) -> None:
    reports = world.run("device_ranks:fail_as_records_go_out", tmp_path, transport, 1, True)
    for each in reports:
        assert (
            "rank 1: OSError: just now" in each["error"] and "Its manifest may be in place" in each["error"]
        )
        assert MANIFEST in each["left"]
        assert sum(name.startswith("data-") for name in each["left"]) == 2
    assert reports[0]["began"]


def test_end_of_the_program_does_not_wait_for_a_device_that_hangs(world: World, tmp_path: Path) -> None:
    reports = world.run("device_ranks:end_while_indexes_are_under_way", tmp_path)
    for each in reports:
        assert MANIFEST not in each["left"]
    assert "indexes did not arrive" in reports[0]["failure"]
