"""Loads of damaged or mismatched checkpoints raise Megatron's CheckpointingException and name the fault."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_datastates.format.manifest import Manifest
from tests.support.world import World
from tests.unit.states import flip


@pytest.fixture
def checkpoint(world: World, tmp_path: Path) -> Path:
    world.run("fault_ranks:save_only", tmp_path / "ck", 1)
    return tmp_path / "ck"


def data_file(checkpoint: Path, rank: int) -> Path:
    return next(checkpoint.glob(f"data-{rank:05d}-*"))


def errors(world: World, checkpoint: Path, ranks: int = 1) -> dict[str, str]:
    """Returns the errors that rank 0 reports, by what was asked for."""
    found: dict[str, str] = world.run("fault_ranks:errors_of_loads", checkpoint, ranks=ranks)[0]["errors"]
    return found


def test_mismatched_request_is_named_in_the_error(world: World, checkpoint: Path) -> None:
    found = errors(world, checkpoint, ranks=2)
    assert found["whole"] is None
    assert "no tensor 'other.weight'" in found["key"]
    assert "'same'" in found["shape"] and "(33,)" in found["shape"] and "(34,)" in found["shape"]
    assert "'same'" in found["dtype"] and "bfloat16" in found["dtype"] and "int32" in found["dtype"]
    assert "'more/shard_0_1'" in found["object"]


def missing(checkpoint: Path) -> str:
    data_file(checkpoint, 1).unlink()
    return "cannot be opened: No such file"


def truncated(checkpoint: Path) -> str:
    path = data_file(checkpoint, 1)
    path.write_bytes(path.read_bytes()[:-4096])
    return "truncated"


def bit_in_data(checkpoint: Path) -> str:
    flip(data_file(checkpoint, 1), 4096 + 1000)
    return "'weight'"


def bit_in_footer(checkpoint: Path) -> str:
    path = data_file(checkpoint, 1)
    flip(path, path.stat().st_size - 4096)
    return "footer"


def bit_in_index(checkpoint: Path) -> str:
    flip(next(checkpoint.glob("index-*")), 100)
    return "SHA-256 differs"


def bit_in_manifest(checkpoint: Path) -> str:
    flip(checkpoint / "datastates.manifest", 200)
    return "datastates.manifest is damaged"


def no_manifest(checkpoint: Path) -> str:
    (checkpoint / "datastates.manifest").unlink()
    return "unfinished datastates checkpoint"


def later_format(checkpoint: Path) -> str:
    path = checkpoint / "datastates.manifest"
    manifest = Manifest.decode(path.read_bytes(), "it")
    path.write_bytes(Manifest(**manifest_fields(manifest) | {"format_version": 3}).encode())
    return "later release"


def manifest_fields(manifest: Manifest) -> dict[str, object]:
    return {name: getattr(manifest, name) for name in manifest.__struct_fields__}


DAMAGES = [missing, truncated, bit_in_data, bit_in_footer, bit_in_index, bit_in_manifest, no_manifest]


@pytest.mark.parametrize("damage", [*DAMAGES, later_format], ids=lambda damage: damage.__name__)
def test_damage_is_named_in_the_error(world: World, checkpoint: Path, damage: Callable[[Path], str]) -> None:
    words = damage(checkpoint)
    error = error_of_two_ranks(world, checkpoint)
    assert words in error and str(checkpoint) in error, error


def error_of_two_ranks(world: World, checkpoint: Path) -> str:
    """Returns the error of the first of two ranks that failed to load."""
    reports = world.run("fault_ranks:errors_of_loads", checkpoint, ranks=2)
    found = [each["errors"]["whole"] for each in reports]
    return next(error for error in found if error is not None)


def test_directory_that_holds_no_checkpoint_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = errors(world, tmp_path / "empty")["whole"]
    assert "empty" in error and "is not a distributed checkpoint" in error


def test_malicious_object_does_not_run(world: World, tmp_path: Path) -> None:
    for each in world.run("fault_ranks:save_malicious", tmp_path / "ck", tmp_path / "ran", ranks=2):
        assert not each["ran"]
        assert "'object/shard_0_1'" in each["error"] and "add_safe_globals" in each["error"]
