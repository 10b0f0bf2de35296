"""Our reader under torch's own load planner, without a process group."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

import megatron_datastates as ds
from megatron_datastates.config import MIB
from megatron_datastates.dcp import transfers
from megatron_datastates.dcp.fragments import FragmentFinder
from megatron_datastates.engine import native
from megatron_datastates.engine.reader import SLOT_BYTES, Reader
from megatron_datastates.errors import CorruptDataError, FormatError
from megatron_datastates.mcore.load.reader import DataStatesReader
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.objects import ObjectSource
from tests.unit.by_hand import Part, fragment, index_of, write_checkpoint
from tests.unit.states import KNOWN_DTYPES, OPTIONS, SMALL, bits, data_files, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:.*single process", "ignore:ComplexHalf")
ROOT = Path(__file__).parents[2]
OBJECT = ObjectSource("o", 7, Mutability.NEVER).serialize()
CONVERTIBLE = random_tensor(torch.int16, (40, 50)).float() / 3


def load(directory: Path, state: dict) -> dict:
    reader = DataStatesReader(ds.open(directory, **SMALL))
    dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner())
    return state


def test_every_dtype_is_loaded_in_place(tmp_path):
    stored = {name: random_tensor(getattr(torch, name), (5, 7)) for name in KNOWN_DTYPES}
    ds.save(stored, tmp_path / "c", **SMALL)
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
def test_a_tensor_is_loaded_whatever_its_strides_and_precision(tmp_path, make):
    ds.save({"w": CONVERTIBLE}, tmp_path / "c", **SMALL)
    target = make()
    load(tmp_path / "c", {"w": target})
    assert torch.equal(target.detach(), CONVERTIBLE.to(target.dtype))


def test_scalars_and_empty_tensors_are_loaded(tmp_path):
    ds.save({"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}, tmp_path / "c", **SMALL)
    state = load(tmp_path / "c", {"scalar": torch.tensor(0.0), "empty": torch.empty(0, 3)})
    assert state["scalar"].item() == 2.5


def test_objects_are_loaded_into_nested_states(tmp_path):
    ds.save({"model.w": torch.ones(3), "extra": {"args": [1]}, "step": 7}, tmp_path / "c", **SMALL)
    state = load(tmp_path / "c", {"model": {"w": torch.zeros(3)}, "extra": {"args": None}, "step": None})
    assert (state["extra"], state["step"]) == ({"args": [1]}, 7)
    assert torch.equal(state["model"]["w"], torch.ones(3))


class Command:
    def __init__(self, path: Path) -> None:
        self.command = f"touch {path}"

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_malicious_object_does_not_run_in_torchs_planner(tmp_path):
    ds.save({"x": Command(tmp_path / "trace")}, tmp_path / "c", **SMALL, trust_objects=True)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(tmp_path / "c", {"x": None})
    assert isinstance(caught.value.failures[0][0], FormatError)
    assert not (tmp_path / "trace").exists()


def test_damage_is_an_error_of_ours_within_torchs(tmp_path):
    ds.save({"w": torch.ones(5000)}, tmp_path / "c", **SMALL)
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


class CountingPlanner(dcp.DefaultLoadPlanner):
    """Makes a tensor of its own for what is no plain tensor, as Megatron's does for quantized ones."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most_alive = self.commits = 0

    def resolve_tensor(self, read_item):
        target = super().resolve_tensor(read_item)
        if type(target) is torch.Tensor:
            return target
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        return torch.empty(target.shape)

    def commit_tensor(self, read_item, tensor):
        self.commits += 1
        target = super().resolve_tensor(read_item)
        if type(target) is not torch.Tensor:
            self.alive -= 1
            target.copy_(tensor)


def test_what_is_converted_in_small_parts_is_loaded_the_same(tmp_path, monkeypatch):
    """Tensors that are cut, tensors that share a part, and a part of a tensor in every part of the file."""
    monkeypatch.setattr(transfers, "_TEMPORARY_BYTES", 1000)
    stored = {str(n): random_tensor(torch.int32, (n, 3, 40), n) for n in range(20)}
    ds.save(stored, tmp_path / "c", **SMALL)
    state = {key: torch.zeros_like(tensor).double() for key, tensor in stored.items()}
    reader = DataStatesReader(ds.open(tmp_path / "c", **SMALL))
    dcp.load(state, storage_reader=reader, planner=(planner := CountingPlanner()))
    assert planner.commits == 19  # nothing is read of the empty one
    assert all(torch.equal(state[key], tensor.double()) for key, tensor in stored.items())


