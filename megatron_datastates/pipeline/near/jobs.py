"""Which jobs have saved a run, in their order: of two branches, near tiers bring home the later one.

A run that is rolled back (--ckpt-step) passes by what near tiers hold of later iterations. A node that was
away meanwhile still has its part, and brings it back. Manifests say which checkpoint follows which
(pipeline/branches.py). Where neither of two follows the other, this list says whose job came later:

    RUN/datastates.jobs, and the same in the run's folder in a near tier:
    `datastates-jobs <lines> <crc32 of the lines>`, then a line for each job, `RUN_ID ITERATION`: what it
    went on from (0: it began anew). The job that has published last is the last one.

A node's list names a job before the node has its first checkpoint: a job that was killed there came later
too. The run's list follows once the save is published near.
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
    is_last = bool(jobs) and jobs[-1].run_id == save_id.run_id
    named = {job.run_id for job in jobs} | {save_id.run_id}
    unnamed = [job for job in known if job.run_id not in named]
    if is_last and not unnamed:
        return None
    is_noted = any(job.run_id == save_id.run_id for job in jobs)
    between = jobs[-1] if is_noted and not is_last else None
    jobs = unnamed + [job for job in jobs if job.run_id != save_id.run_id]
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
        lists: of two jobs, the first list that names both says which is the later one. If none names the
            checkpoint's job, all jobs are later ones, but for those that it has resumed from.
    """
    if point.save_id is None:
        return None
    for job in _later_jobs(point.save_id.run_id, list(lists)):
        if job.origin < point.iteration and point.reached(job.run_id) is None:
            return job
    return None


def _later_jobs(run_id: int, lists: Sequence[Sequence[Job]]) -> list[Job]:
    known: dict[int, tuple[Job, bool]] = {}  # by run id: whether it is later, as the first list of both says
    for jobs in lists:
        place = _place(run_id, jobs)
        for n, job in enumerate(jobs if place is not None else ()):
            known.setdefault(job.run_id, (job, n > (place or 0)))
    if not known:
        return [job for jobs in lists for job in jobs]
    for jobs in lists:
        if _place(run_id, jobs) is None and len(jobs) >= _MOST:
            # It may have named the job once, or has never: an outage kept it near.
            earlier = (n for n, job in enumerate(jobs) if not known.get(job.run_id, (job, True))[1])
            for job in jobs[max(earlier, default=-1) + 1 :]:
                known.setdefault(job.run_id, (job, True))
    return [job for job, is_later in known.values() if is_later]


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
