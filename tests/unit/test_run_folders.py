"""Runs as people have them: what `ls` sees, which checkpoint a command takes, layers by name, arguments."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import megatron_datastates as ds
from megatron_datastates.cli.summary import summary
from megatron_datastates.convert import look
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.stored_arguments import _InertUnpickler, arguments_in, training_arguments
from megatron_datastates.dcp import DataStatesWriter
from megatron_datastates.engine.atomic_files import temporary_beside
from megatron_datastates.errors import FormatError, StorageError
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.runs.jobs import JOBS_NAME
from megatron_datastates.pipeline.runs.run_folders import choose_checkpoint, is_run
from megatron_datastates.pipeline.upkeep import retention
from tests.unit.command import run
from tests.unit.inspecting import output_of, refused
from tests.unit.trained import STACKED, TRACKER, WEIGHT, save_run_of, save_trained

FORMATS = ("datastates", "torch_dist")
OF_A_RUN = ("ls", "trend", "prune --keep-last 1", "verify --all")  # commands


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in each format, named after it. Not to be changed."""
    return save_both(tmp_path_factory.mktemp("both"))


def save_both(root: Path) -> Path:
    for format in FORMATS:
        save_run_of(root / format, format)
    return root


@pytest.fixture(params=FORMATS)
def a_run(request: pytest.FixtureRequest, both: Path, tmp_path: Path) -> Path:
    """A copy of a run."""
    return Path(shutil.copytree(both / request.param, tmp_path / "run"))


def rows(root: Path) -> list[dict[str, Any]]:
    return json.loads(output_of("ls", root, "--json"))


def test_what_a_kill_leaves_of_the_list_of_jobs_makes_no_checkpoint_of_a_run(a_run: Path) -> None:
    temporary_beside(a_run / JOBS_NAME, SaveId(7, 1)).touch()
    assert is_run(a_run) and choose_checkpoint(a_run).directory == a_run / "iter_0000005"


# -- ls ---------------------------------------------------------------------------------------------------


def test_ls_shows_parallelism_and_what_the_tracker_names(a_run: Path):
    found = rows(a_run)
    assert [(row["iteration"], row["tracked"], row["state"]) for row in found] == [
        (5, True, "complete"), (10, False, "complete"),
    ]  # fmt: skip
    if found[0]["format"] == "torch_dist":
        assert (found[0]["ranks"], found[0]["parallel"]) == (2, {"tensor": 2, "pipeline": 1})
    text = output_of("ls", a_run)
    assert text.splitlines()[1].split()[:2] == ["5", "*"] and f"* {TRACKER} names it" in text


def data_file(directory: Path) -> Path:
    return max(
        (path for path in directory.iterdir() if path.suffix in (".bin", ".distcp")),
        key=lambda path: path.stat().st_size,
    )


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGE = {
    "a missing data file": lambda path: data_file(path).unlink(),
    "a truncated data file": lambda path: cut(data_file(path)),
    "an empty manifest": lambda path: os.truncate(index_of(path), 0),
    "a truncated manifest": lambda path: cut(index_of(path)),
}


def index_of(path: Path) -> Path:
    return next(one for name in (MANIFEST_NAME, ".metadata") if (one := path / name).exists())


@pytest.mark.parametrize("damage", DAMAGE)
def test_ls_sees_what_names_and_sizes_show(a_run: Path, damage: str):
    DAMAGE[damage](a_run / "iter_0000005")
    first, second = rows(a_run)
    assert (first["state"], first["complete"], second["state"]) == ("damaged", False, "complete")
    assert first["problem"] and "iter_0000005: " in output_of("ls", a_run)


def test_an_unfinished_save_is_no_damage(a_run: Path):
    index_of(a_run / "iter_0000005").unlink()
    (a_run / "iter_0000005" / "metadata.json").unlink()
    assert rows(a_run)[0]["state"] == "unfinished"


def test_metadata_without_which_megatron_loads_nothing_is_named(a_run: Path):
    (a_run / "iter_0000005" / "metadata.json").unlink()
    row = rows(a_run)[0]
    assert "only metadata.json is missing" in (row["problem"] or row["note"])
    assert row["complete"] is (row["format"] == "datastates")  # which Megatron then loads