class Unplain(torch.Tensor):
    pass


def test_tensors_that_the_planner_makes_do_not_live_all_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(transfers, "_TEMPORARY_BYTES", 4 * 300)
    stored = {str(n): random_tensor(torch.int16, (100,), n).float() for n in range(10)}
    ds.save(stored, tmp_path / "c", **SMALL)
    state = {key: torch.zeros(100).as_subclass(Unplain if int(key) % 2 else torch.Tensor) for key in stored}
    planner = CountingPlanner()
    reader = DataStatesReader(ds.open(tmp_path / "c", **SMALL))
    dcp.load(state, storage_reader=reader, planner=planner)
    assert all(torch.equal(state[key].as_subclass(torch.Tensor), tensor) for key, tensor in stored.items())
    assert (planner.alive, planner.most_alive, planner.commits) == (0, 2, 10)


def test_one_pass_reads_every_block_once(tmp_path):
    stored = {str(n): random_tensor(torch.int32, (100_000 + n,), n) for n in range(20)}
    ds.save(stored | {"step": 7}, tmp_path / "c", **SMALL)
    reader = DataStatesReader(checkpoint := ds.open(tmp_path / "c", **SMALL))
    state = {key: torch.zeros_like(tensor) for key, tensor in stored.items()} | {"step": None}
    dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner())
    assert checkpoint.costs.bytes_read == checkpoint.footer(0).data_bytes


def test_elements_that_share_memory_are_torchs_to_refuse(tmp_path):
    ds.save({"w": torch.arange(12.0).reshape(3, 4)}, tmp_path / "c", **SMALL)
    with pytest.raises(dcp.api.CheckpointException, match="single memory location"):
        load(tmp_path / "c", {"w": torch.zeros(4).expand(3, 4)})


def test_a_missing_file_is_reported_before_anything_is_loaded(tmp_path):
    parts = [Part(pieces=[(4096, bytes([n] * 8))], objects={f"o{n}": (5000, OBJECT)}) for n in range(3)]
    places = [(fragment(f"w{n}", [8], [0], [8]), n, 4096) for n in range(3)]
    write_checkpoint(tmp_path, parts, index_of(places, {f"o{n}": n for n in range(3)}))
    data_files(tmp_path)[1].unlink()
    state = {f"w{n}": torch.full((8,), 9, dtype=torch.uint8) for n in range(3)}
    state |= {"w1": torch.full((8,), 9.0), "o0": None}  # one is converted
    with pytest.raises(dcp.api.CheckpointException, match=r"data-00001.*No such file"):
        load(tmp_path, state)
    assert all((state[f"w{n}"] == 9).all() for n in range(3)) and state["o0"] is None


def test_all_corrupt_files_are_named_with_places_keys_and_ranks(tmp_path):
    parts = [Part(pieces=[(4096, bytes(range(8)))]) for _ in range(3)]
    places = [(fragment(f"w{n}", [8], [0], [8]), n, 4096) for n in range(3)]
    write_checkpoint(tmp_path, parts, index_of(places))
    for number in (0, 2):
        path = data_files(tmp_path)[number]
        data = bytearray(path.read_bytes())
        data[4100] ^= 1
        path.write_bytes(data)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(tmp_path, {f"w{n}": torch.zeros(8, dtype=torch.uint8) for n in range(3)})
    message = str(caught.value.failures[0][0])
    for number in (0, 2):
        assert f"{data_files(tmp_path)[number]}, which rank {number} wrote, is corrupt" in message
        assert f"byte offset 0 has a wrong checksum. It holds data of 'w{number}'" in message
    assert "'w1'" not in message


class Stop(Exception):
    pass


