"""The commands ls, show, verify, repair and prune: output, exit codes, and bad input, also of cat."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import megatron_datastates as ds
from megatron_datastates.convert import look
from megatron_datastates.convert import statistics as parts
from megatron_datastates.convert.contents import Content
from megatron_datastates.convert.statistics import Statistics, statistics
from megatron_datastates.format.directory import COMMON_STATE_KEY
from megatron_datastates.format.values import MANIFEST_NAME
from tests.unit.inspecting import OBJECTS, TENSORS, all_files, call, output_of, refused
from tests.unit.states import KNOWN_DTYPES, SMALL, random_tensor
from tests.unit.test_optimizer_state import STATE

# -- ls ---------------------------------------------------------------------------------------------------


def test_ls_lists_every_iteration(root):
    shutil.copytree(root / "iter_0000005", root / "iter_0000015")
    (root / "iter_0000015" / MANIFEST_NAME).unlink()
    shutil.copytree(root / "iter_0000005", root / "iter_0000020")
    (root / "iter_0000020" / MANIFEST_NAME).write_text("nonsense")
    (root / "iter_0000025").mkdir()
    (root / "iter_0000025" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    rows = json.loads(output_of("ls", root, "--json"))
    found = [(row["iteration"], row["format"], row["complete"], row["ranks"]) for row in rows]
    assert found == [
        (5, "datastates", True, 1),
        (10, "datastates", True, 1),
        (15, "datastates", False, None),
        (20, "datastates", False, None),
        (25, "torch_dist", False, None),
    ]
    assert rows[0]["bytes"] == sum(path.stat().st_size for path in (root / "iter_0000005").iterdir())
    lines = output_of("ls", root).splitlines()
    assert [line.split()[2] for line in lines[1:6]] == ["yes", "yes", "no", "DAMAGED", "DAMAGED"]
    assert lines[6].startswith("iter_0000015: it has no datastates.manifest: `datastates repair")
    assert "does not begin as a datastates manifest does: `datastates repair` rebuilds it" in lines[7]
    assert lines[8] == "iter_0000025: .metadata is missing"


@pytest.mark.parametrize("most_parsed_bytes", [1, 1 << 20])
def test_a_checkpoint_of_pytorchs_is_complete_and_megatrons_without_metadata_json_is_not(
    tmp_path, monkeypatch, most_parsed_bytes
):
    monkeypatch.setattr(look, "_MOST_PARSED_BYTES", most_parsed_bytes)
    states = {"step_1": {}, "step_2": {COMMON_STATE_KEY: [1]}, "step_3": {}, "iter_0000004": {}}
    for name, more in states.items():
        writer = dcp.FileSystemWriter(tmp_path / name)
        dcp.save({"w": torch.ones(3), **more}, storage_writer=writer, no_dist=True)
    (tmp_path / "step_3" / "common.pt").touch()
    found = {name: look.look_at(tmp_path / name) for name in states}
    assert [one.state for one in found.values()] == ["complete"] + ["unfinished"] * 3
    assert "it has no metadata.json, as PyTorch writes none" in found["step_1"].note


def test_what_megatrons_torch_dcp_writes_is_complete(tmp_path):
    path = tmp_path / "iter_0000005"
    state = {"args": argparse.Namespace(), "model": {"w": torch.ones(3)}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    assert look.look_at(path).state == "complete"


def test_one_parameter_is_counted_as_one(tmp_path):
    ds.save({"w": torch.ones(1)}, tmp_path / "ck", **SMALL)
    assert "1 parameter in float32" in output_of("show", tmp_path / "ck")


def test_ls_lists_checkpoints_with_names_of_their_own(checkpoint, tmp_path):
    folder = tmp_path / "own"
    (folder / "logs").mkdir(parents=True)
    for name in ("step_10", "step_9"):
        shutil.copytree(checkpoint, folder / name)
    (folder / "step_10" / "metadata.json").write_text("{")
    lines = output_of("ls", folder).splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["step_9", "datastates", "yes"],
        ["step_10", "datastates", "DAMAGED"],
    ]
    assert "metadata.json is damaged" in lines[3] and len(lines) == 4, "no tracker belongs there"
    shutil.rmtree(folder / "step_10")
    shutil.rmtree(folder / "step_9")
    assert "is not the directory of a run" in refused("ls", folder)


def test_ls_says_what_an_empty_directory_may_be(root):
    (root / "iter_0000025").mkdir()
    last = output_of("ls", root).splitlines()[-2]
    assert last.startswith("iter_0000025: it is empty: its save has just begun, or has failed"), last


# -- show -------------------------------------------------------------------------------------------------


def test_show_lists_keys_shapes_dtypes_shards_files_and_bytes(checkpoint):
    found = json.loads(output_of("show", checkpoint, "--json"))
    assert (found["path"], found["format"]) == (str(checkpoint), "datastates")
    rows = {row["key"]: row for row in found["tensors"]}
    assert rows.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        expected = {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "shards": 1, "files": 1}
        expected |= {"key": key, "bytes": tensor.numel() * tensor.itemsize}
        assert rows[key] == expected
    assert {row["key"] for row in found["objects"]} == OBJECTS.keys()
    assert all(row["bytes"] > 0 for row in found["objects"])


def test_show_takes_patterns_and_prints_keys_as_they_are(checkpoint):
    text = output_of("show", checkpoint, "*d*")
    assert "odd [bold]" in text and "decoder.weight" in text and "scalar" not in text
    assert "[2, 3, 4]" in text and "96 B" in text
    assert output_of("show", checkpoint, "*state/*").split()[:2] == ["size", "object"]


def test_show_reports_statistics_of_finite_elements(checkpoint):
    rows = {
        row["key"]: row for row in json.loads(output_of("show", checkpoint, "--stats", "--json"))["tensors"]
    }
    odd = {name: rows["odd [bold]"][name] for name in ("min", "max", "mean", "norm", "nan", "inf")}
    assert odd == {"min": -3, "max": 1, "mean": -1, "norm": math.sqrt(10), "nan": 2, "inf": 2}
    assert rows["decoder.bias"]["min"] == -1.5
    assert (rows["empty"]["min"], rows["empty"]["norm"]) == (None, 0)
    assert "3.16228" in output_of("show", checkpoint, "odd*", "--stats")


def test_show_lists_optimizer_state_by_parameter(checkpoint):
    (row,) = json.loads(output_of("show", checkpoint, "--optimizer", "--stats", "--json"))["tensors"]
    assert (row["key"], row["shape"], row["max"]) == (f"{STATE}w", [2, 2], 5)


@pytest.mark.parametrize("name", KNOWN_DTYPES)
def test_statistics_do_not_depend_on_parts(name, monkeypatch):
    tensor = random_tensor(getattr(torch, name), (7, 5, 3))
    whole = np.array([[0, 0, 0], [7, 5, 3]])

    def read(offset, shape):
        return tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    content = Content("t", name, (7, 5, 3), whole[:1], whole[1:], None, read)
    if "float4" in name:
        assert statistics([content]) == [None]
        return
    expected = Statistics()
    expected.add(tensor)
    for most in (1, 4, 16, 1000):
        monkeypatch.setattr(parts, "PART_BYTES", most * tensor.itemsize)
        (found,) = statistics([content])
        for field in ("finite", "nans", "infinities", "minimum", "maximum"):
            assert getattr(found, field) == getattr(expected, field), field
        assert math.isclose(found.squares, expected.squares, rel_tol=1e-9)
        assert math.isclose(found.total, expected.total, rel_tol=1e-6, abs_tol=1e-9 * expected.norm)
    assert expected.finite + expected.nans + expected.infinities == 105


@pytest.mark.parametrize(("name", "large"), [("complex64", 3e38), ("complex32", 60000)])
def test_an_absolute_value_may_be_larger_than_the_dtype_can_hold(name, large):
    found = Statistics()
    found.add(torch.tensor([complex(large, large)], dtype=getattr(torch, name)))
    assert (found.finite, found.infinities) == (1, 0)
    assert math.isclose(found.norm, large * math.sqrt(2), rel_tol=1e-3)


# -- verify, repair, prune --------------------------------------------------------------------------------


def test_verify_reports_good_and_faulty_by_its_exit_code(checkpoint):
    assert ": good: 6 tensors and 2 objects in 1 file, " in output_of("verify", checkpoint)
    verdict = json.loads(output_of("verify", checkpoint, "--quick", "--json"))
    assert (verdict["path"], verdict["good"], verdict["bytes_checked"]) == (str(checkpoint), True, 0)
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    result = call("verify", checkpoint)
    assert result.exit_code == 1
    assert "fault: " in result.stdout and "FAULTY" in result.stdout


def test_repair_says_what_it_took_on_trust(checkpoint):
    (checkpoint / MANIFEST_NAME).unlink()
    text = output_of("repair", checkpoint)
    assert "note: " in text and "repaired: save " in text
    (checkpoint / MANIFEST_NAME).unlink()
    assert json.loads(output_of("repair", checkpoint, "--json"))["iteration"] == 5
    assert ": good" in output_of("verify", checkpoint)


def test_prune_removes_nothing_without_yes(root):
    before = all_files(root)
    assert "would remove" in output_of("prune", root, "--keep-last", 1)
    listed = json.loads(output_of("prune", root, "--keep-last", 1, "--json"))
    assert [one["iteration"] for one in listed["would_remove"]] == [5] and listed["removed"] == []
    assert all_files(root) == before
    assert "removed 1 checkpoint" in output_of("prune", root, "--keep-last", 1, "--yes")
    assert [path.name for path in root.iterdir()] == ["iter_0000010"]
    assert json.loads(output_of("prune", root, "--keep-last", 1, "--yes", "--json"))["removed"] == []


def test_prune_says_how_old_left_overs_are(root):
    directory = root / "iter_0000010"
    for name, age in (
        ("data-00000-0000000000000001-1.bin", 7200),
        (".datastates-x-0000000000000002-1.tmp", 5),
    ):
        (directory / name).write_bytes(b"123")
        os.utime(directory / name, (time.time() - age,) * 2)
    text = output_of("prune", root, "--keep-last", 9)
    assert (
        "-1.bin  3 B  (no manifest names it; 2 h old)" in text and "Add --yes" in text and ".tmp" not in text
    )
    assert (
        len(json.loads(output_of("prune", root, "--keep-last", 9, "--json", "--min-age", 0))["left_overs"])
        == 2
    )
    assert "and 1 left-over file" in output_of("prune", root, "--keep-last", 9, "--yes")
    assert not (directory / "data-00000-0000000000000001-1.bin").exists()
    assert ": good" in output_of("verify", directory)


def test_a_checkpoint_of_megatrons_legacy_format_is_named_and_left_to_megatron(tmp_path: Path) -> None:
    checkpoint = tmp_path / "iter_0000100"
    (checkpoint / "mp_rank_00").mkdir(parents=True)
    (checkpoint / "mp_rank_00" / "model_optim_rng.pt").write_bytes(bytes(100))
    assert output_of("ls", tmp_path).splitlines()[1].split()[:3] == ["100", "torch", "unreadable"]
    assert "a checkpoint of Megatron's legacy format (--ckpt-format torch)" in refused("show", checkpoint)
    assert "(its format is torch)" in output_of("prune", tmp_path, "--keep-last", 1)
    folder = checkpoint / "mp_rank_00"
    (folder / "model_optim_rng.pt").rename(folder / "train_dataloader_dprank000.pt")
    assert output_of("ls", tmp_path).splitlines()[1].split()[:2] == ["100", "unknown"], (
        "--dataloader-save makes such folders, whatever the format"
    )


# -- bad input --------------------------------------------------------------------------------------------

BAD = [
    ("ls {root}/nothing", "does not exist"),
    ("ls {empty}", "has no directory iter_*"),
    ("ls {empty} --json", "has no directory iter_*"),
    ("show {empty}", "no"),
    ("show {checkpoint} 'nothing*'", "matches 'nothing*'"),
    ("show {checkpoint} 'nothing*' --optimizer", "matches 'nothing*'"),
    ("show {golden} --optimizer", "no optimizer map"),
    ("cat {empty} key", "no"),
    ("cat {checkpoint} decoder.weight --out .", "exists: choose another target"),
    ("cat {checkpoint} decoder.weight --jsn", "'--jsn' is not a slice"),
    ("cat {checkpoint} nothing", "no tensor or object 'nothing'"),
    ("cat {checkpoint} common_state", "(it has 'common_state/shard_0_1')"),
    ("cat {checkpoint} scalar 0", "has 1 axes, but the tensor has 0"),
    ("cat {checkpoint} decoder.weight 0:9", "out of range for an axis of 2"),
    ("cat {checkpoint} decoder.weight --as int8", "'int8' is not one of 'float32', 'float64'"),
    ("cat {checkpoint} common_state/shard_0_1 0", "is an object"),
    ("cat {checkpoint}", "Missing argument 'KEY'. See `datastates cat --help`"),
    ("sho {checkpoint}", "No such command 'sho'"),
    ("verify {empty}", "no checkpoint of a known format (it is empty)"),
    ("repair {empty}", "nothing to repair"),
    ("repair {other}", "nothing to repair"),
    ("repair {checkpoint}", "its manifest is undamaged"),
    ("prune {root}", "--keep-last N"),
    ("prune {root} --keep-last 0", "'--keep-last': 0 is not in the range x>=1"),
    ("prune {root} --keep-last 1 --keep-every -2", "'--keep-every': -2 is not in the range x>=1"),
    ("prune {root}/nothing --keep-last 1", "does not exist"),
    ("prune {empty} --keep-last 1", "has no directory iter_*"),
]


DAMAGED = "show {other}"


@pytest.mark.parametrize(("command", "reason"), [*BAD, (DAMAGED, ".metadata is damaged: it is empty")])
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
    code = 1 if command == DAMAGED else 2
    assert reason in refused(*(word.strip("'").format(**places) for word in command.split()), code=code)
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
    assert "DAMAGED" not in output_of("ls", odd)
    assert r"\udcff" in output_of("prune", odd, "--keep-last", 1)


def test_metadata_that_is_nested_without_end_is_no_metadata(root, checkpoint):
    (checkpoint / "metadata.json").write_text("[" * 100_000)
    assert "datastates" in output_of("ls", root)
    assert "would remove" in output_of("prune", root, "--keep-last", 1)
    result = call("verify", checkpoint)
    assert result.exit_code == 1 and "it names no sharded_backend" in result.stdout
