"""Ranks of test_optimizer_map.py: read each parameter's states from a checkpoint of buckets and compare them.

They are compared with the optimizer's memory, gathered here, and with what Megatron saves of the same state
as fully reshardable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.validation import StrictHandling
from model_ranks import FORMATS, Layout, Training, build, random_values, save_both, step, strategies
from saving_rank import join, make_directory, report

from megatron_datastates.format.values import is_optimizer_map
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer import StateTensor, optimizer_state


def compare(root: str, layouts: list[Layout], with_stock: bool, folder: str) -> None:
    """Saves each layout twice, the model sharded differently, so that a map reused by mistake shows."""
    join()
    keys = []
    for number, layout in enumerate(layouts):
        training = build(layout, "dp_reshardable", random_values())
        for singletons in (True, False):
            step(training)
            training.metadata["singleton_local_shards"] = singletons
            place = str(Path(root, f"{number}-{singletons}"))
            found = saved_state(training, place)
            compare_with_memory(training, found)
        if with_stock:
            compare_with_stock(training, found, place + "-stock")
        keys.append(sorted(found))
    report(folder, keys=keys)


def hide(root: str, layout: Layout, folder: str) -> None:
    """Saves one state in both formats and checks that Megatron sees no optimizer map of ours."""
    join()
    save_both(root, layout, "dp_reshardable")
    ours, stock = (str(Path(root, name)) for name in FORMATS)
    objects = Checkpoint.open(ours).index.objects
    shown = load_sharded_metadata(ours)
    assert not any(is_optimizer_map(key) for key in shown), shown.keys()
    assert shown.keys() == load_sharded_metadata(stock).keys()
    training = build(layout, "dp_reshardable", random_values())
    asked = training.sharded(is_loading=True)
    _, missing, unexpected = dist_checkpointing.load(asked, ours, strict=StrictHandling.RETURN_ALL)
    assert not missing and not unexpected, (missing, unexpected)
    report(folder, maps=[key for key in objects if is_optimizer_map(key)])


def saved_state(training: Training, directory: str) -> dict[str, StateTensor]:
    """Saves in our format and returns the optimizer's state as the checkpoint lists it."""
    make_directory(Path(directory))
    dist.barrier()
    dist_checkpointing.save(training.sharded(), directory, strategies("ours", parallel=True)[0])
    return optimizer_state(Checkpoint.open(directory))


def compare_with_stock(training: Training, found: dict[str, StateTensor], directory: str) -> None:
    training.metadata["distrib_optim_sharding_type"] = "fully_reshardable"
    make_directory(Path(directory))
    dist.barrier()
    dist_checkpointing.save(training.sharded(), directory, strategies("stock", parallel=False)[0])
    assert list(Path(directory).glob("*.distcp"))
    stock = {
        key: value
        for key, value in dist_checkpointing.load_plain_tensors(directory).items()
        if key.startswith("optimizer.state.")
    }
    assert found.keys() == stock.keys(), found.keys() ^ stock.keys()
    for key, tensor in found.items():
        assert (tensor.global_shape, tensor.dtype) == (stock[key].shape, str(stock[key].dtype)[6:]), key
        assert torch.equal(tensor.read(), stock[key]), key


def compare_with_memory(training: Training, found: dict[str, StateTensor]) -> None:
    """Compares this rank's shards of every state, and checks that the ranks together compare all of it."""
    compared = dict.fromkeys(found, 0)
    for shard in shards_in_memory(training):
        offset = tuple(shard.global_offset)
        shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        assert torch.equal(found[shard.key].read(offset, shape), shard.data.reshape(shape)), shard
        compared[shard.key] += shard.data.numel()
    counts: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(counts, compared)
    for key, tensor in found.items():
        assert sum(count[key] for count in counts) == torch.Size(tensor.global_shape).numel(), key


def shards_in_memory(training: Training, *, main: bool = True) -> Iterator[ShardedTensor]:
    """Yields all states of this rank's parameters, sharded as the model; only main replicas with `main`."""
    model = training.sharded()
    model.pop("optimizer")
    kinds = (ShardedTensor, ShardedTensorFactory)
    sharded: dict[int, list[Any]] = {}  # by id of the parameter: it is stored, or views of some of its rows
    for item in (item for item in nested_values(model) if isinstance(item, kinds)):
        whole = item.data if item.data._base is None else item.data._base
        sharded.setdefault(id(whole), []).append(item)
    chained = getattr(training.optimizer, "chained_optimizers", [training.optimizer])
    for optimizer in (one for one in chained if hasattr(one, "buffers")):
        for param, states in gathered(optimizer):
            items = sorted(sharded[id(param)], key=lambda item: item.data.storage_offset())
            for state, value in states.items():
                rows = value.reshape(param.shape).split([len(item.data) for item in items])
                for item, data in zip(items, rows, strict=True):
                    yield from _built(item, state, data, main=main)


def _built(item: Any, state: str, data: torch.Tensor, *, main: bool) -> Iterator[ShardedTensor]:
    fields: dict[str, Any] = {"key": f"optimizer.state.{state}.{item.key}", "data": data}
    if isinstance(item, ShardedTensor):
        fields["dtype"] = data.dtype
    moved = dataclasses.replace(item, **fields)
    built = nested_values(moved.build()) if hasattr(moved, "build") else [moved]
    yield from (shard for shard in built if not main or is_main_replica(shard.replica_id))


def gathered(optimizer: Any) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    """Yields each parameter and its states, gathered from the ranks that own a part of it."""
    own = {}
    for number, param in enumerate(p for buffer in optimizer.buffers for p in buffer.param_index_map):
        if param in optimizer.model_param_gbuf_map:
            span = optimizer._get_model_param_range_map(param)["param"]
            states = optimizer._get_main_param_and_optimizer_states(param)
            states.pop("step", None)
            own[number] = span.start, {name: value.detach().clone() for name, value in states.items()}
    parts: list[dict[int, Any]] = [{} for _ in range(optimizer.data_parallel_group.size())]
    dist.all_gather_object(parts, own, optimizer.data_parallel_group)
    for number, param in enumerate(p for buffer in optimizer.buffers for p in buffer.param_index_map):
        pieces = sorted((part[number] for part in parts if number in part), key=lambda piece: piece[0])
        yield param, {name: torch.cat([piece[1][name] for piece in pieces]) for name in pieces[0][1]}
