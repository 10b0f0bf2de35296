"""Ranks of test_resume_anywhere.py: save bucket state in one layout, load it in another, compare with memory.

The truth is what the optimizer held when it was saved, gathered and written here, parameter by parameter. It
is neither read nor written by what is tested. What belongs here: saving, loading and comparing. What does
not: the choice of layouts, which is the test's.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from map_ranks import shards_in_memory
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from model_ranks import FORMATS, Layout, Training, build, random_values, step, strategies
from saving_rank import join, make_directory, report

from megatron_datastates.format.values import is_optimizer_map
from megatron_datastates.mcore.load import optimizer_layout
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.providers.named import dictionaries

DECOUPLED = 0.5  # the decoupled_lr in test_resume_anywhere.py
SHARDING = "distrib_optim_sharding_type"
MARKED = 0.0625  # a learning rate that no fresh optimizer has; each kind of group has a multiple of it

UNKNOWN = -32768  # an element that no rank held


def save(root: str, layouts: list[Layout], kind: str, folder: str, name: str = "ours") -> None:
    """Saves the state of each layout to ROOT/N, and to ROOT/N-truth-RANK what its optimizer holds.

    `name`: of the format.
    """
    join()
    for number, layout in enumerate(layouts):
        training = build(layout, kind, random_values())
        for _ in range(2):
            step(training)
        for group in training.optimizer.param_groups:
            group["lr"] = mark(group)
        place = Path(root, str(number))
        make_directory(place)
        dist.barrier()
        save, content = strategies(name, parallel=False)[0], {SHARDING: training.metadata.get(SHARDING)}
        dist_checkpointing.save(training.sharded(), str(place), save, content_metadata=content)
        torch.save(list(pieces(training, main=True)), f"{place}-truth-{dist.get_rank()}")
    report(folder)


def save_as_torch_dist(root: str, layouts: list[Layout], kind: str, folder: str) -> None:
    save(root, layouts, kind, folder, "stock")


def refuse(root: str, layout: Layout, folder: str) -> None:
    """Loads ROOT/0 into another layout than the one that saved it, and reports the error."""
    join()
    training = build(layout, "dp_reshardable", random_values())
    try:
        dist_checkpointing.load(training.sharded(is_loading=True), str(Path(root, "0")))
    except CheckpointingException as error:
        report(folder, error=str(error))


def load(root: str, number: int, layouts: list[Layout], how: dict[str, Any], folder: str) -> None:
    """Loads ROOT/NUMBER into each of these layouts, and compares what the optimizers hold with the truth.

    `how`: the `kind` of the optimizers that load, `parallel` and `strict`, as Megatron has them.
    """
    join()
    place = Path(root, str(number))
    truth = read_truth(place)
    compared, restated, said, maps = [], [], Announcements(), maps_read()
    for turn, layout in enumerate(layouts):
        training = build(layout, how.get("kind", "dp_reshardable"), lambda tensor: tensor.fill_(3.0))
        parallel = how.get("parallel", turn % 2 == 1)
        options = {"strict": how["strict"]} if "strict" in how else {}
        said.count = 0
        request = training.sharded(is_loading=True)
        loaded = dist_checkpointing.load(request, str(place), strategies("ours", parallel)[1], **options)
        training.accept(loaded)
        # A layout that is not another one has its own replicas, which here differ.
        compared.append(compare(training, truth, layout, main=not said.count))
        restated.append(said.count)
    report(folder, compared=compared, restated=restated, maps=maps)


def maps_read() -> list[str]:
    """Returns the keys of the optimizer maps that this rank reads from now on."""
    read, plan = list[str](), Checkpoint.plan_objects

    def plan_objects(self: Checkpoint, keys: Iterable[str]) -> Any:
        keys = list(keys)
        read.extend(filter(is_optimizer_map, keys))
        return plan(self, keys)

    Checkpoint.plan_objects = plan_objects  # type: ignore[method-assign]
    return read


def mark(group: dict[str, Any]) -> float:
    """Returns the learning rate of a parameter group: groups with other options have another one."""
    decoupled = group.get("is_decoupled_lr") or group.get("max_lr") == DECOUPLED
    return MARKED * (1 + 2 * bool(group["wd_mult"] == 0) + 4 * bool(decoupled))


def merge_steps(root: str, layout: Layout, folder: str) -> None:
    """Saves and loads offloaded state whose steps are part of the common state, in both formats.

    So it is in releases of Megatron, and forks of it, that do not mark the steps as local.
    """
    join()
    training = build(layout, "half offloaded dp_reshardable", random_values())
    for _ in range(2):
        step(training)
    for group in training.optimizer.param_groups:
        group["lr"] = mark(group)
    for name in FORMATS:
        make_directory(Path(root, name))
        dist.barrier()
        saved = with_plain_steps(training.sharded())
        dist_checkpointing.save(saved, str(Path(root, name)), strategies(name, parallel=False)[0])
    torch.save(list(pieces(training, main=True)), f"{root}/ours-truth-{dist.get_rank()}")
    dist.barrier()
    failed = ""
    for name in reversed(FORMATS):
        training = build(layout, "half offloaded dp_reshardable", lambda tensor: tensor.fill_(3.0))
        request = with_plain_steps(training.sharded(is_loading=True))
        try:
            training.accept(dist_checkpointing.load(request, str(Path(root, name))))
        except ValueError as error:
            failed = str(error)
            assert name == "stock", error
        dist.barrier()
    report(
        folder, compared=compare(training, read_truth(Path(root, "ours")), layout, main=True), stock=failed
    )


def with_plain_steps(state: dict[str, Any]) -> dict[str, Any]:
    for node in dictionaries(state):
        if "step" in node and "padding" in node:
            node["step"] = node["step"].unwrap()
    return state


class Announcements(logging.Handler):
    """Counts what is logged about loads of optimizer state from another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        logger = logging.getLogger(optimizer_layout.__name__)
        logger.addHandler(self)
        logger.setLevel(logging.DEBUG)  # all ranks but one say it at this level

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def pieces(training: Training, *, main: bool) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Any]]:
    """Yields (key, offset, global shape, values) of all states of this rank's parameters."""
    distributed = [hasattr(one, "buffers") for one in links(training.optimizer)]
    for shard in (
        *(shards_in_memory(training, main=main) if any(distributed) else ()),
        *(() if all(distributed) else whole_shards(training, main=main)),
    ):
        shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        values = shard.data.detach().reshape(shape).clone()
        yield shard.key, tuple(shard.global_offset), tuple(shard.global_shape), values


