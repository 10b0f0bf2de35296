"""Legacy zarr checkpoints: what is read of them, converted, and refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_datastates import zarr_view
from megatron_datastates.convert import job
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sources.source import FragmentRange
from megatron_datastates.convert.sources.zarr_legacy import LegacyZarrSource
from megatron_datastates.errors import (
    FormatError,
    MismatchError,
    MissingKeyError,
    StorageError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from tests.unit.command import run
from tests.unit.converting import convert_to
from tests.unit.legacy_zarr import write_array, write_checkpoint
from tests.unit.states import bits, random_tensor

FC1 = "decoder.layers.mlp.linear_fc1.weight"
MOMENT = f"optimizer.state.exp_avg.{FC1}"
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
DTYPES += ["complex64", "complex128"]
TENSORS = {
    FC1: (random_tensor(torch.bfloat16, (3, 5, 4), 1), (1, 2, 4)),  # the last chunks are padded
    MOMENT: (random_tensor(torch.float32, (3, 4, 4), 2), (1, 2, 4)),
    "norm": (random_tensor(torch.float32, (6,), 3), (6,)),
}
OBJECTS = {
    "rng_state/shard_0.0_2.1": [{"seed": 1}],
    "rng_state/shard_1.0_2.1": [{"seed": 2}],
    "decoder.layers.mlp._extra_state/shard_0_2": torch.tensor([1, 2, 3]),
    "decoder.layers.mlp._extra_state/shard_1_2": None,
}


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "iter_0000007", TENSORS, OBJECTS, {"iteration": 7})
    (tmp_path / "iter_0000007" / f"{MOMENT}.sync").mkdir()
    return tmp_path / "iter_0000007"


def test_a_legacy_checkpoint_is_recognized_and_all_of_it_is_found(legacy):
    source = open_source(legacy)
    assert source.format == "zarr" and isinstance(source, LegacyZarrSource)
    assert {key: (t.dtype, t.global_shape) for key, t in source.tensors.items()} == {
        FC1: ("bfloat16", (3, 5, 4)),
        MOMENT: ("float32", (3, 4, 4)),
        "norm": ("float32", (6,)),
    }
    assert set(source.objects) == OBJECTS.keys()
    assert (source.other_files, source.other_directories) == (["common.pt"], [])


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_read_bit_by_bit(name: str, tmp_path):
    tensor = random_tensor(getattr(torch, name), (5, 7))
    write_checkpoint(tmp_path / "ck", {"w": (tensor, (2, 4))}, {}, {})
    source = open_source(tmp_path / "ck")
    assert source.tensors["w"].dtype == name
    found = source.read_tensor("w")
    assert found.dtype == tensor.dtype and bits(found) == bits(tensor)
    assert bits(source.read_tensor("w", (1, 3), (3, 2))) == bits(tensor[1:4, 3:5])


def test_fragments_are_the_chunks(legacy):
    tensor = open_source(legacy).tensors[FC1]
    assert tensor.offsets.tolist() == [[layer, row, 0] for layer in range(3) for row in (0, 2, 4)]
    assert tensor.shapes.tolist() == [[1, rows, 4] for layer in range(3) for rows in (2, 2, 1)]


def test_a_slice_of_a_chunk_that_no_memory_holds_is_read(legacy):
    path = legacy / "norm" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shape": [1 << 38], "chunks": [1 << 38]}))
    os.truncate(legacy / "norm" / "0", 4 << 38)  # a sparse file
    source, window = open_source(legacy), np.zeros(4, np.uint8)
    assert bits(source.read_tensor("norm", (4,), (4,))) == bits(TENSORS["norm"][0][4:]) + bytes(8)
    source.read_ranges([FragmentRange("norm", 0, 8, 4, 0)], window)
    assert window.tobytes() == bits(TENSORS["norm"][0][2])


def test_any_bytes_of_a_fragment_are_read_from_whole_and_padded_chunks(tmp_path):
    tensor = random_tensor(torch.bfloat16, (5, 7))
    write_checkpoint(tmp_path / "ck", {"w": (tensor, (2, 4))}, {}, {})
    source, window = open_source(tmp_path / "ck"), np.zeros(32, np.uint8)
    ranges = [
        FragmentRange("w", 2, 3, 9, 2),
        FragmentRange("w", 1, 1, 10, 12),
        FragmentRange("w", 5, 1, 5, 24),
    ]
    source.read_ranges(ranges, window)
    assert window[2:11].tobytes() == bits(tensor[2:4, :4])[3:12]
    assert window[12:22].tobytes() == bits(tensor[:2, 4:])[1:11]
    assert window[24:29].tobytes() == bits(tensor[4:, 4:])[1:6]
    assert window[:2].sum() == window[11:12].sum() == window[22:24].sum() == window[29:].sum() == 0


def test_tensors_without_axes_or_elements_are_read(tmp_path):
    tensors = {"scalar": (torch.tensor(2.5), ()), "none": (torch.empty(0, 3), (1, 3))}
    write_checkpoint(tmp_path / "ck", tensors, {}, {})
    source = open_source(tmp_path / "ck")
    assert source.read_tensor("scalar") == 2.5 and source.read_tensor("none").shape == (0, 3)
    source.require_files()


@pytest.mark.parametrize("verify", [[], ["--verify"]], ids=["", "verified"])
@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
def test_tensors_without_elements_are_converted(format: str, verify: list[str], tmp_path):
    tensors = {"none": (torch.empty(0, 3), (1, 3)), "wide": (torch.empty(4, 0, 5), (2, 1, 5))}
    write_checkpoint(tmp_path / "ck", tensors, {}, {})
    source = tmp_path / "ck"
    for target in (tmp_path / "once", tmp_path / "twice"):
        code, _, reported = run("convert", source, target, "--to", format, *verify)
        assert code == 0, reported
        found = {key: entry.global_shape for key, entry in open_source(target).tensors.items()}
        assert found == {"none": (0, 3), "wide": (4, 0, 5)}
        source = target


def test_objects_are_given_as_later_formats_have_them(legacy):
    source = open_source(legacy)
    for key, value in OBJECTS.items():
        (found,) = torch.load(io.BytesIO(source.read_object(key)), weights_only=True)
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
        assert source.object_bytes(key) == len(source.read_object(key))


def test_names_of_objects_that_lack_a_number_are_completed(tmp_path):
    written = {f"rng/shard_{n}.{m}_2": n + m for n in range(2) for m in range(4)}
    write_checkpoint(tmp_path / "ck", {}, written, {})
    assert set(open_source(tmp_path / "ck").objects) == {f"{key}.4" for key in written}


def test_a_legacy_checkpoint_is_converted_bit_by_bit(legacy, tmp_path):
    other = legacy / "modelopt_state"
    other.mkdir()
    (other / "file").write_text("of somebody else")
    target = tmp_path / "converted" / legacy.name
    code, _, reported = run("convert", legacy, target, "--to", "datastates", "--verify", "--ranks", 2)
    assert code == 0, reported
    source = open_source(target)
    assert source.format == "datastates" and len(list(target.glob("data-*"))) == 2
    for key, (tensor, _) in TENSORS.items():
        assert bits(source.read_tensor(key)) == bits(tensor), key
    assert set(source.objects) == OBJECTS.keys()
    assert (target / "common.pt").read_bytes() == (legacy / "common.pt").read_bytes()
    assert [path.name for path in target.iterdir() if path.is_dir()] == ["modelopt_state"]
    assert run("verify", target)[0] == 0 and run("diff", legacy, target)[0] == 0


@pytest.mark.parametrize(
    "changed", [f"{FC1}/0.1.0", "norm/.zarray", "rng_state/shard_0.0_2.1.pt", "common.pt"]
)
def test_a_checkpoint_that_is_saved_again_meanwhile_is_not_converted(changed, legacy, tmp_path, monkeypatch):
    sink = job._sink

    def save_again(*arguments):  # after planning
        (legacy / changed).write_bytes((legacy / changed).read_bytes())
        return sink(*arguments)

    monkeypatch.setattr(job, "_sink", save_again)
    with pytest.raises(StorageError, match=f"{changed} has changed since it was opened"):
        convert_to(legacy, tmp_path / "target")


def test_a_legacy_checkpoint_is_exported_and_viewed(legacy, tmp_path):
    assert run("export", legacy, tmp_path / "out")[0] == 0
    array = zarr_view.open(legacy)[FC1]
    assert array.chunks == (1, 2, 4)
    assert np.asarray(array[...]).tobytes() == bits(TENSORS[FC1][0])


# -- what is wrong ---------------------------------------------------------------------------------------


def test_a_missing_chunk_is_an_error_and_never_zeros(legacy):
    (legacy / MOMENT / "1.1.0").unlink()
    source = open_source(legacy)
    for read in (lambda: source.read_tensor(MOMENT), source.require_files):
        with pytest.raises(StorageError, match=r"1\.1\.0 is missing: the checkpoint has only a part"):
            read()
    assert bits(source.read_tensor(MOMENT, (2, 0, 0), (1, 4, 4))) == bits(TENSORS[MOMENT][0][2])


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize(("key", "chunk"), [(MOMENT, "0.0.0"), (FC1, "0.2.0")])
def test_a_chunk_of_another_size_is_an_error(legacy, change, key, chunk):
    path = legacy / key / chunk
    path.write_bytes((path.read_bytes() + b"x")[: path.stat().st_size + change])
    source, window = open_source(legacy), np.zeros(2, np.uint8)
    number = 0 if key == MOMENT else 2
    for read in (
        lambda: source.read_tensor(key),
        source.require_files,
        lambda: source.read_ranges([FragmentRange(key, number, 0, 2, 0)], window),
    ):
        with pytest.raises(StorageError, match="bytes, expected a chunk of"):
            read()


def test_a_hostile_shape_is_refused_before_memory_is_asked_for(legacy):
    path = legacy / "norm" / ".zarray"
    for chunks in ([1 << 50], [6]):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"shape": [1 << 50], "chunks": chunks}))
        with pytest.raises(StorageError):
            open_source(legacy).read_tensor("norm")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"dtype": "<V2"}, (FormatError, UnsupportedFormatError)),
        ({"dtype": ">f4"}, UnsupportedFormatError),
        ({"dtype": "<M8[s]"}, (FormatError, UnsupportedFormatError)),
        ({"dtype": 5}, FormatError),
        ({"dtype": [["a", "<f4"]]}, UnsupportedFormatError),
        ({"order": "F"}, UnsupportedFormatError),
        ({"compressor": {"id": "zlib", "level": 1}}, UnsupportedFormatError),
        ({"filters": [{"id": "delta", "dtype": "<f4"}]}, UnsupportedFormatError),
        ({"shape": [-1]}, FormatError),
        ({"shape": [6, 6]}, FormatError),
        ({"shape": [6.0]}, FormatError),
        ({"shape": ["6"]}, FormatError),
        ({"shape": 6}, FormatError),
        ({"shape": [True]}, FormatError),
        ({"chunks": [0]}, FormatError),
        ({"chunks": [2, 3]}, FormatError),
        ({"chunks": None}, FormatError),
        ({"dtype": None}, FormatError),
        ({"dtype": "<U8"}, UnsupportedFormatError),
        ({"dtype": "f4,f4"}, UnsupportedFormatError),
        ({"dtype": "<m8[s/0]"}, UnsupportedFormatError),  # of which numpy dies
        ({"zarr_format": 9}, FormatError),
    ],
)
def test_an_array_that_megatron_never_wrote_is_refused(legacy, change, error):
    path = legacy / "norm" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=r"norm/\.zarray"):
        open_source(legacy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}"])
def test_a_damaged_document_is_named(legacy, text):
    (legacy / "norm" / ".zarray").write_text(text)
    with pytest.raises(FormatError, match=r"norm/\.zarray is damaged"):
        open_source(legacy)


def test_objects_cannot_run_code(legacy, tmp_path):
    class Malicious:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    with (legacy / "rng_state/shard_0.0_2.1.pt").open("wb") as file:
        pickle.dump(Malicious(), file)
    with pytest.raises(UnsafeObjectError):
        open_source(legacy).read_object("rng_state/shard_0.0_2.1")
    assert not (tmp_path / "ran").exists()


def test_missing_arrays_and_documents_are_named(legacy):
    source = open_source(legacy)
    with pytest.raises(MissingKeyError, match="no tensor 'nothing'"):
        source.read_tensor("nothing")
    with pytest.raises(MissingKeyError, match="no object 'nothing'"):
        source.read_object("nothing")
    with pytest.raises(MismatchError, match="there is no slice"):
        source.read_tensor("norm", (5,), (2,))


def test_the_package_zarr_is_not_needed(legacy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    monkeypatch.delitem(sys.modules, "megatron_datastates.convert.sources.zarr_legacy")
    assert run("convert", legacy, tmp_path / "out")[0] == 0


def test_the_writer_writes_what_zarr_2_wrote(tmp_path):
    write_array(tmp_path / "w", torch.arange(6).reshape(2, 3).bfloat16(), (1, 3))
    assert (tmp_path / "w/1.0").read_bytes() == bytes.fromhex("40408040a040")
    assert (tmp_path / "w/.zarray").read_bytes() == (
        b'{\n    "chunks": [\n        1,\n        3\n    ],\n    "compressor": null,\n'
        b'    "dtype": "bfloat16",\n    "fill_value": null,\n    "filters": null,\n    "order": "C",\n'
        b'    "shape": [\n        2,\n        3\n    ],\n    "zarr_format": 2\n}'
    )


def test_an_array_of_more_chunks_than_memory_holds_is_refused(legacy, tmp_path):
    path = legacy / "norm" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shape": [10**12], "chunks": [1]}))
    code, _, reported = run("convert", legacy, tmp_path / "out")
    assert code == 2 and "is incomplete: it has 2 files" in reported and reported.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["norm/.zarray", "metadata.json"])
def test_json_that_is_nested_too_deeply_is_damaged(name: str, legacy, tmp_path):
    (legacy / name).write_text("[" * 100_000)
    code, _, reported = run("convert", legacy, tmp_path / "out")
    expected = 2 if name == "metadata.json" else 1  # without it, nothing says which format this is
    assert code == expected and reported.count("\n") == 1
