"""Loading what was damaged or does not fit: Megatron's CheckpointingException, in clear words."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_datastates.format.manifest import Manifest
from tests.support.world import World


@pytest.fixture
def checkpoint(world: World, tmp_path: Path) -> Path:
    world.run("fault_ranks:save_only", tmp_path / "ck", 1)
    return tmp_path / "ck"


def data_file(checkpoint: Path, rank: int) -> Path:
    return next(checkpoint.glob(f"data-{rank:05d}-*"))


def flip_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def errors(world: World, checkpoint: Path, ranks: int = 1) -> dict[str, str]:
    """What a load of the state by one rank says, by what was asked for."""
    found: dict[str, str] = world.run("fault_ranks:errors_of_loads", checkpoint, ranks=ranks)[0]["errors"]
    return found


def test_what_does_not_fit_is_named(world: World, checkpoint: Path) -> None:
    said = errors(world, checkpoint, ranks=2)
    assert said["whole"] is None
    assert "no tensor 'other.weight'" in said["key"]
    assert "'same'" in said["shape"] and "(33,)" in said["shape"] and "(34,)" in said["shape"]
    assert "'same'" in said["dtype"] and "bfloat16" in said["dtype"] and "int32" in said["dtype"]
    assert "'more/shard_0_1'" in said["object"]


def missing(checkpoint: Path) -> str:
    data_file(checkpoint, 1).unlink()
    return "cannot be opened: No such file"


def truncated(checkpoint: Path) -> str:
    path = data_file(checkpoint, 1)
    path.write_bytes(path.read_bytes()[:-4096])
    return "truncated"


def bit_in_data(checkpoint: Path) -> str:
    flip_byte(data_file(checkpoint, 1), 4096 + 1000)
    return "'weight'"


def bit_in_footer(checkpoint: Path) -> str:
    path = data_file(checkpoint, 1)
    flip_byte(path, path.stat().st_size - 4096)
    return "footer"


def bit_in_index(checkpoint: Path) -> str:
    flip_byte(next(checkpoint.glob("index-*")), 100)
    return "SHA-256 differs"


def bit_in_manifest(checkpoint: Path) -> str:
    flip_byte(checkpoint / "datastates.manifest", 200)
    return "datastates.manifest is damaged"


def no_manifest(checkpoint: Path) -> str:
    (checkpoint / "datastates.manifest").unlink()
    return "unfinished datastates checkpoint"


def later_format(checkpoint: Path) -> str:
    path = checkpoint / "datastates.manifest"
    manifest = Manifest.decode(path.read_bytes(), "it")
    path.write_bytes(Manifest(**manifest_fields(manifest) | {"format_version": 2}).encode())
    return "later release"


def manifest_fields(manifest: Manifest) -> dict[str, object]:
    return {name: getattr(manifest, name) for name in manifest.__struct_fields__}


DAMAGES = [missing, truncated, bit_in_data, bit_in_footer, bit_in_index, bit_in_manifest, no_manifest]


@pytest.mark.parametrize("damage", [*DAMAGES, later_format], ids=lambda damage: damage.__name__)
def test_damage_is_refused_with_its_name(
    world: World, checkpoint: Path, damage: Callable[[Path], str]
) -> None:
    words = damage(checkpoint)
    said = errors_of_two_ranks_as_one(world, checkpoint)
    assert words in said and str(checkpoint) in said, said


def errors_of_two_ranks_as_one(world: World, checkpoint: Path) -> str:
    told = world.run("fault_ranks:errors_of_loads", checkpoint, ranks=2)
    found = [each["errors"]["whole"] for each in told]
    return next(error for error in found if error is not None)


def test_directory_that_holds_no_checkpoint_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = errors(world, tmp_path / "empty")["whole"]
    assert "empty" in said and "is not a distributed checkpoint" in said


def test_malicious_object_does_not_run(world: World, tmp_path: Path) -> None:
    for each in world.run("fault_ranks:save_malicious", tmp_path / "ck", tmp_path / "ran", ranks=2):
        assert not each["ran"]
        assert "'object/shard_0_1'" in each["error"] and "add_safe_globals" in each["error"]
