"""Which jobs have saved a run, in their order: of two branches, near tiers bring home the later one.

A run that is rolled back (--ckpt-step) passes by what near tiers hold of later iterations. A node that was
away meanwhile still has its part, and brings it back. Manifests say which checkpoint follows which
(pipeline/branches.py). Where neither of two follows the other, this list says whose job came later:

    RUN/datastates.jobs, and the same in the run's folder in a near tier:
    `datastates-jobs <lines> <crc32 of the lines>`, then a line for each job, `RUN_ID ITERATION`: what it
    went on from (0: it began anew). The job that has published last is the last one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import FormatError
from megatron_datastates.files import DOCUMENT_BYTES, is_object, read_regular
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.branches import Point

JOBS_NAME = "datastates.jobs"
_FIRST = re.compile(rb"datastates-jobs ([0-9]{1,9}) ([0-9a-f]{8})", re.ASCII)
_LINE = re.compile(rb"([0-9a-f]{16}) ([0-9]{1,18})", re.ASCII)
_MOST = 100  # jobs that are kept, the latest ones: all ranks gather them


class Job(NamedTuple):
    """One job that has saved a run."""

    run_id: int
    origin: int  # iteration that it went on from


def jobs_in(folder: Path) -> list[Job]:
    """Returns the jobs that a folder's list names, in their order; none if there is no list.

    Raises:
        FormatError: the list is damaged.
        OSError: it cannot be read.
    """
    try:
        data = read_regular(folder / JOBS_NAME, DOCUMENT_BYTES)
    except FileNotFoundError:
        return []
    head, _, body = data.partition(b"\n")
    first, lines = _FIRST.fullmatch(head), body.splitlines()
    found = [match for line in lines if (match := _LINE.fullmatch(line))]
    is_whole = first is not None and int(first[2], 16) == zlib.crc32(body) and int(first[1]) == len(lines)
    if not is_whole or len(found) != len(lines):
        raise FormatError(f"{folder / JOBS_NAME} is damaged: remove it, and the next save writes another one")
    return [Job(int(line[1], 16), int(line[2])) for line in found]


def is_last(folder: Path, save_id: SaveId) -> bool:
    """Returns whether the job of a save is the last one of a folder's list. Raises as `jobs_in`."""
    return [job.run_id for job in jobs_in(folder)][-1:] == [save_id.run_id]


def note_job(folder: Path, save_id: SaveId, origin: int, known: Sequence[Job] = ()) -> Job | None:
    """Makes a job the last one of a folder's list.

    Args:
        save_id: of a save that it has published.
        origin: iteration that it went on from.
        known: other jobs that came before, if the list does not name them.

    Returns:
        The job that was the last one, if this one was noted before it: both have saved since.

    Raises:
        FormatError, OSError: as `jobs_in`, or the list cannot be written.
    """
    jobs = jobs_in(folder)
    if jobs and jobs[-1].run_id == save_id.run_id:
        return None
    is_noted = any(job.run_id == save_id.run_id for job in jobs)
    between = jobs[-1] if is_noted else None
    named = {job.run_id for job in jobs} | {save_id.run_id}
    jobs = [job for job in known if job.run_id not in named] + [
        job for job in jobs if job.run_id != save_id.run_id
    ]
    lines = [b"%016x %d\n" % job for job in [*jobs, Job(save_id.run_id, origin)]][-_MOST:]
    body = b"".join(lines)
    if not is_object(folder):
        folder.mkdir(parents=True, exist_ok=True)  # before the first checkpoint is there
    head = b"datastates-jobs %d %08x\n" % (len(lines), zlib.crc32(body))
    write_whole(folder / JOBS_NAME, head + body, Faults(""), save_id)
    return between


def passed_by(point: Point, lists: Iterable[Sequence[Job]]) -> Job | None:
    """Returns a later job that went on from before a checkpoint of an earlier job.

    Args:
        lists: the first one that names the checkpoint's job counts. If none does, all named jobs are later
            ones, but for those that the checkpoint's job has resumed from.
    """
    if point.save_id is None:
        return None
    for job in _later_jobs(point.save_id.run_id, list(lists)):
        if job.origin < point.iteration and point.reached(job.run_id) is None:
            return job
    return None


def _later_jobs(run_id: int, lists: Sequence[Sequence[Job]]) -> list[Job]:
    earlier = {job.run_id for jobs in lists for job in jobs[: _place(run_id, jobs) or 0]}
    for jobs in lists:
        place = _place(run_id, jobs)
        if place is not None:
            return list(jobs[place + 1 :])
        if len(jobs) >= _MOST:  # it may have named the job once, or has never: an outage kept it near
            last = max((n for n, job in enumerate(jobs) if job.run_id in earlier), default=-1)
            if later := list(jobs[last + 1 :]):
                return later
    return [job for jobs in lists for job in jobs]


def comes_later(point: Point, other: Point, lists: Iterable[Sequence[Job]]) -> bool:
    """Returns whether the job of a checkpoint is known to be a later one than that of another checkpoint."""
    if point.save_id is None or other.save_id is None:
        return False
    for jobs in lists:
        places = _place(point.save_id.run_id, jobs), _place(other.save_id.run_id, jobs)
        if places[0] is not None and places[1] is not None:
            return places[0] > places[1]
    return point.reached(other.save_id.run_id) is not None


def _place(run_id: int, jobs: Sequence[Job]) -> int | None:
    return next((place for place, job in enumerate(jobs) if job.run_id == run_id), None)
