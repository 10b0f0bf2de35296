"""A torn copy on one rank fails the save on all and is never published (also: native/test_tripwire.py)."""

from pathlib import Path

import pytest

from tests.support.world import World

SHARD = 6 * 50_000 * 4  # bytes of a rank's tensor: two chunks of 1 MiB
SECOND = (1 << 20) - 4096  # of them; the header comes first
MIDDLE = SHARD - 10_000  # in the second chunk, and between the samples of the seed that the ranks have


@pytest.mark.parametrize(
    ("begin", "size", "options"),
    [
        pytest.param(0, SHARD, {}, id="all of it"),
        pytest.param(SECOND, SHARD - SECOND, {}, id="all of the second chunk"),
        pytest.param(MIDDLE, 1, {"paranoid": True}, id="one byte in the middle, paranoid"),
        pytest.param(SHARD - 1, 1, {"paranoid": True, "tripwire": False}, id="the last byte, paranoid only"),
    ],
)
def test_early_write_on_one_rank_fails_the_save_on_all(
    world: World, tmp_path: Path, begin: int, size: int, options: dict[str, bool]
) -> None:
    reports = world.run("tripwire_ranks:write_early", tmp_path, begin, size, options)
    assert len({rank["error"] for rank in reports}) == 1
    assert "rank 1" in reports[0]["error"] and "'weight' changed too early" in reports[0]["error"]
    assert not any(rank["published"] for rank in reports)
    assert not list((tmp_path / "ck").glob("data-*"))


@pytest.mark.parametrize(
    ("begin", "options"), [(MIDDLE, {}), (SHARD - 1, {"tripwire": False})], ids=["between samples", "off"]
)
def test_without_the_tripwires_sample_an_early_write_is_not_found(
    world: World, tmp_path: Path, begin: int, options: dict[str, bool]
) -> None:
    """Shows that the test above can fail, and that only samples are checked by default."""
    reports = world.run("tripwire_ranks:write_early", tmp_path, begin, 1, options)
    assert [(rank["error"], rank["published"]) for rank in reports] == [(None, True)] * 2


@pytest.mark.parametrize("paranoid", [False, True])
def test_fenced_writes_raise_no_alarm(world: World, tmp_path: Path, paranoid: bool) -> None:
    world.run("tripwire_ranks:save_overwritten", tmp_path, {"paranoid": paranoid})
