"""The commands ls, show, cat, verify, repair and prune, as they are called: output, exit codes, bad input."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from megatron_datastates.cli.main import app
from megatron_datastates.convert import contents
from megatron_datastates.convert.contents import Content, Statistics, statistics
from megatron_datastates.convert.slices import parse_slice
from megatron_datastates.errors import MismatchError
from megatron_datastates.format.values import MANIFEST_NAME
from tests.unit.states import KNOWN_DTYPES, data_files, new_saver, random_tensor, save
from tests.unit.test_optimizer_state import BUCKET, GROUP, STATE, bucket, map_of, parameter, shard

WEIGHT = torch.arange(24.0).reshape(2, 3, 4)
ODD = torch.tensor([1.0, math.nan, math.inf, -3.0, -math.inf, math.nan])
TENSORS = {
    "decoder.weight": WEIGHT,
    "decoder.bias": torch.tensor([0.5, -1.5]).bfloat16(),
    "odd [bold]": ODD,
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
    f"{GROUP}0.{BUCKET}.exp_avg": torch.arange(6.0),
}
MAP = map_of(bucket(6, parameter("w", 2, 6, shard("w", (2, 2), (0, 0), (2, 2), 0, (2, 1)))))
OBJECTS = {
    "common_state/shard_0_1": [{"iteration": 5}],
    f"{GROUP}0.datastates_map/shard_0_1": [MAP],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "run"
    saver = new_saver()
    for number in (5, 10):
        directory = root / f"iter_{number:07d}"
        save(saver, directory, TENSORS, OBJECTS)
        (directory / "metadata.json").write_text('{"sharded_backend": "datastates"}')
    saver.close()
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture
def checkpoint(root) -> Path:
    return root / "iter_0000005"


class RemovesWhenUnpickled:
    """Were it unpickled as pickle does it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return shutil.rmtree, (str(self.path),)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def told(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    """The one line that says why it cannot be done."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("datastates: ")
    return line


def all_files(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in root.rglob("*")}


# -- ls ---------------------------------------------------------------------------------------------------


def test_ls_tells_every_iteration(root):
    shutil.copytree(root / "iter_0000005", root / "iter_0000015")
    (root / "iter_0000015" / MANIFEST_NAME).unlink()
    shutil.copytree(root / "iter_0000005", root / "iter_0000020")
    (root / "iter_0000020" / MANIFEST_NAME).write_text("nonsense")
    (root / "iter_0000025").mkdir()
    (root / "iter_0000025" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    rows = json.loads(told("ls", root, "--json"))
    found = [(row["iteration"], row["format"], row["complete"], row["ranks"]) for row in rows]
    assert found == [
        (5, "datastates", True, 1),
        (10, "datastates", True, 1),
        (15, "datastates", False, None),
        (20, "datastates", False, None),
        (25, "torch_dist", True, None),
    ]
    assert rows[0]["bytes"] == sum(path.stat().st_size for path in (root / "iter_0000005").iterdir())
    lines = told("ls", root).splitlines()
    assert [line.split()[2] for line in lines[1:6]] == ["yes", "yes", "no", "DAMAGED", "yes"]
    assert "does not begin as a datastates manifest" in lines[6]


def test_ls_of_a_checkpoint_says_what_it_is(checkpoint):
    assert "is a checkpoint, not the directory of a run" in refused("ls", checkpoint)


# -- show -------------------------------------------------------------------------------------------------


def test_show_tells_keys_shapes_dtypes_shards_files_and_bytes(checkpoint):
    found = json.loads(told("show", checkpoint, "--json"))
    rows = {row["key"]: row for row in found["tensors"]}
    assert rows.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        expected = {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "shards": 1, "files": 1}
        expected |= {"key": key, "bytes": tensor.numel() * tensor.itemsize}
        assert rows[key] == expected
    assert {row["key"] for row in found["objects"]} == OBJECTS.keys()
    assert all(row["bytes"] > 0 for row in found["objects"])


def test_show_takes_patterns_and_prints_keys_as_they_are(checkpoint):
    text = told("show", checkpoint, "*d*")
    assert "odd [bold]" in text and "decoder.weight" in text and "scalar" not in text
    assert "[2, 3, 4]" in text and "96 B" in text
    assert told("show", checkpoint, "*state/*").split()[:2] == ["object", "size"]


def test_show_tells_statistics_of_finite_elements(checkpoint):
    rows = {row["key"]: row for row in json.loads(told("show", checkpoint, "--stats", "--json"))["tensors"]}
    odd = {name: rows["odd [bold]"][name] for name in ("min", "max", "mean", "norm", "nan", "inf")}
    assert odd == {"min": -3, "max": 1, "mean": -1, "norm": math.sqrt(10), "nan": 2, "inf": 2}
    assert rows["decoder.bias"]["min"] == -1.5
    assert (rows["empty"]["min"], rows["empty"]["norm"]) == (None, 0)
    assert "3.16228" in told("show", checkpoint, "odd*", "--stats")


def test_show_tells_optimizer_state_by_parameter(checkpoint):
    (row,) = json.loads(told("show", checkpoint, "--optimizer", "--stats", "--json"))["tensors"]
    assert (row["key"], row["shape"], row["max"]) == (f"{STATE}w", [2, 2], 5)


@pytest.mark.parametrize("name", KNOWN_DTYPES)
def test_statistics_do_not_depend_on_parts(name, monkeypatch):
    tensor = random_tensor(getattr(torch, name), (7, 5, 3))
    whole = np.array([[0, 0, 0], [7, 5, 3]])

    def read(offset, shape):
        return tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    content = Content("t", name, (7, 5, 3), whole[:1], whole[1:], None, read)
    if "float4" in name:
        with pytest.raises(NotImplementedError):
            statistics(content)
        return
    expected = Statistics()
    expected.add(tensor)
    for most in (1, 4, 16, 1000):
        monkeypatch.setattr(contents, "PART_BYTES", most * tensor.itemsize)
        found = statistics(content)
        for field in ("finite", "nans", "infinities", "minimum", "maximum"):
            assert getattr(found, field) == getattr(expected, field), field
        assert math.isclose(found.squares, expected.squares, rel_tol=1e-9)
        assert math.isclose(found.total, expected.total, rel_tol=1e-6, abs_tol=1e-9 * expected.norm)
    assert expected.finite + expected.nans + expected.infinities == 105


# -- cat --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", ":", "0", "-1", "0:1,:,3", "1,2,3", "...,1", "1,...", ":,-2:", "0:2,1:1", "[0,1]", ":, 1 , 0:-1"],
)
def test_cat_gives_the_slice_that_torch_gives(checkpoint, text):
    found = json.loads(told("cat", "--json", checkpoint, "decoder.weight", "--", text))
    expected = eval(f"WEIGHT[{text.strip('[]') or '...'}]")
    assert found["shape"] == list(expected.shape)
    assert found["values"] == expected.tolist()


@pytest.mark.parametrize("text", ["-1", "-2:,:2", "-1,-1,-1"])
def test_cat_takes_a_slice_that_begins_with_a_minus(checkpoint, text):
    found = json.loads(told("cat", checkpoint, "decoder.weight", text, "--json"))
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
def test_a_slice_that_is_none_or_leaves_the_tensor_is_refused(text):
    with pytest.raises(MismatchError):
        parse_slice(text, (2, 3, 4))


def test_cat_prints_values_and_objects(checkpoint):
    assert "nan" in told("cat", checkpoint, "odd [bold]")
    assert "-1.5" in told("cat", checkpoint, "decoder.bias")
    assert told("cat", checkpoint, "common_state/shard_0_1").strip() == "{'iteration': 5}"
    assert json.loads(told("cat", checkpoint, "odd [bold]", "--json"))["values"][1:3] == ["nan", "inf"]
    assert json.loads(told("cat", checkpoint, f"{STATE}w", "0", "--json"))["values"] == [2, 3]


def test_cat_shows_what_megatron_stores_and_runs_none_of_its_code(tmp_path):
    state = {"args": argparse.Namespace(hidden=8, sum=Fraction(1, 3)), (1, 2): math.inf, 3: {4}}
    hostile = [RemovesWhenUnpickled(tmp_path / "c")]
    save(
        new_saver(trust_objects=True),
        tmp_path / "c",
        {"a": torch.ones(1)},
        {"common": [state], "hostile": hostile, "numpy": [np.ones(3)]},
    )
    assert "Namespace(hidden=8" in told("cat", tmp_path / "c", "common")
    assert json.loads(told("cat", tmp_path / "c", "common", "--json"))["value"] == {
        "args": {"hidden": 8, "sum": {"arguments": [1, 3]}}, "(1, 2)": "inf", "3": "{4}",
    }  # fmt: skip
    assert "array([1., 1., 1.])" in told("cat", tmp_path / "c", "numpy")
    assert "rmtree(arguments=" in told("cat", tmp_path / "c", "hostile")
    assert (tmp_path / "c").exists()


def test_an_object_within_itself_is_no_json(tmp_path, saver):
    circular: list[object] = [1, 2]
    circular.append(circular)
    save(saver, tmp_path, {"a": torch.ones(1)}, {"circular": circular})
    assert "cannot be shown" in refused("cat", tmp_path, "circular", "--json")
    assert "Recursion on list" in told("cat", tmp_path, "circular")


def test_json_has_no_token_that_json_lacks(tmp_path, saver):
    huge = torch.tensor([1e308, 1e308, -1e308, -1e308], dtype=torch.float64)
    save(saver, tmp_path, {"t": huge}, {"o": [{"x": math.nan, "y": (math.inf,)}]})
    (row,) = json.loads(told("show", tmp_path, "t", "--stats", "--json"), parse_constant=pytest.fail)[
        "tensors"
    ]
    assert row["norm"] is None and row["max"] == 1e308
    found = json.loads(told("cat", tmp_path, "o", "--json"), parse_constant=pytest.fail)
    assert found["value"] == {"x": "nan", "y": ["inf"]}


@pytest.mark.parametrize("name", KNOWN_DTYPES)
def test_cat_prints_every_dtype(tmp_path, saver, name):
    save(saver, tmp_path, {"t": random_tensor(getattr(torch, name), (3,))})
    assert f"t: {name}, [3]" in told("cat", tmp_path, "t")


@pytest.mark.parametrize("name", KNOWN_DTYPES)
def test_cat_writes_the_bits_of_every_dtype(tmp_path, saver, name):
    tensor = random_tensor(getattr(torch, name), (5, 3))
    save(saver, tmp_path / "c", {"t": tensor})
    told("cat", tmp_path / "c", "t", "1:4", "--out", tmp_path / "t.npy")
    found = np.load(tmp_path / "t.npy")
    assert found.shape == (3, 3)
    assert found.tobytes() == tensor[1:4].contiguous().view(torch.uint8).numpy().tobytes()


def test_cat_converts(checkpoint, tmp_path):
    result = call("cat", checkpoint, "decoder.bias", "--out", tmp_path / "raw.npy")
    assert "uint16 (the raw bits of bfloat16)" in result.stderr
    told("cat", checkpoint, "decoder.bias", "--out", tmp_path / "b.npy", "--as", "float32")
    found = np.load(tmp_path / "b.npy")
    assert (found.dtype, found.tolist()) == (np.float32, [0.5, -1.5])
    found = json.loads(told("cat", checkpoint, "decoder.bias", "--as", "float64", "--json"))
    assert (found["dtype"], found["values"]) == ("float64", [0.5, -1.5])
    told("cat", checkpoint, "decoder.weight", "1,:,2", "--out", tmp_path / "w.npy")
    assert np.load(tmp_path / "w.npy").tolist() == WEIGHT[1, :, 2].tolist()


@pytest.mark.parametrize("name", [name for name in KNOWN_DTYPES if "complex" in name or "float4" in name])
def test_cat_converts_nothing_by_halves(tmp_path, saver, name):
    save(saver, tmp_path, {"t": random_tensor(getattr(torch, name), (3,))})
    before = all_files(tmp_path)
    for target in ([], ["--out", tmp_path / "t.npy"]):
        assert "cannot be converted to float32" in refused("cat", tmp_path, "t", "--as", "float32", *target)
    assert all_files(tmp_path) == before


def test_cat_writes_part_by_part(tmp_path, saver, monkeypatch):
    tensor = random_tensor(torch.float32, (50, 7))
    save(saver, tmp_path / "c", {"t": tensor})
    monkeypatch.setattr("megatron_datastates.convert.sinks.npy.PART_BYTES", 120)
    told("cat", tmp_path / "c", "t", "3:,1:", "--out", tmp_path / "t.npy")
    assert np.load(tmp_path / "t.npy").tobytes() == tensor[3:, 1:].numpy().tobytes()


def test_cat_leaves_no_file_where_it_fails(checkpoint, tmp_path):
    (tmp_path / "there.npy").write_text("mine")
    assert "exists already" in refused("cat", checkpoint, "scalar", "--out", tmp_path / "there.npy")
    assert (tmp_path / "there.npy").read_text() == "mine"
    assert "No such file" in refused("cat", checkpoint, "scalar", "--out", tmp_path / "no" / "t.npy")
    path = data_files(checkpoint)[0]
    data = bytearray(path.read_bytes())
    data[4100] ^= 1
    path.write_bytes(data)
    before = all_files(tmp_path)
    assert "is corrupt" in refused("cat", checkpoint, "decoder.weight", "--out", tmp_path / "t.npy")
    assert all_files(tmp_path) == before


def test_cat_leaves_temporary_files_of_others_alone(checkpoint, tmp_path):
    theirs = tmp_path / ".t.npy.tmp"
    theirs.write_text("theirs")
    told("cat", checkpoint, "scalar", "--out", tmp_path / "t.npy")
    assert theirs.read_text() == "theirs" and np.load(tmp_path / "t.npy") == 7
    assert {path.name for path in tmp_path.iterdir()} >= {"t.npy", ".t.npy.tmp"}


def test_cat_of_a_huge_tensor_asks_for_a_slice(tmp_path, saver):
    save(saver, tmp_path, {"t": torch.zeros(2 << 20, dtype=torch.uint8)})
    assert "add a slice" in refused("cat", tmp_path, "t")
    assert "[0, 0]" in told("cat", tmp_path, "t", "0:2")


# -- verify, repair, prune --------------------------------------------------------------------------------


def test_verify_tells_good_and_faulty_by_its_exit_code(checkpoint):
    assert ": good: 6 tensors and 2 objects in 1 files" in told("verify", checkpoint)
    verdict = json.loads(told("verify", checkpoint, "--quick", "--json"))
    assert (verdict["good"], verdict["bytes_checked"]) == (True, 0)
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    result = call("verify", checkpoint)
    assert result.exit_code == 1
    assert "fault: " in result.stdout and "FAULTY" in result.stdout


def test_repair_says_what_it_took_on_trust(checkpoint):
    (checkpoint / MANIFEST_NAME).unlink()
    text = told("repair", checkpoint)
    assert "note: " in text and "repaired: save " in text
    (checkpoint / MANIFEST_NAME).unlink()
    assert json.loads(told("repair", checkpoint, "--json"))["iteration"] == 5
    assert ": good" in told("verify", checkpoint)


def test_prune_removes_nothing_without_yes(root):
    before = all_files(root)
    assert "would remove" in told("prune", root, "--keep-last", 1)
    assert json.loads(told("prune", root, "--keep-last", 1, "--json"))["done"] == []
    assert all_files(root) == before
    assert "removed 1 of 1" in told("prune", root, "--keep-last", 1, "--yes")
    assert [path.name for path in root.iterdir()] == ["iter_0000010"]
    assert json.loads(told("prune", root, "--keep-last", 1, "--yes", "--json"))["removed"] == []


def test_prune_says_how_old_left_overs_are(root):
    directory = root / "iter_0000010"
    for name, age in (
        ("data-00000-0000000000000001-1.bin", 7200),
        (".datastates-x-0000000000000002-1.tmp", 5),
    ):
        (directory / name).write_bytes(b"123")
        os.utime(directory / name, (time.time() - age,) * 2)
    text = told("prune", root, "--keep-last", 9)
    assert (
        "-1.bin  3 B  (no manifest names it; 2 h old)" in text and "Add --yes" in text and ".tmp" not in text
    )
    assert len(json.loads(told("prune", root, "--keep-last", 9, "--json", "--min-age", 0))["left_overs"]) == 2
    assert "and 1 of 1 left-over files" in told("prune", root, "--keep-last", 9, "--yes")
    assert not (directory / "data-00000-0000000000000001-1.bin").exists()
    assert ": good" in told("verify", directory)


# -- bad input --------------------------------------------------------------------------------------------

BAD = [
    ("ls {root}/nothing", "No such file"),
    ("ls {empty}", "holds no checkpoint"),
    ("show {empty}", "no"),
    ("show {checkpoint} 'nothing*'", "matches 'nothing*'"),
    ("show {checkpoint} 'nothing*' --optimizer", "matches 'nothing*'"),
    ("show {golden} --optimizer", "no optimizer map"),
    ("cat {empty} key", "no"),
    ("cat {checkpoint} decoder.weight --out .", "exists already"),
    ("cat {checkpoint} decoder.weight --jsn", "'--jsn' is not a slice"),
    ("cat {checkpoint} nothing", "no tensor or object 'nothing'"),
    ("cat {checkpoint} scalar 0", "has 1 axes, but the tensor has 0"),
    ("cat {checkpoint} decoder.weight 0:9", "out of range for an axis of 2"),
    ("cat {checkpoint} decoder.weight --as int8", "--as: expected float32 or float64"),
    ("cat {checkpoint} common_state/shard_0_1 0", "is an object"),
    ("verify {empty}", "no datastates checkpoint"),
    ("verify {other}", "torch_dist checkpoint"),
    ("repair {empty}", "nothing to repair"),
    ("repair {other}", "nothing to repair"),
    ("repair {checkpoint}", "its manifest is sound"),
    ("prune {root}", "--keep-last N"),
    ("prune {root} --keep-last 0", "say what to keep"),
    ("prune {root}/nothing --keep-last 1", "cannot be listed"),
    ("prune {empty} --keep-last 1", "holds no checkpoint"),
]


@pytest.mark.parametrize(("command", "reason"), BAD)
def test_bad_input_is_one_line_and_changes_nothing(root, checkpoint, tmp_path, command, reason):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".metadata").touch()
    places = {
        "root": root,
        "checkpoint": checkpoint,
        "empty": tmp_path / "empty",
        "other": tmp_path / "other",
    }
    places["golden"] = Path(__file__).parents[1] / "golden" / "megatron-0.19"
    before = all_files(tmp_path)
    assert reason in refused(*(word.strip("'").format(**places) for word in command.split()))
    assert all_files(tmp_path) == before


@pytest.mark.parametrize("command", ["verify", "repair", "show", "cat", "diff", "export", "convert"])
def test_a_path_that_is_not_utf8_is_one_line(tmp_path, command):
    directory = os.fsdecode(os.fsencode(tmp_path) + b"/iter_\xff")
    Path(directory).mkdir()
    more = {"cat": ["w"], "diff": [tmp_path], "export": [tmp_path / "o"], "convert": [tmp_path / "o"]}
    assert "is not UTF-8" in refused(command, directory, *more.get(command, []))


def test_a_directory_that_is_not_utf8_is_listed(root):
    odd = os.fsdecode(os.fsencode(root) + b"\xff")
    shutil.move(root, odd)
    assert "DAMAGED" not in told("ls", odd)
    assert r"\udcff" in told("prune", odd, "--keep-last", 1)


def test_metadata_that_is_nested_without_end_is_no_metadata(root, checkpoint):
    (checkpoint / "metadata.json").write_text("[" * 100_000)
    assert "datastates" in told("ls", root)
    assert "would remove" in told("prune", root, "--keep-last", 1)
    result = call("verify", checkpoint)
    assert result.exit_code == 1 and "it names no sharded_backend" in result.stdout


def test_every_command_has_an_example_and_exit_codes_in_its_help():
    for command in ("ls", "show", "cat", "verify", "repair", "prune"):
        text = told(command, "--help")
        assert f"Example: datastates {command}" in text
        assert "Exit codes: 0" in text
