"""The optimizer map as it is made: for which saves, and what it says of shards that factories build."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from megatron_datastates.format.optimizer_map import OptimizerMap, Parameter
from megatron_datastates.mcore.save.buckets import carried_map
from megatron_datastates.mcore.save.preparing import wrap_sharded_param_state_dp_reshardable

GROUP = "optimizer.distributed.dp_group_idx_2."
BUCKET = "gbuf_idx_0.dtype_d.bucket_idx_0"


class Optimizer:
    """What the hook looks at: one bucket that begins at 64 and holds one parameter from 70 on."""

    def __init__(self, param: torch.Tensor) -> None:
        places = {param: (70, 70 + param.numel(), 0)}
        self.buffers = [SimpleNamespace(param_index_map=places, buckets=[SimpleNamespace(offset=64)])]

    def state(self, replica: int = 0) -> dict[Any, Any]:
        key = f"{GROUP}{BUCKET}.exp_avg"
        tensor = ShardedTensor.from_rank_offsets(key, torch.zeros(30))
        numel = ShardedObject(GROUP + "per_bucket_numel", [], (1,), (0,), replica_id=(0, 0, replica))
        return {"per_bucket_numel": numel, 0: {"d": [[{"exp_avg": tensor, "padding": False}]]}}


def carried(optimizer: Optimizer, model: dict[str, Any], replica: int = 0, **how: Any) -> Any:
    """Returns (key, text) of the map that goes with a state, or None."""
    hooked = functools.partial(
        wrap_sharded_param_state_dp_reshardable, lambda self, *args, **kwargs: self.state(replica)
    )
    return carried_map(hooked(optimizer, model, **how)["per_bucket_numel"])


def parameter_of(param: torch.Tensor, item: Any) -> Parameter:
    key, text = carried(Optimizer(param), {"model": {"w": item}})
    assert key == GROUP + "datastates_map/shard_0_1"
    (bucket,) = OptimizerMap.decode(text, key).buckets
    assert (bucket.name, bucket.elements, bucket.states) == (BUCKET, 30, ("exp_avg",))
    (parameter,) = bucket.parameters
    assert (parameter.begin, parameter.end) == (6, 6 + param.numel())
    return parameter


def factory(param: torch.Tensor, build: Callable[[torch.Tensor], list[torch.Tensor]]) -> ShardedTensorFactory:
    def shards(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        parts = build(tensor)
        return [
            ShardedTensor.from_rank_offsets(key, part, (0, i, len(parts)), replica_id=replica_id)
            for i, part in enumerate(parts)
        ]

    return ShardedTensorFactory("w", param, shards, torch.cat)


def test_plain_parameter_is_one_shard_with_its_prepended_axes():
    param = torch.nn.Parameter(torch.zeros(3, 2))
    item = ShardedTensor.from_rank_offsets("w", param, (0, 1, 4), (2, 1, 2), prepend_axis_num=1)
    parameter = parameter_of(param, item)
    (shard,) = parameter.shards
    assert parameter.name == "model.w"
    assert (shard.key, shard.global_shape, shard.offset, shard.shape) == (
        "w",
        (4, 3, 4),
        (1, 0, 2),
        (1, 3, 2),
    )
    assert (shard.start, shard.strides, shard.main) == (0, (0, 2, 1), True)


def test_views_that_a_factory_builds_are_found_in_the_parameter():
    param = torch.nn.Parameter(torch.zeros(4, 3))
    found = parameter_of(param, factory(param, lambda t: [half.T for half in t.chunk(2)])).shards
    assert [(shard.offset, shard.shape, shard.start, shard.strides) for shard in found] == [
        ((0, 0), (3, 2), 0, (1, 3)),
        ((3, 0), (3, 2), 6, (1, 3)),
    ]


def test_nothing_is_claimed_of_copies_that_a_factory_builds():
    param = torch.nn.Parameter(torch.zeros(4, 3))
    copies = factory(param, lambda t: [half.T.contiguous() for half in t.chunk(2)])
    assert parameter_of(param, copies).shards == ()


def test_nothing_is_claimed_of_a_parameter_that_the_model_does_not_name():
    param = torch.nn.Parameter(torch.zeros(2))
    other = ShardedTensor.from_rank_offsets("w", torch.nn.Parameter(torch.zeros(2)))
    assert parameter_of(param, other) == Parameter("", 6, 8, ())


def test_replica_is_distinguished_from_the_one_that_counts():
    param = torch.nn.Parameter(torch.zeros(2))
    copy = ShardedTensor.from_rank_offsets("w", param, replica_id=(1, 0, 0))
    assert not parameter_of(param, copy).shards[0].main


def test_map_is_made_anew_when_what_it_describes_has_changed():
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer, item = Optimizer(param), ShardedTensor.from_rank_offsets("w", param)
    first = carried(optimizer, {"model": {"w": item}})[1]
    assert carried(optimizer, {"model": {"w": dataclasses.replace(item)}})[1] is first
    assert '"key":"v"' in carried(optimizer, {"model": {"w": dataclasses.replace(item, key="v")}})[1]
    longer = ShardedTensor.from_rank_offsets("w", param, (0, 0, 2))
    assert '"global_shape":[8]' in carried(optimizer, {"model": {"w": longer}})[1]


@pytest.mark.parametrize("how", [{"is_loading": True}, {"replica": 1}])
def test_loads_and_replicas_carry_no_map(how):
    assert carried(Optimizer(torch.nn.Parameter(torch.zeros(2))), {}, **how) is None


def test_a_save_goes_on_without_a_map_that_could_not_be_made(caplog):
    optimizer = Optimizer(torch.nn.Parameter(torch.zeros(2)))
    del optimizer.buffers
    assert carried(optimizer, {}) is None
    assert "the checkpoint will have no optimizer map" in caplog.text
