"""Our reader under torch's own load planner, without a process group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_datastates.errors import CorruptDataError, FormatError
from megatron_datastates.mcore import reader as reader_module
from megatron_datastates.mcore.reader import DataStatesReader, find_fragment
from megatron_datastates.pipeline.load import Checkpoint
from tests.unit.by_hand import Part, fragment, index_of, write_checkpoint
from tests.unit.states import KNOWN_DTYPES, OPTIONS, bits, data_files, new_saver, random_tensor, save

pytestmark = pytest.mark.filterwarnings("ignore:.*single process", "ignore:ComplexHalf")
CONVERTIBLE = random_tensor(torch.int16, (40, 50)).float() / 3


def load(directory: Path, state: dict) -> dict:
    reader = DataStatesReader(Checkpoint.open(directory, OPTIONS))
    dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    return state


def test_every_dtype_is_loaded_in_place(saver, tmp_path):
    stored = {name: random_tensor(getattr(torch, name), (5, 7)) for name in KNOWN_DTYPES}
    save(saver, tmp_path / "c", stored)
    state = {name: torch.zeros_like(tensor) for name, tensor in stored.items() if "float4" not in name}
    places = {name: tensor.data_ptr() for name, tensor in state.items()}
    load(tmp_path / "c", state)
    for name, tensor in state.items():
        assert bits(tensor) == bits(stored[name]), name
        assert tensor.data_ptr() == places[name]


TARGETS = {
    "dense": lambda: torch.zeros(40, 50),
    "transposed": lambda: torch.zeros(50, 40).t(),
    "a slice of columns": lambda: torch.zeros(40, 80)[:, 10:60],
    "every other row": lambda: torch.zeros(80, 50)[::2],
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(40, 50)),
    "double": lambda: torch.zeros(40, 50, dtype=torch.float64),
    "bfloat16": lambda: torch.zeros(40, 50, dtype=torch.bfloat16),
    "half, transposed": lambda: torch.zeros(50, 40, dtype=torch.float16).t(),
}


@pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS.keys())
def test_a_tensor_is_loaded_whatever_its_strides_and_precision(saver, tmp_path, make):
    save(saver, tmp_path / "c", {"w": CONVERTIBLE})
    target = make()
    load(tmp_path / "c", {"w": target})
    assert torch.equal(target.detach(), CONVERTIBLE.to(target.dtype))


def test_scalars_and_empty_tensors_are_loaded(saver, tmp_path):
    save(saver, tmp_path / "c", {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)})
    state = load(tmp_path / "c", {"scalar": torch.tensor(0.0), "empty": torch.empty(0, 3)})
    assert state["scalar"].item() == 2.5


def test_objects_are_loaded_into_nested_states(saver, tmp_path):
    save(saver, tmp_path / "c", {"model.w": torch.ones(3)}, {"extra.args": {"lr": 1}, "step": 7})
    state = load(tmp_path / "c", {"model": {"w": torch.zeros(3)}, "extra": {"args": None}, "step": None})
    assert (state["extra"], state["step"]) == ({"args": {"lr": 1}}, 7)
    assert torch.equal(state["model"]["w"], torch.ones(3))


class Command:
    def __init__(self, path: Path) -> None:
        self.command = f"touch {path}"

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_malicious_object_does_not_run_in_torchs_planner(saver, tmp_path):
    save(saver, tmp_path / "c", {}, {"x": Command(tmp_path / "trace")})
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(tmp_path / "c", {"x": None})
    assert isinstance(caught.value.failures[0][0], FormatError)
    assert not (tmp_path / "trace").exists()


def test_damage_is_an_error_of_ours_within_torchs(saver, tmp_path):
    save(saver, tmp_path / "c", {"w": torch.ones(5000)})
    (path,) = data_files(tmp_path / "c")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    target = torch.zeros(5000)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(tmp_path / "c", {"w": target})
    assert isinstance(caught.value.failures[0][0], CorruptDataError)
    assert not target.any()


def test_a_tensor_in_pieces_over_files_is_put_together(tmp_path):
    halves = [bytes(range(8)), bytes(range(8, 16))]
    parts = [Part(pieces=[(4096, half)]) for half in halves]
    places = [(fragment("w", [4, 4], [0, 2 * n], [4, 2]), n, 4096) for n in (0, 1)]
    write_checkpoint(tmp_path, parts, index_of(places))
    state = load(tmp_path, {"w": torch.zeros(4, 4, dtype=torch.uint8)})
    blocks = [torch.tensor(list(half), dtype=torch.uint8).reshape(4, 2) for half in halves]
    assert torch.equal(state["w"], torch.cat(blocks, dim=1))


def test_small_batches_load_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "_BATCH_BYTES", 1000)
    stored = {str(n): random_tensor(torch.int32, (n * 40,), n) for n in range(20)}
    saver = new_saver()
    save(saver, tmp_path / "c", stored)
    saver.close()
    state = load(tmp_path / "c", {key: torch.zeros_like(tensor) for key, tensor in stored.items()})
    assert all(torch.equal(state[key], tensor) for key, tensor in stored.items())


def test_fragments_are_found_by_hint_or_by_place():
    places = [(fragment("w", [8], [at], [size]), 0, 4096) for at, size in ((4, 4), (0, 0), (0, 4))]
    entry = index_of(places).tensor("w")
    assert find_fragment(entry, MetadataIndex("w", torch.Size([0]), 2)) == 2
    assert find_fragment(entry, MetadataIndex("w", torch.Size([4]), 2)) == 0
    assert find_fragment(entry, MetadataIndex("w", torch.Size([4]), 99)) == 0
    with pytest.raises(FormatError, match=r"'w' has no stored fragment at \(5,\)"):
        find_fragment(entry, MetadataIndex("w", torch.Size([5])))
