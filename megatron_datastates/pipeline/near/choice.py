"""Which of the checkpoints that near tiers hold is brought to the run's directory before a load.

It is the newest one that follows what the tracker there names. Where neither of the two follows the other,
the run has branches, and the job that has saved last counts (pipeline/runs/jobs.py), as far as that is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.near.holdings import Held, Node
from megatron_datastates.pipeline.runs.branches import Point
from megatron_datastates.pipeline.runs.history import History
from megatron_datastates.pipeline.runs.jobs import Job


class Choice:
    """Which checkpoint is brought to the run's directory. The same on all ranks."""

    def __init__(self, nodes: Sequence[Node], wanted: int | None, run: Path) -> None:
        self._held = {held.save_id: held for node in nodes for held in node.held if held.point is not None}
        self._far = nodes[0].far
        points = [self._far.point, *self._far.set_back, *(held.point for held in self._held.values())]
        self._history = History((self._far.jobs, *(node.jobs for node in nodes)), filter(None, points))
        self._wanted = wanted
        self._run = run

    def candidates(self) -> list[tuple[str, SaveId]]:
        """Returns names and save ids of checkpoints, newest iteration first; then the latest branch first."""

        def order(held: Held) -> tuple[int, bool, int, int]:
            is_last = self._history.abandoned_by(_point(held)) is None
            return (_point(held).iteration, is_last, held.save_id.ordinal, held.save_id.run_id)

        found = sorted(self._held.values(), key=order)
        return [
            (held.name, held.save_id)
            for held in reversed(found)
            if self._wanted in (None, _point(held).iteration)
        ]

    def reason_to_leave(self, save_id: SaveId) -> str | None:
        """Returns why a checkpoint is skipped, empty if no line of the log is due; None if it is brought."""
        point, tracked = _point(self._held[save_id]), self._far.point
        if self._wanted is not None:
            return None
        is_newer = point.iteration > (self._far.tracked or 0)
        left_both: Sequence[Job] = ()  # a job that has abandoned both is no reason to prefer the tracked one
        if tracked is not None and point.follows(tracked):
            left_both = self._history.jobs_that_abandoned(tracked, surely=True)
        later = next((job for job in self._history.jobs_that_abandoned(point) if job not in left_both), None)
        if later is not None:
            return f"a later job continued from iteration {later.origin} without it" if is_newer else ""
        is_unknown = tracked is not None and point.ancestors is None and tracked.ancestors is None
        if is_newer and (tracked is None or is_unknown or point.follows(tracked)):
            back = next((one for one in self._far.set_back if one == point or point.follows(one)), None)
            if back is not None:
                name = "release" if self._far.tracked is None else self._far.tracked
                return f"the tracker was set back to {name} after it had named {back.iteration}"
            return None
        # Even if a list of jobs, which may have been written late, says otherwise.
        if tracked is None or tracked.follows(point):
            return ""
        if self._history.comes_later(point, tracked):
            return None
        if not is_newer:
            return ""
        return f"it does not follow iteration {tracked.iteration}, which the tracker in {self._run} names"

    def why(self, save_id: SaveId) -> str:
        """Returns, for people, why a checkpoint is brought there."""
        point, tracked = _point(self._held[save_id]), self._far.tracked
        if self._wanted is not None:
            return f"not in {self._run}"
        if tracked is not None and point.iteration <= tracked:
            return f"of a later job than iteration {tracked} in {self._run}, which was rolled back"
        there = "nothing" if tracked is None else f"iteration {tracked}"
        return f"newer than what is in {self._run} ({there})"

    def warning(self, brought: SaveId | None = None) -> str:
        """Returns what to say if a later job has left what is resumed from: what was brought, or tracked."""
        point = self._far.point if brought is None else _point(self._held[brought])
        if point is None or point.save_id is None or self._wanted is not None:
            return ""
        later = self._history.abandoned_by(point, surely=True)
        if later is None:
            return ""
        advice = f": --ckpt-step {later.origin} begins there again" if later.origin else ""
        return (
            f"datastates: this job resumes from iteration {point.iteration} in {self._run}, although a later "
            f"job continued from iteration {later.origin} without it: no checkpoint of that later job can "
            f"be loaded{advice}"
        )


def _point(held: Held) -> Point:
    assert held.point is not None
    return held.point
