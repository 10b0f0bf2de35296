"""The command cat: slices, values, objects and .npy files."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.convert.slices import parse_slice
from megatron_datastates.errors import MismatchError
from tests.unit.inspecting import WEIGHT, all_files, call, output_of, refused
from tests.unit.states import KNOWN_DTYPES, SMALL, data_files, random_tensor
from tests.unit.test_optimizer_state import STATE


class Call(NamedTuple):
    name: str
    number: int


class RemovesWhenUnpickled:
    """An object that removes `path` if it is unpickled with pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return shutil.rmtree, (str(self.path),)


@pytest.mark.parametrize(
    "text",
    ["", ":", "0", "-1", "0:1,:,3", "1,2,3", "...,1", "1,...", ":,-2:", "0:2,1:1", "[0,1]", ":, 1 , 0:-1"],
)
def test_cat_prints_the_slice_that_torch_returns(checkpoint, text):
    found = json.loads(output_of("cat", "--json", checkpoint, "decoder.weight", "--", text))
    expected = eval(f"WEIGHT[{text.strip('[]') or '...'}]")
    assert found["shape"] == list(expected.shape)
    assert found["values"] == expected.tolist()


@pytest.mark.parametrize("text", ["-1", "-2:,:2", "-1,-1,-1"])
def test_cat_takes_a_slice_that_begins_with_a_minus(checkpoint, text):
    found = json.loads(output_of("cat", checkpoint, "decoder.weight", text, "--json"))
    assert found["values"] == eval(f"WEIGHT[{text}]").tolist()


@pytest.mark.parametrize(
    "text",
    [
        "9" * 5000,
        f"0:{'9' * 5000}",
        "2",
        "-3",
        "0:3",
        "1:0",
        "0,0,0,0",
        "::2",
        "a",
        "0:1:1",
        "1.5",
        ",",
        "--1",
    ],
)
def test_a_malformed_slice_or_one_beyond_the_tensor_is_refused(text):
    with pytest.raises(MismatchError):
        parse_slice(text, (2, 3, 4))


def test_cat_prints_values_and_objects(checkpoint):
    assert "nan" in output_of("cat", checkpoint, "odd [bold]")
    assert "-1.5" in output_of("cat", checkpoint, "decoder.bias")
    assert output_of("cat", checkpoint, "common_state/shard_0_1").strip() == "{'iteration': 5}"
    assert json.loads(output_of("cat", checkpoint, "odd [bold]", "--json"))["values"][1:3] == ["nan", "inf"]
    assert json.loads(output_of("cat", checkpoint, f"{STATE}w", "0", "--json"))["values"] == [2, 3]


def test_cat_shows_what_megatron_stores_and_runs_none_of_its_code(tmp_path):
    state = {"args": argparse.Namespace(hidden=8, sum=Fraction(1, 3)), (1, 2): math.inf, 3: {4}}
    hostile = [RemovesWhenUnpickled(tmp_path / "c")]
    ds.save(
        {"a": torch.ones(1), "common": [state], "hostile": hostile, "numpy": [np.ones(3)]},
        tmp_path / "c",
        **SMALL,
        trust_objects=True,
    )
    assert "Namespace(hidden=8" in output_of("cat", tmp_path / "c", "common")
    assert json.loads(output_of("cat", tmp_path / "c", "common", "--json"))["value"] == {
        "args": {"hidden": 8, "sum": {"arguments": [1, 3]}}, "(1, 2)": "inf", "3": "{4}",
    }  # fmt: skip
    assert "array([1., 1., 1.])" in output_of("cat", tmp_path / "c", "numpy")
    assert "rmtree(arguments=" in output_of("cat", tmp_path / "c", "hostile")
    assert (tmp_path / "c").exists()


def test_cat_shows_what_a_named_tuple_was_made_with(tmp_path):
    ds.save({"a": torch.ones(1), "call": Call("f", 3)}, tmp_path, **SMALL, trust_objects=True)
    assert output_of("cat", tmp_path, "call").strip() == "Call(arguments=('f', 3))"


