"""Where a model's sharded state has the elements of a parameter of the optimizer's buckets."""

from __future__ import annotations

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_datastates.mcore.save.buckets import ModelShards

BUFFER = torch.zeros(100)  # as the one that holds all parameters of a model
PARAM = torch.nn.Parameter(BUFFER[20:44].view(6, 4))
BEFORE, AFTER = (torch.nn.Parameter(BUFFER[begin:end]) for begin, end in ((0, 20), (44, 60)))


def stored(**tensors: torch.Tensor) -> dict[str, ShardedTensor]:
    """Returns a sharded state of these tensors and of the parameters beside PARAM."""
    every = {"before": BEFORE, "after": AFTER, **tensors}
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in every.items()}


def found(**tensors: torch.Tensor) -> tuple[str, list[tuple[str, int, tuple[int, ...], tuple[int, ...]]]]:
    name, shards = ModelShards(stored(**tensors)).name_and_shards(PARAM)
    return name, [(shard.key, shard.start, shard.shape, shard.strides) for shard in shards]


def test_a_parameter_is_stored_itself_or_under_another_object() -> None:
    for same in (PARAM, PARAM.detach()):
        assert found(w=same) == ("w", [("w", 0, (6, 4), (4, 1))])


@pytest.mark.parametrize("axis", [0, 1])
def test_views_of_a_parameter_are_its_shards(axis: int) -> None:
    """As Megatron's fused down projection of multi-latent attention stores its rows, in any order."""
    one, two = PARAM.split([2, 6 - 2] if axis == 0 else [1, 3], dim=axis)
    expected = [
        ("one", 0, tuple(one.shape), (4, 1)),
        ("two", 8 if axis == 0 else 1, tuple(two.shape), (4, 1)),
    ]
    assert found(two=two, one=one) == ("one", expected)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"rows": PARAM[:5]},
        {"rows": PARAM[:4], "others": PARAM[3:5]},
        {"rows": PARAM[:4], "others": torch.zeros(2, 4)},
        {"all": BUFFER[20:60]},
        {"all": PARAM.detach(), "again": PARAM.detach()},
        {"all": PARAM.detach().view(torch.int32)},
        {"all": torch.zeros(6, 4, device="meta")},
    ],
    ids=["none", "some", "twice", "of others", "too long", "two names", "dtype", "meta"],
)
def test_what_is_no_whole_parameter_is_not_taken_for_one(tensors: dict[str, torch.Tensor]) -> None:
    assert found(**tensors) == ("", [])


def test_tensors_of_other_memory_are_no_views_where_both_were_released() -> None:
    """As by a program that offloads its model: all that it has released is at address 0."""
    buffers = torch.zeros(100), torch.zeros(100)
    param, other = (torch.nn.Parameter(buffer[20:44].view(6, 4)) for buffer in buffers)
    for buffer in buffers:
        buffer.untyped_storage().resize_(0)
    states = stored(other=other), stored(other=other, same=param.detach())
    names = [ModelShards(state).name_and_shards(param)[0] for state in states]
    assert names == ["", "same"]  # compared alone: pytest would print the tensors
