"""Which jobs have saved a run, in their order: so a checkpoint that a later job has abandoned is known.

A run that is rolled back (--ckpt-step) abandons what near tiers hold of later iterations. The job removes
that on its own nodes (places.py). A node that was away meanwhile still has its part, and brings it back.

    RUN/datastates.jobs, and the same in the run's folder in a near tier: a line for each job,
    `RUN_ID ITERATION`: the iteration of the first save that it published, after all that the lines before say
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import FormatError
from megatron_datastates.files import DOCUMENT_BYTES, is_object, read_regular
from megatron_datastates.format.values import SaveId

JOBS_NAME = "datastates.jobs"
_LINE = re.compile(rb"([0-9a-f]{16}) ([0-9]{1,18})", re.ASCII)
_MOST = 100  # lines that are kept: all ranks gather them


class Job(NamedTuple):
    """One job that has saved a run."""

    run_id: int
    first: int  # iteration


def jobs_in(folder: Path) -> list[Job]:
    """Returns the jobs that a folder's list names, in their order; none if there is no list.

    Raises:
        FormatError: the list is damaged.
        OSError: it cannot be read.
    """
    try:
        lines = read_regular(folder / JOBS_NAME, DOCUMENT_BYTES).splitlines()
    except FileNotFoundError:
        return []
    found = [_LINE.fullmatch(line) for line in lines]
    if None in found:
        raise FormatError(
            f"{folder / JOBS_NAME} is damaged: expected lines of a run id and an iteration; correct it, or "
            "remove it"
        )
    return [Job(int(line[1], 16), int(line[2])) for line in found if line is not None]


def note_job(folder: Path, save_id: SaveId, iteration: int) -> None:
    """Adds a job to a folder's list, unless it is there.

    Args:
        save_id, iteration: of the first save that it published.

    Raises:
        FormatError, OSError: as `jobs_in`, or the list cannot be written.
    """
    jobs = jobs_in(folder)
    if any(job.run_id == save_id.run_id for job in jobs):
        return
    if not is_object(folder):
        folder.mkdir(parents=True, exist_ok=True)  # before the first checkpoint is there
    lines = [f"{job.run_id:016x} {job.first}\n" for job in [*jobs, Job(save_id.run_id, iteration)]]
    write_whole(folder / JOBS_NAME, "".join(lines[-_MOST:]).encode(), Faults(""), save_id)


def abandoned_by(run_id: int, iteration: int, lists: Iterable[Sequence[Job]]) -> Job | None:
    """Returns a job that went on from an earlier iteration than one that an earlier job has saved.

    A list that does not name the earlier job says nothing of the two.

    Args:
        run_id, iteration: of the checkpoint in question.
    """
    for jobs in lists:
        place = next((place for place, job in enumerate(jobs) if job.run_id == run_id), len(jobs))
        for job in jobs[place + 1 :]:
            if job.first <= iteration:
                return job
    return None
