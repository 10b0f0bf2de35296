"""Breadth-first search over all states of a model, up to the first that breaks a rule."""

from __future__ import annotations

import collections
import dataclasses

from tests.model.protocol import steps, violation
from tests.model.state import Model, State


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search. `trace`: the labels of the shortest path to the violation."""

    states: int
    violation: str
    trace: list[str]
    ends: list[State]  # states without a next step

    def __str__(self) -> str:
        return "\n".join([self.violation or "nothing is wrong", *self.trace])


def search(model: Model) -> Found:
    """Visits every reachable state once, up to the first that breaks a rule."""
    start = model.start()
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    queue, ends = collections.deque([start]), []
    while queue:
        state = queue.popleft()
        wrong = violation(model, state)
        if wrong:
            return Found(len(came_from), wrong, _trace(came_from, state), [])
        is_end = True
        for label, after in steps(model, state):
            is_end = False
            if after not in came_from:
                came_from[after] = (state, label)
                queue.append(after)
        if is_end:
            ends.append(state)
    return Found(len(came_from), "", [], ends)


def _trace(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    labels: list[str] = []
    while (step := came_from[state]) is not None:
        state, label = step
        labels.append(label)
    return labels[::-1]
