"""DCP's index has no checksum: what contradicts something else in it, or is refused by torch, is a fault."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from megatron_datastates.convert.integrity import verify_source
from megatron_datastates.convert.open import open_source
from megatron_datastates.errors import DataStatesError
from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.unit.command import run
from tests.unit.converting import convert_to
from tests.unit.trained import save_trained

NESTED: dict[str, Any] = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "v": torch.ones(5, dtype=torch.bfloat16)},
    "optim": {"w": {"step": 3, "exp_avg": torch.zeros(3, 4)}},
    "list": [1, torch.arange(3)],
}
OBJECTS = {f"rng_state/shard_{n}_2": [n] for n in range(2)} | {"common_state/shard_0_1": [{"iteration": 5}]}


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """A checkpoint as DCP writes it, of two files."""
    writer = dcp.FileSystemWriter(tmp_path / "nested", thread_count=2)
    dcp.save(NESTED, storage_writer=writer, no_dist=True)
    return tmp_path / "nested"


@pytest.fixture
def megatrons(tmp_path: Path) -> Path:
    """A checkpoint as Megatron writes it."""
    path = tmp_path / "iter_0000005"
    state = {"a.weight": torch.ones(3, 4), "b.weight": torch.zeros(3, 4), **OBJECTS}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), planner=planner, no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return path


def faults_of(path: Path) -> list[str]:
    """Returns what verify finds, or why it cannot check anything."""
    try:
        return verify_source(open_source(path)).faults
    except DataStatesError as error:
        return [str(error)]


@pytest.mark.parametrize(
    "name",
    [b"StorageMeta", b"_MEM_FORMAT_ENCODING", b"planner_data", b"version", b"storage_meta", b"chunks", b"fqn",
     b"index", b"relative_path", b"checkpoint_id", b"BytesStorageMetadata"],
)  # fmt: skip
def test_another_name_in_dcps_classes_is_a_fault(nested: Path, name: bytes) -> None:
    file = nested / ".metadata"
    data = file.read_bytes()
    at = data.index(name) + len(name) - 2
    file.write_bytes(data[:at] + bytes([data[at] ^ 2]) + data[at + 1 :])
    assert faults_of(nested)


def _without_a_part(metadata: Any) -> None:
    del metadata.state_dict_metadata["rng_state/shard_1_2"]
    del metadata.storage_data[MetadataIndex("rng_state/shard_1_2")]


def _beyond_its_parts(metadata: Any) -> None:
    for part in (metadata.state_dict_metadata, metadata.storage_data):
        key = (
            "rng_state/shard_0_2"
            if part is metadata.state_dict_metadata
            else MetadataIndex("rng_state/shard_0_2")
        )
        new = "rng_state/shard_4_2" if isinstance(key, str) else MetadataIndex("rng_state/shard_4_2")
        part[new] = part.pop(key)


def _in_the_place_of_another(metadata: Any) -> None:
    one, other = (MetadataIndex(f"{name}.weight", torch.Size([0, 0])) for name in "ab")
    metadata.storage_data[one] = metadata.storage_data[other]


def _a_place_of_nothing(metadata: Any) -> None:
    key = MetadataIndex("a.weight", torch.Size([0, 0]))
    metadata.storage_data[MetadataIndex("c.weight", torch.Size([0, 0]))] = metadata.storage_data[key]


def _an_odd_version(metadata: Any) -> None:
    metadata.version = "1.0/0"


def _an_odd_property(metadata: Any) -> None:
    metadata.state_dict_metadata["a.weight"].properties.pin_memory = 7


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (_without_a_part, "'rng_state' has 1 of its 2 parts"),
    (_beyond_its_parts, "is beyond the number of its parts"),
    (_in_the_place_of_another, "overlaps 'a.weight'"),
    (_a_place_of_nothing, "there is a place for 'c.weight' at (0, 0), which is not in the checkpoint"),
    (_an_odd_version, "its version is '1.0/0'"),
    (_an_odd_property, "tensor 'a.weight' has properties"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_contradicts_something_else_is_a_fault(
    megatrons: Path, change: Callable[[Any], None], text: str
) -> None:
    assert faults_of(megatrons) == []
    metadata = pickle.loads((megatrons / ".metadata").read_bytes())
    change(metadata)
    (megatrons / ".metadata").write_bytes(pickle.dumps(metadata))
    assert text in " ".join(faults_of(megatrons))


@pytest.mark.parametrize(("strides", "is_fault"), [((3, 1), False), (None, False), (7, True)])
def test_torch_2_15_adds_strides_to_the_properties(
    nested: Path, monkeypatch: pytest.MonkeyPatch, strides: object, is_fault: bool
) -> None:
    metadata = pickle.loads((nested / ".metadata").read_bytes())
    add_strides(monkeypatch, strides)
    (nested / ".metadata").write_bytes(pickle.dumps(metadata))
    assert bool(faults_of(nested)) is is_fault


def test_a_conversion_leaves_strides_out_so_that_older_releases_read_it(
    nested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_strides(monkeypatch, (1,))
    convert_to(nested, tmp_path / "ours")
    convert_to(tmp_path / "ours", tmp_path / "back")
    seen: list[int] = []
    monkeypatch.setattr(TensorProperties, "__setstate__", lambda properties, state: seen.append(len(state)))
    pickle.loads((tmp_path / "back" / ".metadata").read_bytes())
    assert seen == [5] * 4


def add_strides(monkeypatch: pytest.MonkeyPatch, strides: object) -> None:
    pickled = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda one: (*pickled(one)[:5], strides))


def test_a_key_with_control_characters_is_a_note(tmp_path: Path) -> None:
    dcp.save({"a\nb": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    verdict = verify_source(open_source(tmp_path))
    assert not verdict.faults
    assert "the key 'a\\nb' has control characters" in " ".join(verdict.notes)


def test_a_path_of_the_planner_that_is_not_its_key_is_a_fault(nested: Path) -> None:
    metadata = pickle.loads((nested / ".metadata").read_bytes())
    metadata.planner_data["model.w"] = ("model", "u")
    (nested / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "('model', 'u') of 'model.w'" in " ".join(faults_of(nested))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"sharded_backend": "torch_dist", "sharded_backend_versiom": 1}, "'sharded_backend_versiom', which"),
        ({"sharded_backend": "torch_dist", "sharded_backend_version": 3}, "('torch_dist', 3), expected"),
        ({"sharded_backend": "torch_dist", "common_backend": "torch", "common_backend_version": 1}, ""),
    ],
)
def test_metadata_json_that_megatron_refuses_is_a_fault(
    megatrons: Path, config: dict[str, Any], text: str
) -> None:
    (megatrons / "metadata.json").write_text(json.dumps(config))
    assert text in " ".join(faults_of(megatrons)) and bool(faults_of(megatrons)) == bool(text)


def test_a_lost_metadata_json_is_a_fault_where_megatron_needs_it(megatrons: Path) -> None:
    (megatrons / "metadata.json").unlink()
    assert "metadata.json is missing, and Megatron does not load" in " ".join(faults_of(megatrons))


def test_dcp_writes_no_metadata_json_whatever_the_directorys_name(nested: Path) -> None:
    at = nested.rename(nested.with_name("iter_0000005"))
    verdict = verify_source(open_source(at))
    assert not verdict.faults
    assert "metadata.json is missing: Megatron does not load" in " ".join(verdict.notes)
    torch.save({"iteration": 5}, at / "common.pt")
    assert "metadata.json is missing, and Megatron does not load" in " ".join(faults_of(at))


def test_a_later_release_may_add_attributes_and_settings(megatrons: Path) -> None:
    metadata = pickle.loads((megatrons / ".metadata").read_bytes())
    metadata.added_later, metadata.mcore_data = 1, {}
    (megatrons / ".metadata").write_bytes(pickle.dumps(metadata))
    config = json.loads((megatrons / "metadata.json").read_text())
    (megatrons / "metadata.json").write_text(json.dumps(config | {"added_later": 1}))
    if hasattr(metadata, "version"):  # since torch 2.8
        assert faults_of(megatrons) == []


def test_a_damaged_common_pt_is_a_fault(megatrons: Path) -> None:
    torch.save({"iteration": 5, "text": "mark"}, megatrons / "common.pt")
    assert faults_of(megatrons) == []
    data = (megatrons / "common.pt").read_bytes()
    (megatrons / "common.pt").write_bytes(data.replace(b"mark", b"marl"))
    assert "common.pt" in " ".join(faults_of(megatrons))


def test_the_verdict_says_what_it_does_not_cover(megatrons: Path) -> None:
    code, printed, _ = run("verify", megatrons)
    assert code == 0 and printed.endswith(
        "checked; index: no checksum in this format, its structure was checked\n"
    )
    code, printed, _ = run("verify", megatrons, "--json")
    assert json.loads(printed)["uncovered"].startswith("index: no checksum")


def test_bytes_that_the_index_does_not_name_are_noted_as_not_checked(megatrons: Path) -> None:
    with next(megatrons.glob("*.distcp")).open("ab") as file:
        file.write(b"abc")
    (megatrons / "__9_0.distcp").write_bytes(b"of a rank that is gone")
    (megatrons / ".metadata").touch()  # which no file is newer than
    verdict = verify_source(open_source(megatrons))
    text = "bytes that .metadata does not name: no load reads them, and they were not checked"
    assert verdict.good and len(verdict.notes) == 2
    assert verdict.notes[0].endswith(f"has 3 {text}") and verdict.notes[1].endswith(f"has 22 {text}")


def test_every_byte_between_the_fragments_of_our_format_has_a_checksum(tmp_path: Path) -> None:
    """Gaps are zeros, and no tool has to say that they were not looked at."""
    save_trained(tmp_path, "datastates")
    (file,) = tmp_path.glob("data-*")
    (place,) = Checkpoint.open(tmp_path).index.tensor("embedding.weight").file_offsets.tolist()
    data = bytearray(file.read_bytes())
    assert data[place + 20 : place + 64] == bytes(44)  # 5 floats, and the next fragment begins at 64
    data[place + 40] = 1
    file.write_bytes(data)
    code, printed, _ = run("verify", tmp_path)
    assert code == 1 and "FAULTY" in printed
    file.write_bytes(bytes(data) + b"abc")
    assert run("verify", tmp_path)[0] == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_called_good_after_a_flipped_bit_is_loaded_by_torch(nested: Path) -> None:
    """As a run loads it: into the keys and shapes that it was saved with.

    What is refused is not given to torch: a flipped length could take all memory.
    """
    known = dcp.FileSystemReader(nested).read_metadata().state_dict_metadata
    file, chance = nested / ".metadata", random.Random(5)
    whole, good = file.read_bytes(), 0
    for _ in range(600):
        data = bytearray(whole)
        data[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        if faults_of(nested):
            continue
        good += 1
        state = {
            key: torch.zeros(one.size, dtype=one.properties.dtype) if hasattr(one, "size") else 0
            for key, one in known.items()
        }
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(state, storage_reader=dcp.FileSystemReader(nested), planner=planner, no_dist=True)
        assert torch.equal(state["model.w"], NESTED["model"]["w"])
    assert 0 < good < 100