def test_of_a_large_metadata_only_names_are_compared(a_run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(look, "_MOST_PARSED_BYTES", 1)
    row = rows(a_run)[0]
    if row["format"] == "datastates":
        return
    assert row["state"] == "complete" and "sizes were not compared" in row["note"]
    data_file(a_run / "iter_0000005").unlink()
    assert rows(a_run)[0]["state"] == "damaged"


def test_a_release_is_listed_and_is_what_the_tracker_may_name(a_run: Path):
    (a_run / "iter_0000005").rename(a_run / "release")
    (a_run / TRACKER).write_text("release\n")
    assert [(row["iteration"], row["tracked"]) for row in rows(a_run)] == [(None, True), (10, False)]
    assert output_of("ls", a_run).splitlines()[1].split()[0] == "release"
    assert "release, which the tracker of the run names" in run("show", a_run)[2]


def test_a_tracker_that_names_what_is_missing_is_said(a_run: Path):
    (a_run / TRACKER).write_text("7")
    assert "names iter_0000007, which is missing" in output_of("ls", a_run)
    (a_run / TRACKER).unlink()
    assert "would start from random weights" in output_of("ls", a_run)


def put_non_persistent(root: Path, *iterations: int) -> Path:
    """Makes non-persistent checkpoints of copies of the first iteration; their tracker names the last."""
    for number in iterations:
        shutil.copytree(root / "iter_0000005", root / "non_persistent" / f"iter_{number:07d}")
    (root / "non_persistent" / TRACKER).write_text(str(iterations[-1]))
    return root / "non_persistent"


@pytest.mark.parametrize("newest", [4, 5, 7])
def test_ls_and_verify_name_the_non_persistent_checkpoints_of_a_run(a_run: Path, newest: int) -> None:
    """Megatron loads one that is as new as what the tracker names, if the run asks for such checkpoints."""
    before = output_of("ls", a_run)
    other, loads = put_non_persistent(a_run, 3, newest), newest >= 5
    lines = output_of("ls", a_run).splitlines()
    assert lines[:-1] == before.splitlines()
    assert f"{other} has non-persistent checkpoints, up to iteration {newest}: a run that" in lines[-1]
    assert lines[-1].endswith("global loads that one" if loads else "does not load them, as that is older")
    code, printed, reported = run("verify", a_run, "--json")
    assert (code, json.loads(printed)["good"]) == (0, True)
    not_checked = f"not checked: the non-persistent checkpoints in {other}, up to iteration {newest}"
    assert (not_checked in reported) == loads == reported.endswith(f"with `datastates verify {other}`\n")
    reported = run("verify", "--all", a_run)[2]
    assert not_checked in reported and f"check with `datastates verify --all {other}`" in reported
    for given in ([a_run / "iter_0000005"], [other], [a_run, other], [a_run, "--iteration", 5]):
        assert "non-persistent" not in run("verify", *given)[2]


def test_a_non_persistent_checkpoint_that_is_missing_is_said_to_be(a_run: Path) -> None:
    """Somebody has removed it by hand, and not the tracker."""
    other = put_non_persistent(a_run, 7)
    shutil.rmtree(other / "iter_0000007")
    last = output_of("ls", a_run).splitlines()[-1]
    assert last.startswith(f"{other / TRACKER} names iter_0000007, which is missing: a run cannot resume")


def test_non_persistent_checkpoints_that_nothing_resumes_from_are_not_named(a_run: Path) -> None:
    other = put_non_persistent(a_run, 7)
    (other / TRACKER).unlink()
    assert "non-persistent" not in output_of("ls", a_run) + run("verify", a_run)[2]


def test_what_may_not_be_read_is_not_called_damaged(a_run: Path, monkeypatch: pytest.MonkeyPatch):
    def denied(path: Any, *more: Any) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(look, "read_regular", denied)
    monkeypatch.setattr(look, "load_metadata", denied)
    assert {row["state"] for row in rows(a_run)} == {"unreadable"}
    assert "DAMAGED" not in output_of("ls", a_run) and "Permission denied" in output_of("ls", a_run)


# -- which checkpoint of a run ----------------------------------------------------------------------------


def test_a_run_stands_for_what_its_tracker_names(a_run: Path, tmp_path: Path):
    code, printed, reported = run("args", a_run, "--keys", "lr")
    assert (code, printed) == (0, "lr: 0.005\n")
    assert reported == f"datastates: {a_run}/iter_0000005, which the tracker of the run names\n"
    assert run("args", a_run, "--keys", "lr", "--iteration", "10")[1] == "lr: 0.01\n"
    assert "[3, 4, 2]" in output_of("show", a_run) and "bfloat16" in output_of("show", a_run)
    assert run("diff", a_run, a_run)[0] == 0
    assert "[4, 2]" in output_of("cat", a_run, "decoder.layers.1.mlp.linear_fc1.weight")


def test_a_run_without_a_choice_is_refused(a_run: Path):
    assert "has no iteration 7: it has 5, 10" in refused("show", a_run, "--iteration", 7)
    assert f"give {a_run} if that is one, or leave --iteration out" in refused(
        "show", a_run / "iter_0000005", "--iteration", 5
    )
    (a_run / TRACKER).write_text("7")
    assert "names iter_0000007, which is missing: choose another by --iteration" in refused("show", a_run)
    (a_run / TRACKER).unlink()
    assert "choose one by --iteration; it has 5, 10" in refused("show", a_run)
    (a_run / "iter_0000005").rename(a_run / "iter_5")
    assert "has no iteration 5: it has iter_5, 10" in refused("show", a_run, "--iteration", 5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("command", OF_A_RUN)
def test_where_a_run_is_needed_a_checkpoint_is_called_one(command: str, format: str, both: Path) -> None:
    name, *more = command.split()
    given = both / format / "iter_0000005"
    message = refused(name, given, *more)
    assert f"{given} is a checkpoint, not the directory of a run" in message
    assert ("leave --all out" in message) == ("--all" in more)
    assert ("use `datastates show`" in message) == (name in ("ls", "trend"))


@pytest.mark.parametrize("command", [*OF_A_RUN, "convert out --all"])
def test_where_a_run_is_needed_what_is_no_directory_is_said(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    name, *more = command.split()
    wanted = ": give the directory of a run"
    assert refused(name, tmp_path / "file", *more).endswith(f"{tmp_path}/file is not a directory{wanted}")
    assert refused(name, tmp_path / "none", *more).endswith(f"{tmp_path}/none does not exist{wanted}")


@pytest.mark.parametrize("command", [*OF_A_RUN, "show", "verify", "show --iteration 5"])
def test_runs_one_level_below_what_is_given_are_named(command: str, both: Path, tmp_path: Path) -> None:
    name, *more = command.split()
    (tmp_path / "logs").mkdir()
    shutil.copytree(both / "datastates", tmp_path / "checkpoints")
    code, printed, reported = run(name, tmp_path, *more)
    assert code == 2 and f". It has runs: {tmp_path / 'checkpoints'}" in printed + reported


def test_a_run_without_checkpoints_is_not_good(tmp_path: Path):
    (tmp_path / TRACKER).write_text("5")
    assert f"--all: {tmp_path} holds no checkpoint" in refused("verify", "--all", tmp_path)


def test_many_checkpoints_and_all_of_a_run_are_verified(both: Path, tmp_path: Path):
    root = Path(shutil.copytree(both / "datastates", tmp_path / "run"))
    paths = sorted(root.glob("iter_*"))
    text = output_of("verify", *paths)
    assert [line.split(": ")[1] for line in text.splitlines()[:2]] == ["good", "good"]
    assert text.splitlines()[2] == "2 checkpoints: 2 good, 0 faulty"
    assert text == output_of("verify", "--all", root)
    (paths[0] / MANIFEST_NAME).unlink()
    code, printed, reported = run("verify", "--all", root)
    assert code == 2 and "2 checkpoints: 1 good, 0 faulty, 1 could not be checked" in printed
    assert "`datastates repair` makes it anew" in reported
    data = data_file(paths[1])
    data.write_bytes(data.read_bytes()[:5000] + b"X" + data.read_bytes()[5001:])
    code, printed, _ = run("verify", "--all", root, "--json")
    assert code == 1 and [row["good"] for row in json.loads(printed)] == [None, False]
    assert "not the directory of a run" in refused("verify", "--all", paths[0])


def test_what_cannot_be_checked_keeps_nothing_else_from_it(both: Path, tmp_path: Path):
    good = both / "datastates" / "iter_0000005"
    code, printed, reported = run("verify", tmp_path / "nope", good, tmp_path)
    assert code == 2 and "3 checkpoints: 1 good, 0 faulty, 2 could not be checked" in printed
    assert f"{tmp_path / 'nope'} does not exist" in reported
    assert run("verify", "--all", tmp_path / "nope", good.parent)[0] == 2


@pytest.mark.parametrize("kind", ["datastates", "torch_dist"])
def test_an_index_that_is_cut_off_is_a_fault(both: Path, tmp_path: Path, kind: str):
    path = Path(shutil.copytree(both / kind / "iter_0000005", tmp_path / "iter_0000005"))
    index = path / (MANIFEST_NAME if kind == "datastates" else ".metadata")
    index.write_bytes(index.read_bytes()[:40])
    code, printed, _ = run("verify", path)
    assert code == 1 and "fault: " in printed and "FAULTY" in printed
    code, printed, _ = run("verify", path, "--json")
    assert code == 1 and json.loads(printed)["good"] is False


def test_ls_says_what_a_tracker_without_a_number_means(both: Path, tmp_path: Path):
    root = Path(shutil.copytree(both / "datastates", tmp_path / "run"))
    (root / TRACKER_NAME).write_text("abc")
    assert "names no checkpoint: expected the number of an iteration" in output_of("ls", root)
    (root / TRACKER_NAME).unlink()
    assert f"There is no {TRACKER_NAME}" in output_of("ls", root)
    (root / TRACKER_NAME).symlink_to(tmp_path / "not copied with the run")
    assert "Megatron would start from random weights" in output_of("ls", root), "nor does a run fall back"


# -- layers by the names of Megatron's modules ------------------------------------------------------------


def test_a_layer_of_a_stacked_tensor_has_a_name(a_run: Path, tmp_path: Path):
    path, name = a_run / "iter_0000005", "decoder.layers.1.mlp.linear_fc1.weight"
    (row,) = json.loads(output_of("show", path, "decoder.layers.1.*", "--stats", "--json"))["tensors"]
    assert (row["key"], row["shape"], row["bytes"]) == (name, [4, 2], 32)
    assert (row["min"], row["max"]) == (8, 15)
    assert json.loads(output_of("cat", path, name, "1:3", "--json"))["values"] == WEIGHT[1, 1:3].tolist()
    assert run("cat", path, name, "--out", tmp_path / "x.npy")[0] == 0
    assert np.array_equal(np.load(tmp_path / "x.npy"), WEIGHT[1].numpy())
    assert "has 3 layers, numbered from 0" in refused("cat", path, name.replace("1", "3", 1))
    assert json.loads(output_of("show", path, "--json", STACKED))["tensors"][0]["shape"] == [3, 4, 2]


def test_layers_are_compared_and_exported_by_name(both: Path, tmp_path: Path):
    first, other = both / "datastates" / "iter_0000005", tmp_path / "iter_0000006"
    output_of("convert", first, other)
    pair = first, other
    assert run("diff", *pair, "--keys", "decoder.layers.2.*")[0] == 0
    assert "no tensor" in refused("diff", *pair, "--keys", "decoder.layers.3.*")
    output_of("export", first, tmp_path / "deep" / "out", "--keys", "decoder.layers.[02].*")
    loaded = load_file(tmp_path / "deep" / "out" / "model.safetensors")
    assert {key: value.tolist() for key, value in loaded.items()} == {
        f"decoder.layers.{n}.mlp.linear_fc1.weight": WEIGHT[n].tolist() for n in (0, 2)
    }


def test_one_layer_is_compared_alone(tmp_path: Path):
    changed = WEIGHT.clone()
    changed[2, 0, 0] = 99
    for name, value in (("a", WEIGHT), ("b", changed)):
        ds.save({STACKED: value}, tmp_path / name)
    pair = tmp_path / "a", tmp_path / "b"
    assert run("diff", *pair, "--keys", "decoder.layers.1.*")[0] == 0
    code, printed, _ = run("diff", *pair, "--keys", "decoder.layers.[12].*", "--json")
    assert code == 1 and json.loads(printed)["tensors"][STACKED]["changed"] == 1
    assert json.loads(printed)["layers"]["model"].keys() == {"decoder.layers.1", "decoder.layers.2"}


# -- arguments --------------------------------------------------------------------------------------------


def test_arguments_are_listed_and_compared(both: Path, tmp_path: Path):
    one, other = (both / format / "iter_0000005" for format in FORMATS)
    assert output_of("args", one) == output_of("args", other)
    found = json.loads(output_of("args", one, "--json"))
    assert found["params_dtype"] == "torch.bfloat16" and found["data_path"] == ["a", 0.5, None]
    assert run("args", one, other)[:2] == (0, "0 arguments of 14 differ\n")
    save_trained(tmp_path / "new", "datastates", lr=0.005, num_layers=True, extra=[1])
    code, printed, _ = run("args", one, tmp_path / "new", "--json")
    assert code == 1 and json.loads(printed) == {"extra": [None, [1]], "num_layers": [3, True]}
    only = run("args", one, tmp_path / "new", "--keys", "extra*")
    assert only[0] == 1 and "1 argument of 1 differs" in only[1]
    assert "no training argument matches 'nothing*'" in refused("args", one, "--keys", "nothing*")


class Settings:
    def __init__(self, rate: float) -> None:
        self.rate = rate


def test_arguments_that_are_instances_have_their_state(tmp_path: Path):
    def texts_of(rate: float) -> dict[str, Any]:
        buffer, nested = io.BytesIO(), Settings(rate)
        for _ in range(9):  # deeper than anything is shown
            nested = Settings(nested)
        values = argparse.Namespace(
            own=Settings(rate), partial=functools.partial(int, base=rate), deep=nested
        )
        torch.save([{"args": values}], buffer)
        return arguments_in(buffer.getvalue(), "here")

    one, other = texts_of(2), texts_of(3)
    assert (one["own"], other["own"]) == ("Settings(rate=2)", "Settings(rate=3)")
    assert one["partial"] != other["partial"]


@pytest.mark.parametrize("protocol", [2, 4])
def test_sets_are_compared_without_an_order_and_dictionaries_by_all_keys(protocol: int):
    def arguments_of(kind: type, *items: int, value: str = "a") -> dict[str, Any]:
        buffer, both = io.BytesIO(), {1: value, "1": "b"}
        values = argparse.Namespace(items=kind(items), nested=[kind([kind(items)])], both=both)
        torch.save([{"args": values}], buffer, pickle_protocol=protocol)
        return arguments_in(buffer.getvalue(), "here")

    one, other = (arguments_of(frozenset, *items) for items in ((8, 0), (0, 8)))
    assert list(frozenset((8, 0))) != list(frozenset((0, 8))), "8 and 0 collide"
    assert one == other and one["items"] == [0, 8] and one["nested"] == [[[0, 8]]]
    assert arguments_of(list, 8, 0)["items"] == [8, 0]
    assert arguments_of(list, value="c")["both"] != one["both"] == [[1, "a"], ["1", "b"]]


def test_show_says_the_same_of_both_formats(both: Path):
    found = [json.loads(output_of("show", both / format / "iter_0000005", "--json")) for format in FORMATS]
    for one in found:
        assert [row["files"] for row in one["tensors"]] == [1, 1]
        (common,) = one["objects"]
        assert common["bytes"] > 1000


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made by a pickle",)


def test_a_hostile_common_state_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save([{"args": Hostile()}], buffer)
    with pytest.raises(Exception, match="has no training arguments"):
        arguments_in(buffer.getvalue(), "here")
    assert not os.listdir(tmp_path)
    for program in (
        b"cos\nmkdir\n(X\x01\x00\x00\x00xtR",
        b"cos\nmkdir\n}X\x01\x00\x00\x00aX\x01\x00\x00\x00bsb",
    ):
        with contextlib.suppress(TypeError, pickle.UnpicklingError):
            _InertUnpickler(io.BytesIO(b"\x80\x02" + program + b".")).load()
    assert not os.listdir(tmp_path) and not hasattr(os.mkdir, "a")
    with pytest.raises(FormatError, match="is damaged"):
        arguments_in(buffer.getvalue()[:-30], "here")


def test_arguments_are_what_torch_reads(both: Path):
    source = open_source(both / "torch_dist" / "iter_0000005")
    data = source.read_object("common_state/shard_0_1")
    (stored,) = torch.load(io.BytesIO(data), weights_only=False)
    found = training_arguments(source)
    assert found.keys() == vars(stored["args"]).keys()
    assert found["lr"] == stored["args"].lr and found["save"] == stored["args"].save


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, DataStatesWriter])
def test_arguments_are_found_where_megatron_fsdp_stores_them(
    writer: Callable[[Path], dcp.StorageWriter], tmp_path: Path
):
    """As an object of their own, beside parameters and states of generators, without a common state."""
    state: dict[str, Any] = {"args": argparse.Namespace(hidden_size=64), "model": {"w": torch.zeros(3, 2)}}
    state["rng_state"] = {"(0, 0)": [{"torch_rng_state": torch.zeros(9, dtype=torch.uint8)}]}
    dcp.save(state, storage_writer=writer(tmp_path / "ck"), no_dist=True)
    source = open_source(tmp_path / "ck")
    assert training_arguments(source) == {"hidden_size": 64}
    rows = dict(summary(tmp_path / "ck", source))
    assert rows["model"] == "hidden 64" and rows["others"] == "1 tensor of random generators, 1 object"
    assert rows["weights"] == "6 parameters in float32, 24 B in 1 tensor"


# -- prune ------------------------------------------------------------------------------------------------


def test_one_unreadable_iteration_does_not_end_prune(
    both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = Path(shutil.copytree(both / "datastates", tmp_path / "run"))
    save_trained(root / "iter_0000015", "datastates")
    (root / TRACKER).write_text("15")
    real = retention.Checkpoint.open

    def denied(path: Any, *more: Any, **how: Any) -> Any:
        if Path(path).name == "iter_0000005":
            raise StorageError("Permission denied", code=errno.EACCES)
        return real(path, *more, **how)

    monkeypatch.setattr(retention.Checkpoint, "open", denied)
    text = output_of("prune", root, "--keep-last", 1, "--yes")
    assert "iter_0000005  (it cannot be read: Permission denied)" in text and "damaged" not in text
    assert sorted(path.name for path in root.glob("iter_*")) == ["iter_0000005", "iter_0000015"]


def test_verify_all_passes_over_what_failed_saves_leave_empty(tmp_path):
    folder = save_run_of(tmp_path / "run", "datastates")
    for number in (15, 20):
        (folder / f"iter_{number:07d}").mkdir()
    code, printed, said = run("verify", "--all", folder)
    assert code == 0 and "2 checkpoints: 2 good, 0 faulty\n" in printed
    assert "not checked: iter_0000015, iter_0000020: empty, so no checkpoint" in said
    (folder / "latest_checkpointed_iteration.txt").write_text("20")  # what it names must be there
    code, printed, said = run("verify", "--all", folder)
    assert code == 2 and "3 checkpoints: 2 good, 0 faulty, 1 could not be checked" in printed
    assert "iter_0000015: empty" in said and f"{folder}/iter_0000020: cannot be checked: " in said


def test_verify_all_of_a_run_with_empty_directories_only_says_so(tmp_path):
    (tmp_path / "iter_0000005").mkdir()
    code, printed, said = run("verify", "--all", tmp_path)
    assert code == 2 and not printed
    assert f"{tmp_path} holds no checkpoint: it has no directory iter_* with anything in it" in said
