"""Damaged metadata.json: a checkpoint with a manifest loads; without one, the error names what is missing."""

from typing import Any

import pytest

from tests.support.ranks import RankForge
from tests.support.world import World

WHOLE = '{"sharded_backend": "datastates", "sharded_backend_version": 1}'
DAMAGED = {
    "empty": "",
    "truncated": WHOLE[:20],
    "no JSON": "not json",
    "no text": "\xff\xfe\x00",
    "list": "[]",
    "number": "7",
    "null": "null",
    "string": '"datastates"',
    "no keys": "{}",
    "no backend": '{"sharded_backend_version": 1}',
    "a number for a backend": '{"sharded_backend": 7, "sharded_backend_version": 1}',
    "null for a backend": '{"sharded_backend": null, "sharded_backend_version": 1}',
}
READ_BY_STOCK = {"a number for a backend", "null for a backend"}  # Megatron takes any value for a format
damages = pytest.mark.parametrize("damage", DAMAGED)


@pytest.fixture(scope="module")
def outcomes(world_forge: RankForge, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("metadata")
    world = World(world_forge, folder / "runs")
    return world.run("metadata_ranks:loads", folder, DAMAGED, ranks=1, timeout_seconds=120)[0]


@damages
def test_published_checkpoint_loads_despite_damaged_metadata(outcomes: dict[str, Any], damage: str) -> None:
    assert outcomes["published"][damage] == ["returned", True]


@damages
def test_without_a_manifest_the_error_says_what_is_missing(outcomes: dict[str, Any], damage: str) -> None:
    kind, text = outcomes["not published"][damage]
    assert kind == "CheckpointingException", text
    assert "metadata.json is damaged" in text and "no datastates.manifest" in text, text


@damages
def test_damaged_torch_dist_checkpoint_fails_as_without_this_package(
    outcomes: dict[str, Any], damage: str
) -> None:
    if damage in READ_BY_STOCK:
        assert outcomes["megatron only"][damage] == ["returned", False]
        return
    assert outcomes["stock"][damage] == outcomes["megatron only"][damage]
    assert outcomes["stock"][damage][0] not in ("returned", "CheckpointingException")


def test_a_format_that_only_metadata_names_is_refused_with_what_to_do(outcomes: dict[str, Any]) -> None:
    kind, text = outcomes["another format"]["with it"]
    assert kind == "CheckpointingException" and "names the format 'zarr'" in text, text
    assert "remove metadata.json to load what that describes" in text
    assert outcomes["another format"]["without it"] == ["returned", True]
