"""Tensors of any shape and dtype, stored in any boxes in the files of several ranks, asked for in any others.

Whatever is loaded has to be the same slice of the global tensor, bit for bit. CI sees the same few examples
each time; HYPOTHESIS_EXAMPLES=2000 looks at that many new ones (conftest.py).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

import megatron_datastates as ds
from megatron_datastates.errors import StorageError
from megatron_datastates.mcore.load.reader import DataStatesReader
from megatron_datastates.mcore.save import strategy as _attaches_our_reader  # noqa: F401
from megatron_datastates.mcore.save.mapping import ShardedStateProvider
from megatron_datastates.mcore.save.mutability import nothing_promised
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome
from tests.unit.grids import DTYPES, SHAPES, Box, Shape, grids, part, regular, slices, targets
from tests.unit.ranks_in_turn import RanksInTurn
from tests.unit.states import SMALL, bits, data_files, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:.*single process", "ignore:ComplexHalf")
RANKS = 3
# Up to 17 MB: many blocks of a file, more than the staging memory, and runs from a byte to whole boxes.
LARGE_SHAPES = st.tuples(st.integers(50, 300), st.integers(50, 300), st.integers(1, 12))


@dataclasses.dataclass
class Stored:
    """A global tensor and how it is cut: boxes, each with the rank that stores it."""

    key: str
    whole: torch.Tensor
    pieces: list[tuple[int, Box]]
    prepended: int = 0  # axes that the ranks' own tensors lack

    def shards(self, rank: int) -> list[ShardedTensor]:
        mine = (box for owner, box in self.pieces if owner == rank)
        return [self.shard(part(self.whole, box), box) for box in mine]

    def shard(self, data: torch.Tensor, box: Box, is_regular: bool = False) -> ShardedTensor:
        """Returns `data` as Megatron describes it, in the place of this box."""
        shape, (offset, size) = tuple(self.whole.shape), box
        counts = tuple(n // k for n, k in zip(shape, size, strict=True)) if is_regular else None
        data = data.reshape(size[self.prepended :])
        local = tuple(data.shape)
        return ShardedTensor(
            self.key, data, data.dtype, local, shape, offset, counts, prepend_axis_num=self.prepended
        )


@st.composite
def stored_tensors(draw: st.DrawFn, key: str, shapes: st.SearchStrategy[Shape] = SHAPES) -> Stored:
    shape = draw(shapes)
    pieces = [(draw(st.integers(0, RANKS - 1)), box) for box in draw(grids(shape))]
    return Stored(key, random_tensor(draw(DTYPES), shape, draw(st.integers(0, 9))), pieces)


@st.composite
def stored_in_regular_grids(draw: st.DrawFn, key: str) -> Stored:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    prepended = draw(st.integers(0, min(len(shape), 2)))
    pieces = [(draw(st.integers(0, RANKS - 1)), box) for box in draw(regular(shape, prepended))]
    return Stored(key, random_tensor(draw(DTYPES), shape, draw(st.integers(0, 9))), pieces, prepended)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RanksInTurn]:
    made = RanksInTurn(RANKS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def saved(ranks: RanksInTurn, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """Saves tensors as RANKS ranks would, and opens the checkpoint."""
    root = tmp_path_factory.mktemp("saved")

    def save(*stored: Stored) -> Checkpoint:
        directory = Path(tempfile.mkdtemp(dir=root))
        states = [
            {f"{n}.{i}": shard for n, one in enumerate(stored) for i, shard in enumerate(one.shards(rank))}
            for rank in range(RANKS)
        ]
        publication = ranks.save(
            directory, [ShardedStateProvider(s, lambda: nothing_promised) for s in states]
        )
        assert publication.outcome is Outcome.PUBLISHED, publication.error
        return ds.open(directory, **SMALL)

    return save


@given(data=st.data())
def test_a_slice_of_any_grid_is_the_slice_of_the_whole(saved: Callable[..., Checkpoint], data: Any) -> None:
    state = [data.draw(stored_tensors(str(n))) for n in range(3)]
    checkpoint = saved(*state)
    for stored in state:
        for box in [data.draw(slices(tuple(stored.whole.shape))) for _ in range(4)]:
            found, wanted = checkpoint.read_tensor(stored.key, *box), part(stored.whole, box)
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert bits(found) == bits(wanted)


@given(data=st.data())
def test_any_grid_is_loaded_into_any_other(saved: Callable[..., Checkpoint], data: Any) -> None:
    load_into_other_grids(saved, [data.draw(stored_tensors(str(n))) for n in range(3)], data)


@given(data=st.data())
@settings(max_examples=settings.default.max_examples // 10)
def test_any_large_grid_is_loaded_into_any_other(saved: Callable[..., Checkpoint], data: Any) -> None:
    load_into_other_grids(saved, [data.draw(stored_tensors("w", LARGE_SHAPES))], data)


def load_into_other_grids(saved: Callable[..., Checkpoint], state: list[Stored], data: Any) -> None:
    """Loads with torch's planner: in place, whatever the strides of the memory, and nothing beside it."""
    checkpoint = saved(*state)
    requested: dict[str, Any] = {}
    memories: list[tuple[torch.Tensor, torch.Tensor]] = []  # as it is, and as it has to be
    for stored in state:
        shards = []
        for box in data.draw(grids(tuple(stored.whole.shape))):
            target, memory = data.draw(targets(stored.whole.dtype, box[1]))
            wanted = memory.clone()
            seen = wanted.as_strided(target.shape, target.stride(), target.storage_offset())
            seen.copy_(part(stored.whole, box))
            memories.append((memory, wanted))
            shards.append(CheckpointableShardedTensor.from_sh_ten(stored.shard(target, box)))
        requested[stored.key] = LocalShardsContainer(shards)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(requested, storage_reader=DataStatesReader(checkpoint), planner=planner)
    for memory, wanted in memories:
        assert bits(memory) == bits(wanted)


