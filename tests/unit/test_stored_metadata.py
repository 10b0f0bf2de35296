"""What DCP sees of an index: made when asked for, and only fragments that are wanted."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import megatron_datastates as ds
from megatron_datastates.dcp import DataStatesReader as DCPReader
from megatron_datastates.dcp import metadata as metadata_module
from megatron_datastates.dcp.fragments import FragmentFinder
from megatron_datastates.dcp.metadata import StoredMetadata
from megatron_datastates.errors import FormatError, MismatchError
from megatron_datastates.mcore.load.metadata import keys_read_beside, requested_boxes
from megatron_datastates.mcore.load.reader import DataStatesReader
from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.unit.by_hand import Part, fragment, index_of, write_checkpoint
from tests.unit.states import SMALL

pytestmark = pytest.mark.filterwarnings("ignore:.*single process")
LAYERS, ROWS = 6, 4  # of "w": one fragment for each layer and half of the rows
DATA = torch.arange(LAYERS * ROWS * 3, dtype=torch.uint8).reshape(LAYERS, ROWS, 3)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    places, pieces = [], []
    for number in range(2 * LAYERS):
        layer, half = divmod(number, 2)
        at = 4096 + 64 * number
        places.append((fragment("w", [LAYERS, ROWS, 3], [layer, 2 * half, 0], [1, 2, 3]), 0, at))
        pieces.append((at, DATA[layer, 2 * half : 2 * half + 2].numpy().tobytes()))
    places += [(fragment("v", [8], [at], [size]), 0, 4096) for at, size in ((0, 0), (0, 4), (4, 4))]
    write_checkpoint(
        tmp_path, [Part(pieces=pieces, objects={"x": (8000, b"object")})], index_of(places, {"x": 0})
    )
    return ds.open(tmp_path, **SMALL)


def known(checkpoint: Checkpoint, boxes=()) -> StoredMetadata:
    found = {key: tuple(np.array([box], np.int64) for box in pair) for key, pair in dict(boxes).items()}
    return DataStatesReader(checkpoint, found).read_metadata().state_dict_metadata


def test_no_fragment_is_read_for_keys_sizes_and_dtypes(checkpoint, monkeypatch):
    monkeypatch.setattr(checkpoint.index.tensors, "read", None)
    metadata = known(checkpoint)
    assert sorted(metadata) == ["v", "w", "x"]
    assert "w" in metadata and "y" not in metadata
    assert [type(value) for _, value in sorted(metadata.items())][2] is BytesStorageMetadata
    assert metadata["w"].size == torch.Size([LAYERS, ROWS, 3])
    assert metadata["w"].properties.dtype is torch.uint8
    assert isinstance(metadata["w"], TensorStorageMetadata)
    assert metadata.get("y") is None
    with pytest.raises(KeyError):
        metadata["y"]


def test_megatron_can_pass_all_properties_to_torch(checkpoint, monkeypatch):
    """As its `load_tensors_metadata` does: of torch 2.15, too, whose strides `torch.empty` does not know."""
    monkeypatch.setattr(metadata_module, "TensorProperties", PropertiesOfTorch215)
    stored = known(checkpoint)["w"]
    empty = torch.empty(stored.size, **stored.properties.__dict__, device="meta")
    assert (empty.dtype, empty.shape) == (torch.uint8, (LAYERS, ROWS, 3))
    assert stored.properties == PropertiesOfTorch215(dtype=torch.uint8)


@dataclasses.dataclass
class PropertiesOfTorch215(TensorProperties):
    strides: tuple[int, ...] | None = None


def test_a_size_that_was_assigned_is_kept(checkpoint):
    metadata = known(checkpoint)
    metadata["w"].size = torch.Size([7])
    assert metadata["w"].size == torch.Size([7])
    assert known(checkpoint)["w"].size == torch.Size([LAYERS, ROWS, 3])


def test_chunks_are_the_fragments_that_meet_a_wanted_box(checkpoint):
    metadata = known(checkpoint, {"w": ([2, 1, 0], [2, 1, 3])})
    assert [tuple(chunk.offsets) for chunk in metadata["w"].chunks] == [(2, 0, 0), (3, 0, 0)]
    assert metadata["w"].chunks is metadata["w"].chunks
    assert len(metadata["v"].chunks) == 3


@pytest.mark.parametrize("places", [[(0, 4), (5, 3)], [(0, 4), (3, 5)], [(0, 3), (2, 3), (6, 2)]])
def test_fragments_with_holes_or_overlaps_are_refused_where_they_are_wanted(tmp_path, places):
    """DCP would leave what is in memory, or take one of two."""
    fragments = [(fragment("v", [8], [at], [size]), 0, 4096) for at, size in places]
    write_checkpoint(tmp_path, [Part()], index_of(fragments))
    opened = ds.open(tmp_path, **SMALL)
    with pytest.raises(FormatError, match="'v': its fragments overlap, or do not cover"):
        _ = known(opened, {"v": ([1], [7])})["v"].chunks
    assert len(known(opened, {"v": ([0], [1])})["v"].chunks) == 1


def test_a_box_may_leave_the_tensor_and_gets_what_there_is(checkpoint):
    """Megatron asks for such boxes with allow_shape_mismatch."""
    assert len(known(checkpoint, {"v": ([2], [100])})["v"].chunks) == 2


def test_a_box_of_other_dimensions_filters_nothing(checkpoint):
    assert len(known(checkpoint, {"w": ([0], [1])})["w"].chunks) == 2 * LAYERS


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_copies_are_torchs_own_types(checkpoint, copied):
    metadata = copied(known(checkpoint))
    assert type(metadata) is dict
    assert type(metadata["x"]) is BytesStorageMetadata
    tensor = copied(metadata["w"])
    assert type(tensor) is TensorStorageMetadata
    assert len(tensor.chunks) == 2 * LAYERS


def test_what_a_plan_over_some_fragments_means_is_found_again(checkpoint):
    wanted = ChunkStorageMetadata(torch.Size([1, 1, 0]), torch.Size([3, 2, 3]))
    boxes = (list(wanted.offsets), list(wanted.sizes))
    plans = [
        create_read_items_for_chunk_list("w", known(checkpoint, boxes)["w"], [wanted])
        for boxes in ({"w": boxes}, {})
    ]
    entry = checkpoint.index.tensor("w")
    found = [[FragmentFinder({})(entry, item.storage_index) for item in plan] for plan in plans]
    assert sorted(found[0]) == sorted(found[1]) == [2, 3, 4, 5, 6, 7]
    lengths = [{tuple(item.storage_index.offset): tuple(item.lengths) for item in plan} for plan in plans]
    assert lengths[0] == lengths[1]


def test_an_empty_fragment_never_stands_for_the_one_after_it(checkpoint):
    entry = checkpoint.index.tensor("v")
    for hint in (None, 0, 1, 2, 99):
        assert FragmentFinder({})(entry, MetadataIndex("v", torch.Size([0]), hint)) == 1


def test_a_tensor_is_loaded_from_the_fragments_it_wants(checkpoint):
    state = {"w": torch.zeros_like(DATA)}
    boxes = {"w": (np.zeros((1, 3), np.int64), np.array([DATA.shape], np.int64))}
    reader = DataStatesReader(checkpoint, boxes)
    dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner())
    assert torch.equal(state["w"], DATA)


def test_boxes_have_the_axes_that_were_prepended():
    items = [
        ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, layer, 6), (1, 1, 2), prepend_axis_num=1)
        for layer in (2, 5)
    ]
    items += [
        ShardedTensor.from_rank_offsets("v", torch.zeros(4), (0, 1, 2)),
        ShardedObject("x", None, (1,), (0,)),
    ]
    boxes = requested_boxes(items)
    assert {key: [part.tolist() for part in pair] for key, pair in boxes.items()} == {
        "w": [[[2, 2, 0], [5, 2, 0]], [[1, 2, 3], [1, 2, 3]]],
        "v": [[[4]], [[4]]],
    }


def test_keys_that_other_ranks_of_the_node_request_too():
    def request(replica: int = 0, **offsets: int) -> list[ShardedTensor | ShardedObject]:
        tensors = [
            ShardedTensor.from_rank_offsets(key, torch.zeros(4), (0, at, 4), replica_id=replica)
            for key, at in offsets.items()
        ]
        return [*tensors, ShardedObject("extra", None, (1,), (0,), replica)]

    everyone = [
        request(same=0, own=0, partly=0),  # node 0
        [*request(1, same=0, own=1, partly=0), *request(partly=1)],
        request(2, same=0, own=2),  # node 1
        request(own=3, elsewhere=0),
    ]
    ranks = [4, 5, 6, 7]  # a process group that begins at a later node
    found = [keys_read_beside(everyone, ranks, rank, 2) for rank in ranks]
    assert found == [{"same", "partly"}, {"same"}, set(), set()]
    assert keys_read_beside(everyone, ranks, 6, 1) == set()
    assert keys_read_beside(everyone, ranks, 6, 8) == {"same"}


def test_offsets_of_tensors_that_ranks_request_may_be_lists():
    """Megatron loads such tensors, which a program has made itself."""
    items = [
        ShardedTensor("own", torch.zeros(4), torch.float32, (4,), (4,), offset, (1,))
        for offset in ([0], (0,))
    ]
    assert keys_read_beside([[item] for item in items], [0, 1], 0, 2) == {"own"}


def test_a_planner_that_resolves_to_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    ds.save({"w": torch.arange(64.0)}, tmp_path)
    memory = torch.zeros(64)

    class Smaller(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return memory[:4]

    with pytest.raises(
        CheckpointException, match=r"'w': .* shape \(64,\) into a tensor of shape \(4,\)"
    ) as found:
        dcp.load({"w": torch.ones(64)}, storage_reader=DCPReader(tmp_path), planner=Smaller())
    ((error, _),) = found.value.failures.values()
    assert isinstance(error, MismatchError) and not memory.any()