def test_an_object_that_contains_itself_is_not_json(tmp_path):
    circular: list[object] = [1, 2]
    circular.append(circular)
    ds.save({"a": torch.ones(1), "circular": circular}, tmp_path, **SMALL)
    assert "cannot be shown" in refused("cat", tmp_path, "circular", "--json")
    assert "Recursion on list" in output_of("cat", tmp_path, "circular")


def test_an_object_that_shares_its_parts_is_not_printed_for_ever(tmp_path):
    shared: list[object] = [0]
    for _ in range(40):
        shared = [shared, shared]
    ds.save({"a": torch.ones(1), "shared": shared}, tmp_path, **SMALL)
    for arguments in ([], ["--json"]):
        assert "has more than 1048576 values" in refused("cat", tmp_path, "shared", *arguments)


def test_json_output_is_standard_json(tmp_path):
    huge = torch.tensor([1e308, 1e308, -1e308, -1e308], dtype=torch.float64)
    ds.save({"t": huge, "o": [{"x": math.nan, "y": (math.inf,)}]}, tmp_path, **SMALL)
    (row,) = json.loads(output_of("show", tmp_path, "t", "--stats", "--json"), parse_constant=pytest.fail)[
        "tensors"
    ]
    assert row["norm"] is None and row["max"] == 1e308
    found = json.loads(output_of("cat", tmp_path, "o", "--json"), parse_constant=pytest.fail)
    assert found["value"] == {"x": "nan", "y": ["inf"]}


def test_json_has_keys_that_are_the_same_as_text(tmp_path):
    inner = {1: "a", "1": "b"}
    ds.save({"t": torch.ones(1), "o": [{"x": inner, None: {True: 1, "True": inner}}]}, tmp_path, **SMALL)
    pairs = [[1, "a"], ["1", "b"]]
    assert json.loads(output_of("cat", tmp_path, "o", "--json"))["value"] == {
        "x": pairs, "None": [[True, 1], ["True", pairs]],
    }  # fmt: skip


def test_a_number_that_is_too_long_to_print_is_refused(tmp_path):
    ds.save({"t": torch.ones(1), "o": [10**5000]}, tmp_path, **SMALL)
    for arguments in ([], ["--json"]):
        assert "object 'o' cannot be shown: Exceeds the limit" in refused("cat", tmp_path, "o", *arguments)


@pytest.mark.parametrize("name", KNOWN_DTYPES)
def test_cat_prints_every_dtype(tmp_path, name):
    ds.save({"t": random_tensor(getattr(torch, name), (3,))}, tmp_path, **SMALL)
    assert f"t: {name}, [3]" in output_of("cat", tmp_path, "t")


@pytest.mark.parametrize("name", KNOWN_DTYPES)
def test_cat_writes_the_bits_of_every_dtype(tmp_path, name):
    tensor = random_tensor(getattr(torch, name), (5, 3))
    ds.save({"t": tensor}, tmp_path / "c", **SMALL)
    output_of("cat", tmp_path / "c", "t", "1:4", "--out", tmp_path / "t.npy")
    found = np.load(tmp_path / "t.npy")
    assert found.shape == (3, 3)
    assert found.tobytes() == tensor[1:4].contiguous().view(torch.uint8).numpy().tobytes()


def test_cat_converts(checkpoint, tmp_path):
    result = call("cat", checkpoint, "decoder.bias", "--out", tmp_path / "raw.npy")
    assert "uint16 (the raw bits of bfloat16)" in result.stderr
    output_of("cat", checkpoint, "decoder.bias", "--out", tmp_path / "b.npy", "--as", "float32")
    found = np.load(tmp_path / "b.npy")
    assert (found.dtype, found.tolist()) == (np.float32, [0.5, -1.5])
    found = json.loads(output_of("cat", checkpoint, "decoder.bias", "--as", "float64", "--json"))
    assert (found["dtype"], found["values"]) == ("float64", [0.5, -1.5])
    output_of("cat", checkpoint, "decoder.weight", "1,:,2", "--out", tmp_path / "w.npy")
    assert np.load(tmp_path / "w.npy").tolist() == WEIGHT[1, :, 2].tolist()


