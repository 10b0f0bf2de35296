"""`ds.save` and `ds.load` on several ranks, without Megatron."""

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
