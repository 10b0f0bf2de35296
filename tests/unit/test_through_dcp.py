"""The command line tools and what Megatron saves through PyTorch's DCP, as with Megatron-FSDP.

The state has the keys of Megatron-FSDP's, whose own checkpoints tests/e2e/test_fsdp.py makes. It is saved in
our format, and by DCP's own writer, as `--ckpt-format fsdp_dtensor` does.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_datastates.dcp import DataStatesWriter
from megatron_datastates.format.values import MANIFEST_NAME, digest_in_index_name, is_dcp_file_name
from tests.unit.inspecting import call, output_of, refused
from tests.unit.states import SMALL, data_files

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WRITERS = {"datastates": lambda path: DataStatesWriter(path, **SMALL), "torch_dist": dcp.FileSystemWriter}
ARGUMENTS = {"world_size": 2, "data_parallel_size": 2, "tensor_model_parallel_size": 1, "num_layers": 2}
LAYERS = "module.decoder.layers"


def state(iteration: int) -> dict[str, Any]:
    names = [f"{LAYERS}.{layer}.mlp.linear_fc1.weight" for layer in range(2)]
    states = {
        f"module.module.{name}": {"exp_avg": torch.full((4, 6), 2.0), "exp_avg_sq": torch.ones(4, 6)}
        for name in names
    }
    return {
        "args": argparse.Namespace(**ARGUMENTS),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "model": {name: torch.full((4, 6), float(iteration)) for name in names},
        "optimizer": {"state": states, "param_to_group_meta": {key: {"lr": 0.1} for key in states}},
        "rng_state": {"(0, 0)": [{"torch_rng_state": torch.arange(200, dtype=torch.uint8)}]},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name, writer in WRITERS.items():
        for iteration in (2, 4):
            path = root / name / f"iter_{iteration:07d}"
            dcp.save(state(iteration), storage_writer=writer(path), no_dist=True)
        (root / name / "latest_checkpointed_iteration.txt").write_text("4")
    return root


@pytest.fixture(params=WRITERS)
def run(request: pytest.FixtureRequest, saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / request.param, tmp_path / request.param))


@pytest.fixture
def ours(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "datastates" / "iter_0000004", tmp_path / "iter_0000004"))


def test_show_counts_parameters_states_and_random_generators_apart(run: Path) -> None:
    rows = dict(line.split(maxsplit=1) for line in output_of("show", run).splitlines()[:8] if line)
    assert rows["model"] == "2 layers"
    assert rows["weights"] == "48 parameters in float32, 192 B in 2 tensors"
    assert rows["optimizer"] == "exp_avg, exp_avg_sq, 384 B in 4 tensors"
    assert rows["others"] == "1 tensor of random generators, 5 objects"


def test_integers_that_a_program_saves_are_not_called_parameters(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3)}, "optim": {"state": {"w": {"step": torch.ones(1)}}}}
    dcp.save(
        state | {"seen": torch.tensor(7)}, storage_writer=WRITERS["datastates"](tmp_path / "c"), no_dist=True
    )
    lines = output_of("show", tmp_path / "c").splitlines()
    assert "weights     3 parameters in float32 and 1 element in int64, 20 B in 2 tensors" in lines
    assert "optimizer   step, 4 B in 1 tensor" in lines


def test_optimizer_state_is_listed_by_parameter_as_it_is_stored(run: Path) -> None:
    tensors = json.loads(output_of("show", run, "--optimizer", "--json"))["tensors"]
    assert [one["key"].rpartition(".")[2] for one in tensors] == ["exp_avg", "exp_avg_sq"] * 2
    assert all(one["key"].startswith("optimizer.state.module.") for one in tensors)


def test_arguments_are_read_from_their_own_object(run: Path) -> None:
    assert json.loads(output_of("args", run, "--json")) == ARGUMENTS


def test_without_arguments_it_is_said_where_they_would_be(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=WRITERS["datastates"](tmp_path / "c"), no_dist=True)
    assert "no training arguments, as Megatron stores in" in refused("args", tmp_path / "c")


def test_ls_and_verify_do_not_miss_a_file_that_dcp_never_writes(saved: Path) -> None:
    run = saved / "torch_dist"
    looks = json.loads(output_of("ls", run, "--json"))
    assert all("saved it through PyTorch's DCP" in one["note"] and one["complete"] for one in looks)
    assert [(one["ranks"], one["parallel"]) for one in looks] == [(2, {"tensor": 1, "data": 2})] * 2
    (line,) = output_of("verify", run).splitlines()
    assert ": good: 7 tensors and 5 objects in 1 file" in line


def test_prune_says_whose_checkpoint_it_leaves_alone(saved: Path) -> None:
    kept = json.loads(output_of("prune", saved / "torch_dist", "--keep-last", "1", "--json"))["kept"]
    assert kept[0]["why"].startswith(
        "PyTorch's DCP saved it, without metadata.json: prune leaves these alone"
    )


def test_an_unfinished_one_is_not_called_unknown(run: Path) -> None:
    path = run / "iter_0000004"
    (path / (MANIFEST_NAME if run.name == "datastates" else ".metadata")).unlink()
    wanted = "an unfinished datastates checkpoint" if run.name == "datastates" else ".metadata is missing"
    for command in ("show", "args", "verify"):
        assert wanted in refused(command, path)
    assert wanted in refused("export", path, run / "exported")


def test_repair_takes_the_iteration_from_the_state(ours: Path) -> None:
    moved = ours.rename(ours.parent / "moved")
    (moved / MANIFEST_NAME).unlink()
    done = json.loads(output_of("repair", moved, "--json"))
    assert done["iteration"] == 4
    assert not any("common state" in note or "iteration" in note for note in done["notes"])
    assert "1 tensor of random generators" in output_of("show", moved)


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_repair_is_refused_without_what_megatron_fsdp_needs_to_resume(ours: Path, what: str) -> None:
    (ours / MANIFEST_NAME).unlink()
    (facts,) = [path for path in ours.iterdir() if is_dcp_file_name(path.name)]
    if what == "missing":
        facts.unlink()
    else:
        facts.write_bytes(facts.read_bytes()[:-30])
    said = refused("repair", ours)
    assert f"{facts} is {what}" in said and "Without it, Megatron-FSDP cannot resume" in said
    assert not (ours / MANIFEST_NAME).exists()


def test_repair_says_what_is_lost_without_an_index(ours: Path) -> None:
    for path in list(ours.iterdir()):
        if path.name == MANIFEST_NAME or digest_in_index_name(path.name):
            path.unlink()
    assert "only the index of this save says where its tensors are" in refused("repair", ours)


def test_a_flipped_bit_is_a_fault_that_names_tensors(ours: Path) -> None:
    (file,) = data_files(ours)
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    file.write_bytes(data)
    verdict = call("verify", ours)
    assert verdict.exit_code == 1 and f"'model.{LAYERS}.0.mlp.linear_fc1.weight'" in verdict.stdout
    assert call("verify", ours, "--quick").exit_code == 0
    assert call("convert", ours, ours.parent / "converted").exit_code == 1


def test_trends_and_differences_of_weights_have_no_bytes_of_random_generators(run: Path) -> None:
    found = json.loads(output_of("trend", run, "--json"))
    groups = found["groups"].keys()
    assert groups == {"model", "optimizer exp_avg", "optimizer exp_avg_sq"}
    difference = call("diff", run / "iter_0000002", run / "iter_0000004", "--json")
    found = json.loads(difference.stdout)
    assert found["first_layer"] == f"model.{LAYERS}.0"
    assert found["groups"].keys() == groups | {"random generators"}
    assert found["layers"]["optimizer exp_avg"].keys() == {f"module.module.{LAYERS}.{n}" for n in range(2)}


def test_the_weights_alone_are_exported(run: Path) -> None:
    done = json.loads(output_of("export", run, run / "weights", "--json"))
    assert (done["tensors"], done["tensor_bytes"]) == (2, 192)
    done = json.loads(output_of("export", run, run / "states", "--keys", "optimizer.state.*", "--json"))
    assert (done["tensors"], done["tensor_bytes"]) == (4, 384)
    assert "--hf does not export it" in refused("export", run / "iter_0000004", run / "hf", "--hf")


def test_a_conversion_says_how_megatron_loads_it(run: Path) -> None:
    target = run.parent / "converted"
    said = output_of("convert", run, target)
    wanted = "--ckpt-format fsdp_dtensor if Megatron-FSDP saved it"
    assert (wanted in said) == (run.name == "datastates")
    assert json.loads(output_of("args", target, "--json")) == ARGUMENTS
    already = call("convert", run, run.parent / "again", "--optimizer", "fully-reshardable")
    assert already.exit_code == 2 and "stores optimizer state by parameter already" in already.stderr


def test_dropping_the_optimizer_keeps_random_generators_and_says_what_cannot_load(
    saved: Path, tmp_path
) -> None:
    run = Path(shutil.copytree(saved / "datastates", tmp_path / "run"))
    done = call("prune", run, "--keep-last", "1", "--drop-optimizer", "--yes")
    assert done.exit_code == 0 and "Megatron-FSDP with --bf16 or --fp16 does not start" in done.stderr
    text = output_of("show", run / "iter_0000002")
    assert "1 tensor of random generators, 3 objects" in text and "optimizer.state" not in text
    (look, _) = json.loads(output_of("ls", run, "--json"))
    assert "--no-load-optim" not in look["note"] and "ds.load and DCP read the weights" in look["note"]


def test_cat_names_what_lies_below_a_key(run: Path) -> None:
    said = call("cat", run, "rng_state").stderr
    assert "(it has 'rng_state.(0, 0).0.torch_rng_state')" in said
    assert output_of("cat", run, "iteration") == "4\n"