@pytest.mark.parametrize("name", [name for name in KNOWN_DTYPES if "complex" in name or "float4" in name])
def test_cat_refuses_conversions_that_lose_a_part(tmp_path, name):
    ds.save({"t": random_tensor(getattr(torch, name), (3,))}, tmp_path / "c", **SMALL)
    before = all_files(tmp_path)
    for target in ([], ["--out", tmp_path / "t.npy"]):
        said = refused("cat", tmp_path / "c", "t", "--as", "float32", *target)
        assert f"tensor 't': {name} cannot be converted to float32" in said
    assert all_files(tmp_path) == before


def test_cat_writes_part_by_part(tmp_path, monkeypatch):
    tensor = random_tensor(torch.float32, (50, 7))
    ds.save({"t": tensor}, tmp_path / "c", **SMALL)
    monkeypatch.setattr("megatron_datastates.convert.sinks.npy.PART_BYTES", 120)
    output_of("cat", tmp_path / "c", "t", "3:,1:", "--out", tmp_path / "t.npy")
    assert np.load(tmp_path / "t.npy").tobytes() == tensor[3:, 1:].numpy().tobytes()


def test_cat_prints_json_of_what_it_writes(checkpoint, tmp_path):
    printed = output_of("cat", checkpoint, "decoder.weight", "1,:,2", "--out", tmp_path / "w.npy", "--json")
    assert json.loads(printed) == {
        "target": str(tmp_path / "w.npy"), "key": "decoder.weight", "dtype": "float32", "shape": [3]
    }  # fmt: skip


@pytest.mark.parametrize("name", ["t.txt", "t"])
def test_cat_says_which_format_a_file_of_another_name_has(checkpoint, tmp_path, name):
    result = call("cat", checkpoint, "scalar", "--out", tmp_path / name)
    assert result.stderr.endswith(f"{name}: [], int64, in the format of .npy files\n")
    assert np.load(tmp_path / name) == 7


def test_cat_leaves_no_file_where_it_fails(checkpoint, tmp_path):
    (tmp_path / "there.npy").write_text("mine")
    assert "exists: choose another target" in refused(
        "cat", checkpoint, "scalar", "--out", tmp_path / "there.npy"
    )
    assert (tmp_path / "there.npy").read_text() == "mine"
    assert "is not a directory: create it" in refused(
        "cat", checkpoint, "scalar", "--out", tmp_path / "no" / "t.npy"
    )
    path = data_files(checkpoint)[0]
    data = bytearray(path.read_bytes())
    data[4100] ^= 1
    path.write_bytes(data)
    before = all_files(tmp_path)
    assert "is corrupt" in refused("cat", checkpoint, "decoder.weight", "--out", tmp_path / "t.npy", code=1)
    assert all_files(tmp_path) == before


def test_cat_leaves_temporary_files_of_others_alone(checkpoint, tmp_path):
    theirs = tmp_path / ".t.npy.tmp"
    theirs.write_text("theirs")
    output_of("cat", checkpoint, "scalar", "--out", tmp_path / "t.npy")
    assert theirs.read_text() == "theirs" and np.load(tmp_path / "t.npy") == 7
    assert {path.name for path in tmp_path.iterdir()} >= {"t.npy", ".t.npy.tmp"}


def test_cat_of_a_huge_tensor_asks_for_a_slice(tmp_path):
    ds.save({"t": torch.zeros(2 << 20, dtype=torch.uint8)}, tmp_path, **SMALL)
    assert "add a slice" in refused("cat", tmp_path, "t")
    assert "[0, 0]" in output_of("cat", tmp_path, "t", "0:2")
