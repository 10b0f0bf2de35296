"""Megatron's own tools read our directories: what tools/checkpoint/ of Megatron-LM (d98e8a64dd) calls."""

from __future__ import annotations

import importlib
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import load
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    check_is_distributed_checkpoint,
    save_config,
)
from megatron.core.dist_checkpointing.strategies import common
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import megatron_datastates as ds
from megatron_datastates.dcp import DataStatesWriter
from megatron_datastates.format.directory import BACKEND, COMMON_STATE_KEY
from megatron_datastates.mcore.hooks import versions
from megatron_datastates.pipeline.runs.runs import may_be_ours
from tests.unit.states import SMALL, random_tensor

pytestmark = pytest.mark.conformance

TENSORS = {
    "decoder.layers.0.weight": torch.arange(64.0).reshape(8, 8),
    "optimizer.state.exp_avg": torch.arange(64.0).bfloat16(),
    "scaled": random_tensor(torch.float8_e4m3fn, (4,)),
}
COMMON = {"iteration": 7, "names": ["a", "b"]}


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ours") / "c"
    ds.save(TENSORS | {COMMON_STATE_KEY: [COMMON], "rng/shard_0_1": [[1, 2]]}, directory, **SMALL)
    save_config(CheckpointingConfig(BACKEND, 1), str(directory))
    return directory


def test_dcps_reader_lists_and_loads_a_directory_of_ours(ours):
    """As checkpoint_inspector.py and load_dist_checkpoint_full do, which construct the reader themselves."""
    importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")  # they do: it has the hook
    reader = dcp.FileSystemReader(ours)
    metadata = reader.read_metadata().state_dict_metadata
    stored = {key: value for key, value in metadata.items() if isinstance(value, TensorStorageMetadata)}
    state = {key: torch.empty(value.size, dtype=value.properties.dtype) for key, value in stored.items()}
    dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner())
    assert state.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert torch.equal(state[key].view(torch.uint8), tensor.view(torch.uint8)), key
    assert "rng/shard_0_1" in metadata


class SavesBetween(dcp.DefaultLoadPlanner):
    """Another save is published once this load has read the metadata."""

    def __init__(self, save) -> None:
        super().__init__()
        self._save = save

    def create_local_plan(self):
        plan = super().create_local_plan()
        self._save()
        return plan


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_dcps_reader_reads_the_save_whose_metadata_it_has(rows, tmp_path):
    """The later one has other fragments, or another shape: at the planned places may be other tensors."""

    def save(value, rows):
        tensors = {"w": torch.full((rows, 8), value), "x": torch.full((1000,), 7.0)}
        ds.save(tensors, tmp_path, **SMALL)

    importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")  # it has the hook
    save(1.0, 8)
    target, reader = torch.zeros(8, 8), dcp.FileSystemReader(tmp_path)
    with pytest.raises(
        CheckpointException, match="was replaced by another save while it was read: load again"
    ):
        dcp.load({"w": target}, storage_reader=reader, planner=SavesBetween(lambda: save(2.0, rows)))
    assert not target.any()
    into = {"w": torch.zeros(rows, 8)}
    dcp.load(into, storage_reader=reader)
    assert torch.equal(into["w"], torch.full((rows, 8), 2.0)), "the next load with it has the later one"


def test_dcps_reader_reads_another_directory_as_before(tmp_path):
    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path / "c")
    state = {"w": torch.zeros(6)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "c"))
    assert state["w"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(Exception, match=r"\.metadata"):
        dcp.FileSystemReader(tmp_path).read_metadata()


def test_urls_of_other_programs_are_not_ours_and_go_to_their_own_reader():
    pytest.importorskip("fsspec")
    filesystem = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
    url = "memory://bucket/of-another-program"
    dcp.save({"w": torch.arange(6.0)}, storage_writer=filesystem.FsspecWriter(url))
    state = {"w": torch.zeros(6)}
    dcp.load(state, storage_reader=filesystem.FsspecReader(url))
    assert state["w"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.skipif(versions.installed().first < (0, 19), reason="it asks the store itself")
@pytest.mark.parametrize("url", ["s3://bucket/x", "gs:/bucket/x", "hf://org/model"])
def test_urls_of_other_kinds_hold_no_distributed_checkpoint(url):
    assert not check_is_distributed_checkpoint(url)
    assert not may_be_ours(url)
    with pytest.raises(CheckpointingException, match=r"is not a distributed checkpoint|does not exist"):
        load({}, url)


@pytest.mark.skipif(versions.installed().first < (0, 17), reason="it has no training loop")
def test_a_directory_that_dcp_saved_is_of_dcps_kind_to_megatrons_loop(ours, tmp_path):
    """As with DCP's own files: Megatron-FSDP reads it, and no common state is looked for."""
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    directory = tmp_path / "c"
    dcp.save({"w": torch.arange(6.0)}, storage_writer=DataStatesWriter(directory))

    def kind(directory, uses_fsdp):
        return checkpointing._get_checkpoint_format(str(directory), Namespace(use_megatron_fsdp=uses_fsdp))

    assert (kind(directory, True), kind(directory, False)) == ("fsdp_dtensor", "torch_dcp")
    assert (kind(ours, True), kind(ours, False)) == ("torch_dist", "torch_dist")


@pytest.mark.skipif(versions.installed().first < (0, 17), reason="its tools have no such function")
def test_common_state_is_read_by_the_function_that_tools_call(ours):
    assert common.load_common(str(ours)) == COMMON


def test_the_hybrid_converter_takes_our_format_for_torch_dist(ours, tmp_path, monkeypatch):
    """It refuses every format but torch_dist and fsdp_dtensor, before it reads anything."""
    (tmp_path / "dist_checkpoint_io.py").write_text(
        "from megatron.core.dist_checkpointing.core import maybe_load_config\n"
        "def detect_checkpoint_format(load_dir):\n"
        "    return maybe_load_config(load_dir).sharded_backend\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tool = importlib.import_module("dist_checkpoint_io")
    assert tool.detect_checkpoint_format(str(ours)) == "torch_dist"
    save_config(CheckpointingConfig("fsdp_dtensor", 1), str(tmp_path))
    assert tool.detect_checkpoint_format(str(tmp_path)) == "fsdp_dtensor"
