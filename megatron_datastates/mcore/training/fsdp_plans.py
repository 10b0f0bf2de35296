"""DCP's plans for saves with Megatron-FSDP, of which what is as in the last save is neither made nor sent.

DCP itself compares each plan with the last one, so that ranks need not send an equal one. But it makes it
anew, item by item, with thousands of them, and compares all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

# What DCP keeps of plans, so that a rank need not send one that is as in the last save.
_CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)
_planned_in: Any = None  # the world whose plans DCP keeps for us
_items: dict[str, tuple[Any, list[WriteItem]]] = {}  # of the last save, by key, and what they were made from


class _Planner(DefaultSavePlanner):
    """DCP's planner, which uses the items of the last save again where it would make equal ones."""

    is_cached = False

    def create_local_plan(self) -> SavePlan:
        """Returns this rank's part of the plan, or an unusable one if it is as in the last save."""
        global _items
        last, _items = _items, {}
        items: list[WriteItem] = []
        for key, value in self.state_dict.items():
            facts = _facts_of(value)
            known = last.get(key)
            if known is None or facts is None or known[0] != facts:
                known = facts, _made(key, value)
            _items[key] = known
            items += known[1]
        self.plan = SavePlan(items, planner_data=self.mappings)
        if not self.is_cached:
            return self.plan
        kept = SavePlanner._cached_save_plan.get(self._cached_plans_key)
        if kept is not None and _is_same(self.plan, kept):
            return SavePlan([], usable=False)
        SavePlanner._cached_save_plan[self._cached_plans_key] = self.plan
        return self.plan


def _facts_of(value: Any) -> Any:
    """Returns all that the items of a value depend on; None if that is not known."""
    if not isinstance(value, DTensor):
        return None if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__") else ()
    local = value._local_tensor
    chunks = getattr(local, "__create_chunk_list__", None)
    if chunks is None:  # not one of Megatron-FSDP's
        return None
    where = tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks())
    properties = local.dtype, local.layout, value.requires_grad, local.is_pinned()
    return where, tuple(value.shape), properties, value.device_mesh.get_coordinate() is None


def _made(key: str, value: Any) -> list[WriteItem]:
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return []  # this rank is not part of its mesh
    return list(_create_write_items(key, value))


def _is_same(plan: SavePlan, last: SavePlan) -> bool:
    """Returns whether plans are equal; the nested places of their keys, too, which DCP does not compare."""
    return (
        len(plan.items) == len(last.items)
        and all(one is other or one == other for one, other in zip(plan.items, last.items, strict=True))
        and bool(plan.planner_data == last.planner_data)
    )


def planned(state_dict: Any) -> tuple[SavePlan, SavePlanner]:
    """Returns this rank's part of DCP's plan for a save, and the planner. Collective.

    Raises:
        CheckpointException: a rank's part, or all together, could not be planned; on all ranks.
    """
    ranks = _DistWrapper(None, True, 0)
    planner = _planner()

    def own_plan() -> SavePlan:
        planner.set_up_planner(state_dict, is_coordinator=ranks.is_coordinator)
        return planner.create_local_plan()

    def all_plans(plans: list[SavePlan]) -> list[SavePlan]:
        return planner.create_global_plan(plans)[0]

    try:
        return planner.finish_plan(ranks.reduce_scatter("plan", own_plan, all_plans)), planner
    except BaseException:
        _forget_plans()  # ranks and coordinator may have kept different ones
        raise


def _planner() -> _Planner:
    global _planned_in
    world = dist.group.WORLD
    if world is not _planned_in:
        _forget_plans()  # in another world, the coordinator knows nothing of this rank's plans
        _planned_in = world
    # The tensors of Megatron-FSDP are DTensors; ShardedTensors have nothing to be flattened.
    try:
        planner = _Planner(flatten_sharded_tensors=False, enable_plan_caching=True)
    except TypeError:  # an older torch
        return _Planner(flatten_sharded_tensors=False)
    planner.is_cached = True
    planner._cached_plans_key = __name__
    return planner


def _forget_plans() -> None:
    _items.clear()
    for name in _CACHES:
        getattr(SavePlanner, name, {}).pop(__name__, None)