def links(optimizer: Any) -> list[Any]:
    """Returns the optimizers of a chain, of chains of them, or this one."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [link for one in chained for link in links(one)]


def whole_shards(training: Training, *, main: bool) -> Iterator[Any]:
    """Yields the same of optimizers that are not distributed, which hold states in the model's shards."""
    kinds = (ShardedTensor, ShardedTensorFactory)
    for item in nested_values(training.sharded()["optimizer"]):
        if isinstance(item, kinds) and "optimizer.state." in item.key:
            key = item.key[item.key.index("optimizer.state.") :].replace(".fp32_param.", ".param.")
            item = dataclasses.replace(item, key=key)
            for shard in nested_values(item.build()) if hasattr(item, "build") else [item]:
                if not main or is_main_replica(shard.replica_id):
                    yield shard


def read_truth(place: Path) -> dict[str, torch.Tensor]:
    """Returns all states as global tensors."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(place.parent.glob(f"{place.name}-truth-*")):
        for key, offset, whole, values in torch.load(path, weights_only=True):
            unknown = float("nan") if values.is_floating_point() else UNKNOWN
            tensor = found.setdefault(key, torch.full(whole, unknown, dtype=values.dtype))
            tensor[tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))] = values
    assert found and not any((tensor.isnan() | (tensor == UNKNOWN)).any() for tensor in found.values())
    return found


def compare(training: Training, truth: dict[str, torch.Tensor], layout: Layout, *, main: bool) -> list[str]:
    """Compares each state of each parameter, replicas included unless `main`, and the groups' options."""
    keys = []
    for key, offset, _, values in pieces(training, main=main):
        expected = torch.zeros_like(values)  # what a vocabulary was padded with
        stored = truth[key][tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))]
        expected[tuple(slice(0, n) for n in stored.shape)] = stored
        assert torch.equal(values, expected), f"{key} at {offset} in {layout}"
        keys.append(key)
    for group in training.optimizer.param_groups:
        assert group["lr"] == mark(group), (layout, group["lr"])
    steps = set()
    for chained in links(training.optimizer):
        groups = [group for group in chained.optimizer.param_groups if group["params"]]
        states = [chained.optimizer.state[param] for group in groups for param in group["params"]]
        steps |= {int(holder["step"]) for holder in (*groups, *states) if "step" in holder}  # Muon has none
    assert steps == {2}, (steps, layout)
    return sorted(set(keys))
