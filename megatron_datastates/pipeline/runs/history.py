"""Which of a run's checkpoints later jobs have abandoned, according to manifests and lists of jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.runs.branches import Point, known_point, point_in
from megatron_datastates.pipeline.runs.jobs import MOST_JOBS, Job, jobs_in
from megatron_datastates.pipeline.runs.tracker import tracked_iteration

K = TypeVar("K")
_FIRST_READ = 16  # manifests


class _Chain(NamedTuple):
    """What a job resumed from, as far as that is known."""

    reached: dict[int, int]  # by run id of each job before it: the ordinal of the save that was resumed from
    is_whole: bool  # no other job came before it


class History:
    """What is known of the jobs that have saved a run.

    Args:
        lists: lists of jobs, the run's own first; of two that name the same two jobs, the first one says
            which came later.
        points: of checkpoints whose manifests are known.
    """

    def __init__(self, lists: Iterable[Sequence[Job]], points: Iterable[Point] = ()) -> None:
        self._lists = [list(jobs) for jobs in lists if jobs]
        self._points = {
            point.save_id.run_id: point
            for point in points
            if point.save_id is not None and point.ancestors is not None
        }
        found = [Job(run_id, point.origin, point.resumed) for run_id, point in self._points.items()]
        self._chains: dict[int, _Chain] = {}
        self._jobs: dict[int, Job] = {}
        for job in [*found, *(job for jobs in self._lists for job in jobs)]:
            known = self._jobs.get(job.run_id)
            if known is None or (known.resumed is None and job.resumed is not None):
                self._jobs[job.run_id] = job

    def abandoned_by(self, point: Point, *, surely: bool = False) -> Job | None:
        """Returns the first of the jobs that abandoned a checkpoint; None if there is none."""
        return next(iter(self.jobs_that_abandoned(point, surely=surely)), None)

    def jobs_that_abandoned(self, point: Point, *, surely: bool = False) -> list[Job]:
        """Returns later jobs that went on without a checkpoint of an earlier job.

        Args:
            surely: only a job that is known to be later counts. Else, of a checkpoint whose job no list
                names, all jobs of lists are later ones, but for those that it has resumed from.
        """
        if point.save_id is None:
            return []
        left, kept = [], []
        run_id = point.save_id.run_id
        for job in self._later_jobs(run_id, surely):
            # It resumed from that job, unless both have saved since then.
            is_before = job.run_id in point.reached and not self._listed_later(job.run_id, run_id)
            has = True if is_before else self._has(job, point, point.save_id)
            if has:
                kept.append(job)
            elif has is False or job.origin < point.iteration:  # if not known by save ids
                left.append(job)
        # A job that went back to the checkpoint after it was left has made its branch the present one.
        return [job for job in left if not any(self._listed_later(one.run_id, job.run_id) for one in kept)]

    def comes_later(self, point: Point, other: Point) -> bool:
        """Returns whether the job of a checkpoint is known to be a later one than that of another."""
        if point.save_id is None or other.save_id is None:
            return False
        is_later = self._listed_later(point.save_id.run_id, other.save_id.run_id)
        return other.save_id.run_id in point.reached if is_later is None else is_later

    def _listed_later(self, run_id: int, other: int) -> bool | None:
        """Returns what the first list says that names both; None if there is none."""
        for jobs in self._lists:
            places = _place(run_id, jobs), _place(other, jobs)
            if places[0] is not None and places[1] is not None:
                return places[0] > places[1]
        return None

    def _has(self, job: Job, point: Point, save_id: SaveId) -> bool | None:
        """Returns whether what a job resumed from is a checkpoint, or follows it; None: it is not known."""
        chain = self._chain(job.run_id)
        ordinal = chain.reached.get(save_id.run_id)
        if ordinal is not None:
            return ordinal >= save_id.ordinal
        return False if chain.is_whole and point.ancestors is not None else None

    def _chain(self, run_id: int) -> _Chain:
        if run_id not in self._chains:
            self._chains[run_id] = self._follow(run_id)
        return self._chains[run_id]

    def _follow(self, run_id: int) -> _Chain:
        reached: dict[int, int] = {}
        seen = set[int]()
        while run_id not in seen:
            seen.add(run_id)
            point, job = self._points.get(run_id), self._jobs.get(run_id)
            if point is not None and point.ancestors is not None:
                ids = [SaveId.parse(ancestor.save_id) for ancestor in point.ancestors]
                found = {one.run_id: one.ordinal for one in ids if one is not None}
                return _Chain(found | reached, point.knows_its_ancestors)
            if job is None or job.resumed is None:
                return _Chain(reached, job is not None and job.origin == 0)
            reached.setdefault(job.resumed.run_id, job.resumed.ordinal)
            run_id = job.resumed.run_id
        return _Chain(reached, False)

    def _later_jobs(self, run_id: int, surely: bool) -> list[Job]:
        known: dict[int, bool] = {}  # by run id: whether it is later, as the first list of both says
        for jobs in self._lists:
            place = _place(run_id, jobs)
            for n, job in enumerate(jobs if place is not None else ()):
                known.setdefault(job.run_id, n > (place or 0))
        if not known and not surely:
            known |= {job.run_id: True for jobs in self._lists for job in jobs}
        for one in self._jobs:
            if run_id in self._chain(one).reached:  # no list names both
                known.setdefault(one, True)
        for number, jobs in enumerate([] if surely else self._lists):
            if _place(run_id, jobs) is None and len(jobs) >= MOST_JOBS:
                # It may have named the job once, or has never: an outage kept it near.
                earlier = [n for n, job in enumerate(jobs) if not known.get(job.run_id, True)]
                if number > 0 and not earlier:
                    continue  # of a node that was away for as many jobs: all of them may have been before
                for job in jobs[max(earlier, default=-1) + 1 :]:
                    known.setdefault(job.run_id, True)
        return [self._jobs[one] for one, is_later in known.items() if is_later]


def by_branch(
    run: Path, directories: Mapping[int, Path], most: int = 1, last: Point | None = None
) -> list[int]:
    """Returns iterations, newest first; those of branches that were left come after all others.

    Before them come those whose optimizer's state was removed: no job resumes from them.
    Reads that of the tracked checkpoint first. If it names all that its job and those before it resumed from,
    a few others suffice, read at a time until enough are found: they are large where a run has many ranks.
    Otherwise all are read. Of two branches that leave one checkpoint, that of the tracked checkpoint is the
    present one, unless a later job has left it. Where none of this decides, a checkpoint was not left.

    Args:
        directories: of complete checkpoints.
        most: how many are wanted.
        last: a checkpoint that all were saved before; what it does not follow was left.
    """
    numbers, points = sorted(directories, reverse=True), dict[int, Point | None]()
    lists, kept, weights_only = list[Sequence[Job]](), list[int](), list[int]()
    tracked = tracked_iteration(run / TRACKER_NAME)
    present = None
    if tracked is not None and tracked in directories:
        present = known_point(directories[tracked], tracked)
    is_known = any(point is not None and point.knows_its_ancestors for point in (present, last))
    with contextlib.suppress(OSError, DataStatesError):  # then manifests alone say it
        lists.append(jobs_in(run))
    count = _FIRST_READ
    while len(points) < len(numbers) and not (is_known and len(kept) >= most):
        some = numbers[len(points) : len(points) + count]
        count *= 2  # each time, all that were read are judged again
        points |= {number: known_point(directories[number], number) for number in some}
        kept, weights_only = [], []
        for number in _kept(points, lists, present, last):
            point = points[number]
            has_optimizer = point is None or not point.is_without_optimizer
            (kept if has_optimizer else weights_only).append(number)
    return list(dict.fromkeys([*kept, *weights_only, *numbers]))[:most]


def abandoned_among(run: Path, points: Mapping[K, Point], tracked: K | None) -> set[K]:
    """Returns which checkpoints of a run are known to be of branches that were left.

    None that another one follows which is not known to be of such a branch.

    Args:
        points: of all its checkpoints, by any names.
        tracked: the name of the one that the tracker names.
    """
    lists = list[Sequence[Job]]()
    with contextlib.suppress(OSError, DataStatesError):  # then manifests alone say it
        lists.append(jobs_in(run))
    present = None if tracked is None else points.get(tracked)
    kept = _kept(points, lists, present, None)
    left = points.keys() - kept
    return {name for name in left if not any(points[other].follows(points[name]) for other in kept)}


def _kept(
    points: Mapping[K, Point | None], lists: list[Sequence[Job]], present: Point | None, last: Point | None
) -> list[K]:
    history = History(lists, filter(None, [*points.values(), present]))
    # A tracker that names what was left does not name yet what was published since then.
    current = None if present is None or history.abandoned_by(present, surely=True) else present
    return [name for name, point in points.items() if not _is_left(point, history, last, current)]


def has_later_save(directory: Path, save_id: SaveId) -> bool:
    """Returns whether a directory of a run holds a later save than this one, which is of the same run.

    Later is a save that has passed through it, or of a job that the run's list names later. Damaged manifests
    and lists are ignored.

    Raises:
        OSError: the manifest there, or the list, cannot be read.
    """
    point = point_in(directory, 0)
    if point is None or point.save_id is None:
        return False
    own, lists = Point(0, save_id, None), list[Sequence[Job]]()
    with contextlib.suppress(DataStatesError):
        lists.append(jobs_in(directory.parent))
    return point.follows(own) or History(lists, [point]).comes_later(point, own)


def _is_left(point: Point | None, history: History, last: Point | None, current: Point | None) -> bool:
    if point is None or point.save_id is None:
        return False
    if last is not None and last.knows_its_ancestors:
        return not last.follows(point)
    if current is not None and current.follows(point):
        return False  # a job that went back before it may have been an earlier one
    if history.abandoned_by(point, surely=True) is not None:
        return True
    return current is not None and point.is_apart_from(current)


def _place(run_id: int, jobs: Sequence[Job]) -> int | None:
    return next((place for place, job in enumerate(jobs) if job.run_id == run_id), None)
