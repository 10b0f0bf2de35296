"""What is known of a state before it is saved again: its layout in the file, and what is copied where."""

from __future__ import annotations

import dataclasses

from megatron_datastates.engine.exchange import describe
from megatron_datastates.plan.copies import CopyPlan, plan_copies
from megatron_datastates.plan.layout import Layout, plan_layout
from megatron_datastates.providers.base import Tensors
from megatron_datastates.providers.tensors import (
    Memory,
    Structure,
    has_unresolved_views,
    locate,
    resolve_views,
    structure_of,
)


@dataclasses.dataclass
class StatePlan:
    """Of one structure: names, shapes, memory layouts, devices, and what may change when."""

    structure: Structure
    object_keys: list[str]
    layout: Layout
    copies: CopyPlan
    eager_bytes: int  # of tensors: copied before the save returns
    lazy_bytes: int
    object_bytes: int = 0  # as serialized in the last save: a guess for the next


def plan_state(tensors: Tensors, object_keys: list[str], description: bytes | None = None) -> StatePlan:
    """Plans saves of `tensors` (whose `description` may be known) and of objects with these keys.

    Raises:
        MismatchError: a tensor cannot be stored as its place says.
        FormatError: fragments of one key contradict each other, or two objects have one key.
    """
    structure = structure_of(tensors, description)
    fragments, eager = structure.fragments(), structure.eager()
    layout = plan_layout(fragments, eager, object_keys)
    copies = plan_copies(layout, structure.runs(), eager, structure.devices())
    sizes = [fragment.bytes for fragment in fragments]
    eager_bytes = sum(size for size, first in zip(sizes, eager, strict=True) if first)
    return StatePlan(structure, object_keys, layout, copies, eager_bytes, sum(sizes) - eager_bytes)


class Plans:
    """The plans of the structures saved last. Used by the trainer's thread alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._plans: list[StatePlan] = []  # the most recent is last

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, tensors: Tensors, object_keys: list[str]) -> tuple[StatePlan, Memory]:
        """The plan for `tensors`, made if there is none yet, and where they are.

        Raises:
            MismatchError: as plan_state and locate.
            FormatError: as plan_state.
        """
        seen = describe(tensors.tensors)
        if has_unresolved_views(tensors, seen is None or seen.has_complex):
            tensors = resolve_views(tensors)
            seen = describe(tensors.tensors)
        addresses, description = (seen.addresses, seen.description) if seen is not None else (None, None)
        plan = next((p for p in reversed(self._plans) if _fits(p, tensors, object_keys, description)), None)
        if plan is None:
            plan = plan_state(tensors, object_keys, description)
        self._plans = [*(p for p in self._plans if p is not plan), plan][-self._most :]
        return plan, locate(tensors, addresses)


def _fits(plan: StatePlan, tensors: Tensors, object_keys: list[str], description: bytes | None) -> bool:
    return plan.object_keys == object_keys and plan.structure.matches(tensors, description)
