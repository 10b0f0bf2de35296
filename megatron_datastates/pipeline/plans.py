"""What is known of a state before it is saved again: its layout in the file, and what is copied where."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_datastates.plan.copies import CopyPlan, plan_copies
from megatron_datastates.plan.layout import Layout, plan_layout
from megatron_datastates.providers.base import Tensors
from megatron_datastates.providers.tensors import Structure, structure_of, with_plain_values


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

    def is_of(self, tensors: Tensors, object_keys: Sequence[str]) -> bool:
        return self.object_keys == object_keys and self.structure.is_of(tensors)


def plan_state(tensors: Tensors, object_keys: list[str]) -> StatePlan:
    """Plans saves of `tensors` and of objects with these keys.

    Raises:
        MismatchError: a tensor cannot be stored as its place says.
        FormatError: fragments of one key contradict each other, or two objects have one key.
    """
    structure = structure_of(tensors)
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

    def find(self, tensors: Tensors, object_keys: list[str]) -> tuple[StatePlan, Tensors]:
        """The plan for `tensors`, made if there is none yet, and the tensors to copy by it.

        Raises as plan_state.
        """
        plan = self._known(tensors, object_keys)
        if plan is None:
            tensors = with_plain_values(tensors)
            plan = self._known(tensors, object_keys) or plan_state(tensors, object_keys)
        self._plans = [*(p for p in self._plans if p is not plan), plan][-self._most :]
        return plan, tensors

    def _known(self, tensors: Tensors, object_keys: list[str]) -> StatePlan | None:
        return next((plan for plan in reversed(self._plans) if plan.is_of(tensors, object_keys)), None)