def test_one_tensor_is_loaded_without_the_files_of_the_others(saved: Callable[..., Checkpoint]) -> None:
    tensors = [random_tensor(torch.float32, (4, 5), rank) for rank in range(RANKS)]
    state = [Stored(str(n), whole, [(n, ((0, 0), (4, 5)))]) for n, whole in enumerate(tensors)]
    checkpoint = saved(*state)
    for path in data_files(checkpoint.directory)[::2]:
        path.unlink()
    assert bits(checkpoint.read_tensor("1")) == bits(tensors[1])
    with pytest.raises(StorageError, match="cannot be opened"):
        checkpoint.read_tensor("2")


@given(data=st.data())
def test_regular_grids_with_prepended_axes_are_loaded_by_megatrons_strategy(
    saved: Callable[..., Checkpoint], world_of_one: None, data: Any
) -> None:
    state = [data.draw(stored_in_regular_grids(str(n))) for n in range(3)]
    checkpoint = saved(*state)
    requested: dict[str, dict[str, ShardedTensor]] = {}
    wanted: dict[str, dict[str, bytes]] = {}
    for stored in state:
        grid = data.draw(regular(tuple(stored.whole.shape), stored.prepended))
        parts = {str(number): (part(stored.whole, box), box) for number, box in enumerate(grid)}
        wanted[stored.key] = {name: bits(tensor) for name, (tensor, _) in parts.items()}
        requested[stored.key] = {
            name: stored.shard(random_tensor(tensor.dtype, tuple(tensor.shape), 99), box, is_regular=True)
            for name, (tensor, box) in parts.items()
        }
    loaded = TorchDistLoadShardedStrategy().load(requested, checkpoint.directory)
    assert {key: {name: bits(t) for name, t in found.items()} for key, found in loaded.items()} == wanted
