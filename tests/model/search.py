"""Breadth-first search over all states of a model, up to the first that must not be."""

from __future__ import annotations

import collections
import dataclasses

from tests.model.protocol import Model, State, steps, violation


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came to. `trace`: the shortest way to the violation, a step a line."""

    states: int
    violation: str
    trace: list[str]
    ends: list[State]  # in which nothing can happen any more

    def __str__(self) -> str:
        return "\n".join([self.violation or "nothing is wrong", *self.trace])


def search(model: Model) -> Found:
    """Visits every state that can be reached, each once."""
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