def test_an_interrupted_load_writes_nothing_afterwards(tmp_path, monkeypatch):
    """The signal comes after the first tenth of a second of the read, whose end would take ten seconds."""
    ds.save({"w": torch.ones(40 << 18)}, tmp_path / "c", **SMALL)
    target = torch.zeros(40 << 18)
    options = dataclasses.replace(OPTIONS, faults="read:0:stall=1000", read_threads=1)
    checkpoint = Checkpoint.open(tmp_path / "c", options)
    read = Reader._read_files

    def read_interrupted(reader: Reader, sources: Any, spans: Any, *_: Any) -> Any:
        return read(reader, sources, spans, lambda bytes_read: signal.raise_signal(signal.SIGUSR1))

    def stop(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGUSR1, stop)
    monkeypatch.setattr(Reader, "_read_files", read_interrupted)
    try:
        with pytest.raises(dcp.api.CheckpointException) as caught:
            dcp.load({"w": target}, storage_reader=DataStatesReader(checkpoint))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(caught.value.failures[0][0], Stop)
    assert not target[-1]
    there = target.clone()
    time.sleep(0.3)
    assert torch.equal(target, there)


def test_a_load_that_is_interrupted_as_it_starts_writes_nothing_afterwards(tmp_path, monkeypatch):
    """The job has begun, and nobody waits for it yet."""
    ds.save({"w": torch.ones(40 << 18)}, tmp_path / "c", **SMALL)
    target = torch.zeros(40 << 18)
    options = dataclasses.replace(OPTIONS, faults="read:0:stall=50", read_threads=1)
    checkpoint = Checkpoint.open(tmp_path / "c", options)
    read = Reader._read_files

    @contextlib.contextmanager
    def stopped() -> Iterator[None]:
        yield
        raise Stop

    def read_interrupted(*args: Any) -> Any:
        monkeypatch.setattr(native, "errors_for_users", stopped)
        return read(*args)

    monkeypatch.setattr(Reader, "_read_files", read_interrupted)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load({"w": target}, storage_reader=DataStatesReader(checkpoint))
    assert isinstance(caught.value.failures[0][0], Stop)
    there = target.clone()
    time.sleep(0.5)
    assert torch.equal(target, there)


PEAK = """
import sys
from pathlib import Path
import torch, torch.distributed.checkpoint as dcp
from megatron_datastates.mcore.load.reader import DataStatesReader
from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.unit.states import OPTIONS

def load(**state):
    reader = DataStatesReader(Checkpoint.open(sys.argv[1], OPTIONS))
    dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner())

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

dtype = getattr(torch, sys.argv[2])
target = torch.zeros(100 << 10, 512, dtype=dtype).fill_(2)
load(small=torch.zeros(10, dtype=dtype))  # takes what the first load takes for good
Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here on
before = status("VmRSS")
load(w=target)
print(status("VmHWM") - before)
assert (target == 1).all()
"""


@pytest.mark.parametrize(
    ("dtype", "temporaries"), [pytest.param("float32", 0, marks=pytest.mark.long), ("bfloat16", 32 * MIB)]
)
def test_memory_beyond_the_targets_is_bounded(tmp_path, dtype, temporaries):
    ds.save({"w": torch.ones(100 << 10, 512), "small": torch.ones(10)}, tmp_path / "c", **SMALL)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "c"), dtype]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    pool = OPTIONS.read_threads * SLOT_BYTES
    assert int(ended.stdout) <= pool + temporaries + 8 * MIB


def test_fragments_are_found_by_hint_or_by_place():
    places = [(fragment("w", [8], [at], [size]), 0, 4096) for at, size in ((4, 4), (0, 0), (0, 4))]
    entry = index_of(places).tensor("w")
    assert FragmentFinder({})(entry, MetadataIndex("w", torch.Size([0]), 2)) == 2
    assert FragmentFinder({})(entry, MetadataIndex("w", torch.Size([4]), 2)) == 0
    assert FragmentFinder({})(entry, MetadataIndex("w", torch.Size([4]), 99)) == 0
    with pytest.raises(FormatError, match=r"'w' has no stored fragment at \(5,\)"):
        FragmentFinder({})(entry, MetadataIndex("w", torch.Size([5])))
