"""Export: what Hugging Face's own library finds in the files."""

from __future__ import annotations

import contextlib
import json
import pickle
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import megatron_datastates as ds
from megatron_datastates.cli import export as command
from megatron_datastates.cli import shared
from megatron_datastates.cli.entry import main
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sinks import safetensors as exporter
from megatron_datastates.convert.sinks import target as targets
from megatron_datastates.convert.sinks.safetensors import INDEX_NAME, choose_weights, export
from megatron_datastates.convert.sources.datastates import DataStatesSource
from megatron_datastates.errors import OptionError, StorageError, UnsupportedFormatError
from tests.unit.command import run
from tests.unit.converting import convert_to, save_with_dcp
from tests.unit.states import SMALL, bits, data_files, random_tensor

FC1 = "decoder.layers.mlp.linear_fc1.weight"
NORM = "decoder.final_layernorm.weight"
MOMENT = f"optimizer.state.exp_avg.{FC1}"
STATE = {
    FC1: random_tensor(torch.bfloat16, (3, 16, 8), 1),
    NORM: random_tensor(torch.float32, (8,), 2),
    "bytes": random_tensor(torch.uint8, (3,), 5),
    "scalar": random_tensor(torch.int64, (), 3),
    "empty": torch.empty(0, 4),
    MOMENT: random_tensor(torch.float32, (3, 16, 8), 4),
}
LAYERS = {f"decoder.layers.{n}.mlp.linear_fc1.weight": STATE[FC1][n] for n in range(3)}
WEIGHTS = LAYERS | {key: STATE[key] for key in (NORM, "bytes", "scalar", "empty")}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    ds.save(STATE, tmp_path / "ck", **SMALL)
    return tmp_path / "ck"


