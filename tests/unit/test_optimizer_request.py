"""What a load's state dict has of the run's own buckets."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import msgspec
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_datastates.format.optimizer_map import OptimizerMap
from megatron_datastates.mcore.load.optimizer_request import (
    OwnBuckets,
    bucket_of,
    own_buckets,
    wrap_sharded_state_dict,
)
from megatron_datastates.mcore.save.buckets import CARRIER


class Bucket:
    offset = 0


class Buffer:
    def __init__(self, param: torch.Tensor) -> None:
        self.param_index_map = {param: (0, param.numel(), 0)}
        self.buckets = [Bucket()]


class Optimizer:
    """As Megatron's, with one parameter."""

    def __init__(self, param: torch.Tensor) -> None:
        self.buffers = [Buffer(param)]

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> Any:
        name = "optimizer.gbuf_idx_0.bucket_idx_0.param"
        entry = {"padding": False, "param": ShardedTensor.from_rank_offsets(name, torch.zeros(4))}
        carrier = ShardedObject(f"optimizer.{CARRIER}", [4], (1,), (0,))
        return {"param_state": {CARRIER: carrier, 0: {"dtype": [[entry]]}}}


def request(param: torch.Tensor, item: ShardedTensor) -> Any:
    made = functools.partial(wrap_sharded_state_dict, Optimizer.sharded_state_dict)
    return made(Optimizer(param), {"w": item}, is_loading=True)["param_state"]


def test_buckets_are_described_with_the_keys_that_tensors_have_at_last() -> None:
    param = torch.nn.Parameter(torch.zeros(4))
    item = ShardedTensor.from_rank_offsets("w", param)
    state = request(param, item)
    item.key = "another"
    for one in (state[CARRIER], state[0]["dtype"][0][0]["param"]):  # as Megatron's ChainedOptimizer does
        one.key = f"chained_0.{one.key}"
    own = own_buckets(state)
    assert own is not None
    (bucket,) = own.map.buckets
    assert bucket.name == "gbuf_idx_0.bucket_idx_0"
    assert [shard.key for shard in bucket.parameters[0].shards] == ["another"]


def test_a_tensor_is_in_the_bucket_of_its_whole_name() -> None:
    names = ("bucket_idx_1", "bucket_idx_10")
    buckets = [{"name": name, "elements": 4, "states": ["param"], "parameters": []} for name in names]
    own = OwnBuckets(lambda: msgspec.convert({"format_version": 1, "buckets": buckets}, OptimizerMap))
    state = {CARRIER: ShardedObject(f"optimizer.{CARRIER}", [4], (1,), (0,))}
    item = ShardedTensor.from_rank_offsets("optimizer.bucket_idx_10.param", torch.zeros(4))
    assert bucket_of(own, state, item).name == "bucket_idx_10"


def test_what_a_request_holds_goes_with_it() -> None:
    """Else a copy of the model, which Megatron makes of quantized weights in a load, would stay on the device
    until Python collects garbage."""
    param = torch.nn.Parameter(torch.zeros(4))
    item = ShardedTensor.from_rank_offsets("w", param)
    gc.disable()
    try:
        state = request(param, item)
        item.data = torch.zeros(4)
        assert own_buckets(state) is not None
        held = [weakref.ref(one.data) for one in (item, state[0]["dtype"][0][0]["param"])]
        del state, item
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()
