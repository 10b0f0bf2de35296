"""`ds.save` and `ds.load` on several ranks, without Megatron."""

import socket
from pathlib import Path

import pytest

from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.support.world import World


@pytest.mark.parametrize("readers", [1, 3, 4])
def test_shards_saved_by_two_ranks_load_on_any_number(world: World, tmp_path: Path, readers: int) -> None:
    for each in world.run("front_door_ranks:save", tmp_path, 5):
        assert each == {"state": "published", "ranks": 2}
    world.run("front_door_ranks:load", tmp_path, 5, ranks=readers)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_default_device_does_not_matter(world: World, tmp_path: Path, ranks: int) -> None:
    world.run("front_door_ranks:save_and_load_with_another_default_device", tmp_path, 5, ranks=ranks)


@pytest.mark.parametrize(
    ("how", "words"),
    [("replicas", "'weight'"), ("names", "both called 'a.b'"), ("object", "rank 1")],
)
def test_invalid_state_raises_the_same_error_on_all_ranks(
    world: World, tmp_path: Path, how: str, words: str
) -> None:
    errors = {each["error"] for each in world.run("front_door_ranks:save_what_fails", tmp_path, how)}
    assert len(errors) == 1 and words in errors.pop()
    assert not (tmp_path / "ck" / "datastates.manifest").exists()


@pytest.mark.parametrize(
    ("environment", "release", "words"),
    [
        ({"ON_FAILURE": "warn"}, "", "--datastates-on-failure is 'warn', not 'raise' as on rank 0"),
        ({}, "9.9", "megatron_datastates is '9.9 (records of "),
    ],
)
def test_a_rank_that_differs_fails_the_save_on_all_ranks(
    world: World, tmp_path: Path, environment: dict[str, str], release: str, words: str
) -> None:
    own = {f"MEGATRON_DATASTATES_{name}": value for name, value in environment.items()}
    target = "front_door_ranks:save_where_one_rank_differs"
    reports = world.run(target, tmp_path, own, release, 2, ranks=3)
    errors = {error for each in reports for error in each["errors"]}
    assert len(errors) == 1, "the same on all ranks, and again in the second save"
    (error,) = errors
    assert words in error and f"on rank 2 (node {socket.gethostname()}), " in error
    assert "1 of 3 ranks are not as rank 0" in error
    assert list(tmp_path.glob("*/data-*")) == []


def test_ranks_may_differ_in_what_is_their_own(world: World, tmp_path: Path) -> None:
    own = {"MEGATRON_DATASTATES_COPY_THREADS": "1", "MEGATRON_DATASTATES_REPORT_FILE": str(tmp_path / "r")}
    for each in world.run("front_door_ranks:save_where_one_rank_differs", tmp_path, own, "", 0):
        assert each["errors"] == ["", ""]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_manifest_lists_the_providers_of_all_ranks(world: World, tmp_path: Path, ranks: int) -> None:
    reports = world.run("front_door_ranks:save_with_own_providers", tmp_path, ranks=ranks)
    for number, note in enumerate(["a", "a", "b", "b"]):
        found = Checkpoint.open(tmp_path / str(number)).manifest.providers
        assert {provider.name: dict(provider.notes) for provider in found} == {
            "same": {"note": "same"}, **{f"of{rank}": {"note": f"{note} of {rank}"} for rank in range(ranks)}
        }  # fmt: skip
        assert {provider.kind for provider in found} == {"Numbers"}
    # Layouts are new at the first save, and lists of providers at the third.
    assert [each["counts"] for each in reports] == [[1, 0, 1, 0]] * ranks