def loaded(target: Path) -> dict[str, torch.Tensor]:
    """Loads all files by safetensors; none of them names a tensor twice."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(target.glob("*.safetensors")):
        part = load_file(path)
        assert not part.keys() & tensors.keys()
        tensors |= part
    return tensors


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def test_a_checkpoint_of_torch_dist_that_is_saved_again_meanwhile_is_not_exported(tmp_path):
    save_with_dcp(tmp_path / "ck", {"a": torch.ones(3), "b": torch.ones(3)})
    source = open_source(tmp_path / "ck")

    def save_again(done: int) -> None:
        save_with_dcp(tmp_path / "ck", {"a": torch.zeros(3), "b": torch.zeros(3)})

    with pytest.raises(StorageError, match="has changed since it was opened: a save into the directory"):
        export(source, tmp_path / "out", choose_weights(source), progress=save_again)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_a_save_that_has_written_only_data_files_is_not_exported(tmp_path):
    for name, value in (("ck", 1.0), ("new", 2.0)):
        state = {key: torch.full((3,), value) for key in "ab"}
        save_with_dcp(tmp_path / name, state, single_file_per_rank=False)
    source, order = open_source(tmp_path / "ck"), []

    def read(key, *box):
        if order:  # the file of the other tensor was not open before
            shutil.copy(tmp_path / "new" / source.place(key, [0])[0], tmp_path / "ck")
        order.append(source.place(key, [0])[0])
        return source.read_tensor(key, *box)

    with pytest.raises(StorageError, match=r"distcp has changed since it was opened"):
        export(source, tmp_path / "out", choose_weights(source), read=read)
    assert len(set(order)) == 2


@pytest.mark.parametrize(("name", "is_exported"), [("train.log", True), ("common.pt", False)])
def test_of_files_beside_ours_only_a_later_saves_keep_it_from_being_exported(name, is_exported, tmp_path):
    save_with_dcp(tmp_path / "stock", {"a": torch.ones(3)})
    for one in ("train.log", "common.pt"):
        torch.save({"iteration": 5}, tmp_path / "stock" / one)
    convert_to(tmp_path / "stock", tmp_path / "ck")
    source = open_source(tmp_path / "ck")
    assert isinstance(source, DataStatesSource) and set(source.other_files) == {"common.pt", "train.log"}

    def write_again(done: int) -> None:
        torch.save({"iteration": [6]}, tmp_path / "ck" / name)

    refused = pytest.raises(StorageError, match=f"{name} has changed since it was opened: a save into")
    with contextlib.nullcontext() if is_exported else refused:
        export(source, tmp_path / "out", choose_weights(source), progress=write_again)
    assert (tmp_path / "out").exists() == is_exported


def test_what_is_whole_of_a_damaged_checkpoint_can_be_exported(tmp_path):
    lost, unnamed = "optimizer.state.exp_avg.a", "optimizer.state.exp_avg_sq.a"
    state = {key: torch.ones(3) for key in ("a", lost, unnamed)}
    save_with_dcp(tmp_path / "ck", state, single_file_per_rank=False)
    path = tmp_path / "ck" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_data = {at: info for at, info in metadata.storage_data.items() if at.fqn != unnamed}
    path.write_bytes(pickle.dumps(metadata))
    source = open_source(tmp_path / "ck")
    (tmp_path / "ck" / source.place(lost, [0])[0]).unlink()
    export(source, tmp_path / "out", choose_weights(source))
    assert loaded(tmp_path / "out").keys() == {"a"}


def test_weights_are_exported_per_layer_without_the_optimizer(checkpoint, tmp_path):
    code, printed, _ = run("export", checkpoint, tmp_path / "out", "--json")
    assert code == 0 and json.loads(printed) == {
        "target": str(tmp_path / "out"),
        "files": ["model.safetensors"],
        "tensors": len(WEIGHTS),
        "tensor_bytes": sum(tensor.nbytes for tensor in WEIGHTS.values()),
    }
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert_same(loaded(tmp_path / "out"), WEIGHTS)


def test_layers_can_be_left_stacked(checkpoint, tmp_path):
    assert run("export", checkpoint, tmp_path / "out", "--stacked")[0] == 0
    assert_same(loaded(tmp_path / "out"), {key: STATE[key] for key in STATE if key != MOMENT})


def test_patterns_choose_tensors_even_of_the_optimizer(checkpoint, tmp_path):
    patterns = ["--keys", "optimizer.*", "--keys", "*norm*"]
    assert run("export", checkpoint, tmp_path / "out", "--stacked", *patterns)[0] == 0
    assert_same(loaded(tmp_path / "out"), {MOMENT: STATE[MOMENT], NORM: STATE[NORM]})


@pytest.mark.parametrize(("most", "memory"), [(300, "1"), (300, "100"), (600, "1MiB")])
def test_files_are_no_larger_than_asked_and_the_index_names_them(
    checkpoint, tmp_path, most, memory, monkeypatch
):
    monkeypatch.setattr(shared.MEMORY, "least_bytes", 1)
    sizes = ["--max-shard-size", most, "--memory", memory]
    assert run("export", checkpoint, tmp_path / "out", *sizes)[0] == 0
    target = tmp_path / "out"
    assert_same(loaded(target), WEIGHTS)
    index = json.loads((target / INDEX_NAME).read_text())
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert index["weight_map"].keys() == WEIGHTS.keys()
    for file in files:
        tensors = load_file(target / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == tensors.keys()
        assert sum(tensor.nbytes for tensor in tensors.values()) <= most


def test_a_tensor_larger_than_a_file_makes_a_file_of_its_own(checkpoint, tmp_path):
    assert run("export", checkpoint, tmp_path / "out", "--max-shard-size", "50")[0] == 0
    assert_same(loaded(tmp_path / "out"), WEIGHTS)
    for path in (tmp_path / "out").glob("*.safetensors"):
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 50


@pytest.mark.parametrize("name", exporter.DTYPES)
def test_every_dtype_is_what_safetensors_reads(name: str, tmp_path):
    tensor = random_tensor(getattr(torch, name), (3, 5))
    ds.save({"b": torch.zeros(1, dtype=torch.uint8), "a": tensor}, tmp_path / "ck", **SMALL)
    source = open_source(tmp_path / "ck")
    export(source, tmp_path / "out", choose_weights(source))
    assert_same(loaded(tmp_path / "out"), {"a": tensor, "b": torch.zeros(1, dtype=torch.uint8)})


def test_files_say_that_they_are_of_torch_and_data_is_aligned(checkpoint, tmp_path):
    assert run("export", checkpoint, tmp_path / "out")[0] == 0
    data = (tmp_path / "out/model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}  # transformers refuses a file without
    for name, entry in header.items():
        assert (8 + size + entry["data_offsets"][0]) % WEIGHTS[name].itemsize == 0


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path):
    ds.save({"z": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "ck", **SMALL)
    with pytest.raises(UnsupportedFormatError, match=r"'z' has dtype complex128, .* exclude it with --keys"):
        choose_weights(open_source(tmp_path / "ck"))


def test_two_tensors_of_one_name_are_refused(tmp_path):
    ds.save({"layers.w": torch.zeros(2, 2), "layers.1.w": torch.zeros(2)}, tmp_path / "ck", **SMALL)
    source = open_source(tmp_path / "ck")
    with pytest.raises(OptionError, match=r"would both be named 'layers\.1\.w'"):
        choose_weights(source)
    assert len(choose_weights(source, stacked=True)) == 2


def test_the_name_of_a_files_header_is_refused(tmp_path):
    ds.save({"__metadata__": torch.zeros(2)}, tmp_path / "ck", **SMALL)
    with pytest.raises(OptionError, match="'__metadata__' is a name that safetensors"):
        choose_weights(open_source(tmp_path / "ck"))


def refused(tmp_path: Path, *arguments: object, expected: int = 2) -> str:
    """Returns the one line that `export` ends with when it refuses; no file is left."""
    before = sorted(tmp_path.rglob("*"))
    code, printed, reported = run("export", *arguments)
    assert (code, printed, reported.count("\n")) == (expected, "", 1), reported
    assert sorted(tmp_path.rglob("*")) == before
    return reported


def test_bad_input_is_one_line_and_nothing_is_written(checkpoint, tmp_path):
    out = tmp_path / "out"
    assert "no checkpoint" in refused(tmp_path, tmp_path, out)
    assert "no tensor in" in refused(tmp_path, checkpoint, out, "--keys", "nothing.*")
    (tmp_path / "file").touch()
    assert "file is not a writable directory" in refused(tmp_path, checkpoint, tmp_path / "file/out")
    assert "expected a size such as" in refused(tmp_path, checkpoint, out, "--max-shard-size", "5 parsecs")
    assert "expected a size such as" in refused(tmp_path, checkpoint, out, "--memory", "-1")
    assert "expected at least 1MiB" in refused(tmp_path, checkpoint, out, "--memory", "0")
    out.mkdir()
    assert "exists: choose another target" in refused(tmp_path, checkpoint, out)


def test_a_checkpoint_without_weights_is_refused_by_what_it_lacks(tmp_path):
    ds.save({"object": [1]}, tmp_path / "empty", **SMALL)
    ds.save({MOMENT: STATE[MOMENT]}, tmp_path / "optimizer", **SMALL)
    assert "empty holds no tensors" in refused(tmp_path, tmp_path / "empty", tmp_path / "out")
    assert "empty holds no tensors" in refused(tmp_path, tmp_path / "empty", tmp_path / "out", "--keys", "a")
    assert "optimizer holds no weights, only" in refused(tmp_path, tmp_path / "optimizer", tmp_path / "out")
    ds.save({}, tmp_path / "nothing", **SMALL)
    code, _, said = run("show", tmp_path / "nothing")
    assert code == 2 and "nothing holds no tensors, objects or streams" in said


def test_a_checkpoint_that_cannot_be_read_leaves_no_file(checkpoint, tmp_path):
    (path,) = data_files(checkpoint)
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    assert "is corrupt" in refused(tmp_path, checkpoint, tmp_path / "out", expected=1)
    path.unlink()
    assert path.name in refused(tmp_path, checkpoint, tmp_path / "out")


def test_too_little_space_is_seen_before_anything_is_written(checkpoint, tmp_path, monkeypatch):
    class Usage:
        free = 100

    monkeypatch.setattr(targets.shutil, "disk_usage", lambda path: Usage)
    monkeypatch.setattr(DataStatesSource, "read_tensor", None)
    assert "has 100 B free, and 811 B are needed: free some" in refused(
        tmp_path, checkpoint, tmp_path / "out"
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_export_leaves_no_file(checkpoint, tmp_path, monkeypatch, error):
    seen: list[bytes] = []

    def interrupted(*arguments: object) -> torch.Tensor:
        if len(seen) == 2:
            assert [path.suffix for path in tmp_path.iterdir() if path != checkpoint] == [".tmp"]
            raise error
        seen.append(b"")
        return torch.zeros(8)

    monkeypatch.setattr(DataStatesSource, "read_tensor", interrupted)
    before = sorted(tmp_path.rglob("*"))
    source = open_source(checkpoint)
    with pytest.raises(type(error)):
        export(source, tmp_path / "out", choose_weights(source))
    assert sorted(tmp_path.rglob("*")) == before


def test_ctrl_c_ends_the_command_with_130_and_leaves_no_file(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(DataStatesSource, "read_tensor", lambda *_: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr("sys.argv", ["datastates", "export", str(checkpoint), str(tmp_path / "out")])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest-xdist ignore it
    try:
        with pytest.raises(SystemExit, match="130"):
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ("", "datastates: interrupted\n")
    assert list(tmp_path.iterdir()) == [checkpoint]


def test_a_disk_that_is_full_while_it_is_written_is_one_line_with_the_name(checkpoint, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))  # stands in for a full disk
    try:
        said = refused(tmp_path, checkpoint, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == f"datastates: {tmp_path / 'out'}: File too large\n"


def test_what_appears_meanwhile_is_not_replaced(checkpoint, tmp_path):
    with pytest.raises(StorageError, match="exists"), targets.publish_on_exit(tmp_path / "out") as temporary:
        temporary.write_text("ours")
        (tmp_path / "out").write_text("another's")
    assert sorted(tmp_path.iterdir()) == [checkpoint, tmp_path / "out"]
    assert (tmp_path / "out").read_text() == "another's"


def test_no_more_than_the_memory_asked_for_is_read_at_once(checkpoint, tmp_path, monkeypatch):
    real, sizes = DataStatesSource.read_tensor, []

    def read(*arguments: object) -> torch.Tensor:
        tensor = real(*arguments)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(DataStatesSource, "read_tensor", read)
    monkeypatch.setattr(shared.MEMORY, "least_bytes", 64)
    assert run("export", checkpoint, tmp_path / "out", "--memory", "64")[0] == 0
    assert max(sizes) <= 64


def test_the_help_has_an_example():
    assert "Example: datastates export" in command.export.__doc__
