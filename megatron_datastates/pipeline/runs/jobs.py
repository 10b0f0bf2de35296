"""Which jobs have saved a run, in their order: of two branches, the later one is resumed from.

A run that is rolled back (--ckpt-step) abandons what near tiers hold of later iterations. A node that was
absent meanwhile still has its part, and brings it back. Manifests say which checkpoint follows which
(pipeline/runs/branches.py). Where neither of two follows the other, this list says whose job came later:

    RUN/datastates.jobs, and the same in the run's folder in a near tier:
    `datastates-jobs <lines> <crc32 of the lines>`, then a line for each job, `RUN_ID ITERATION [SAVE_ID]`:
    what it resumed from (0: it began anew), with its save id if that is known. The job that has saved last,
    or begun to, is the last one. This is version 1; a later one begins with `datastates-jobs/VERSION`, and
    the rest of its first line, and what that means, stay.

Lists name a job from the beginning of its first save on: one that was killed in it came later too. Each
published save makes sure of it, because two jobs may run at one time.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import FormatError, UnsupportedFormatError
from megatron_datastates.files import DOCUMENT_BYTES, is_object, read_regular
from megatron_datastates.format.values import SaveId

JOBS_NAME = "datastates.jobs"
_FIRST = re.compile(rb"datastates-jobs(/[0-9]{1,9})? ([0-9]{1,9}) ([0-9a-f]{8})", re.ASCII)
_LINE = re.compile(rb"([0-9a-f]{16}) ([0-9]{1,18})(?: ([0-9a-f-]{1,64}))?", re.ASCII)
MOST_JOBS = 100  # jobs that are kept, the latest ones: all ranks gather them


class Job(NamedTuple):
    """One job that has saved a run."""

    run_id: int
    origin: int  # iteration that it resumed from
    resumed: SaveId | None = None  # the save there; None if it is not known, or in another format


def jobs_in(folder: Path) -> list[Job]:
    """Returns the jobs that a folder's list names, in their order; none if there is no list.

    Raises:
        FormatError: the list is damaged.
        UnsupportedFormatError: a later release wrote it.
        OSError: it cannot be read.
    """
    try:
        data = read_regular(folder / JOBS_NAME, DOCUMENT_BYTES)
    except FileNotFoundError:
        return []
    head, _, body = data.partition(b"\n")
    first, lines = _FIRST.fullmatch(head), body.splitlines()
    found = [match for line in lines if (match := _LINE.fullmatch(line))]
    is_whole = first is not None and int(first[3], 16) == zlib.crc32(body) and int(first[2]) == len(lines)
    if first is not None and first[1] and is_whole:
        raise UnsupportedFormatError(
            f"{folder / JOBS_NAME} was written by a later release of megatron_datastates: update this "
            "installation, and keep that file"
        )
    if not is_whole or len(found) != len(lines):
        raise FormatError(f"{folder / JOBS_NAME} is damaged: remove it, and the next save writes another one")
    return [Job(int(one[1], 16), int(one[2]), SaveId.parse((one[3] or b"").decode())) for one in found]


def note_job(
    folder: Path, save_id: SaveId, origin: int, known: Sequence[Job] = (), resumed: SaveId | None = None
) -> Job | None:
    """Makes a job the last one of a folder's list.

    Args:
        save_id: of one of its saves.
        origin: iteration that it resumed from.
        known: jobs of the run in their order. Those that the list does not name came before this one.
        resumed: the save that it resumed from, if that is known.

    Returns:
        The job that was the last one, if this one was noted before it: both are saving.

    Raises:
        FormatError, UnsupportedFormatError, OSError: as `jobs_in`, or the list cannot be written.
    """
    jobs = jobs_in(folder)
    own = next((job for job in jobs if job.run_id == save_id.run_id), None)
    between = jobs[-1] if own is not None and own != jobs[-1] else None
    others = [job for job in jobs if job != own]
    merged = _merged(others, [job for job in known if job.run_id != save_id.run_id])
    if own is None or (own.resumed is None and resumed is not None):
        own = Job(save_id.run_id, origin, resumed)
    if [*merged, own] == jobs:
        return None
    lines = [_line(job) for job in [*merged, own]][-MOST_JOBS:]
    body = b"".join(lines)
    if not is_object(folder):
        folder.mkdir(parents=True, exist_ok=True)  # before the first checkpoint is there
    head = b"datastates-jobs %d %08x\n" % (len(lines), zlib.crc32(body))
    write_whole(folder / JOBS_NAME, head + body, Faults(""), save_id)
    return between


def _line(job: Job) -> bytes:
    text = f"{job.run_id:016x} {job.origin}" + (f" {job.resumed}" if job.resumed is not None else "")
    return text.encode() + b"\n"


def _merged(jobs: Sequence[Job], known: Sequence[Job]) -> list[Job]:
    """Returns jobs with the other known ones, each right after the one that precedes it among these."""
    merged, place = list(jobs), 0
    for job in known:
        places = [n for n, one in enumerate(merged) if one.run_id == job.run_id]
        if not places:
            merged.insert(place, job)
        place = (places[0] if places else place) + 1
    return merged
