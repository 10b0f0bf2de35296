"""What the lists of jobs still lack (pipeline/runs/jobs.py): that this job saves a run.

The trainer's thread adds notes, and the drain's thread writes them, because storage may be slow.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.runs.jobs import Job, jobs_in, note_job

logger = logging.getLogger(__name__)


class JobNote(NamedTuple):
    """That this job is the last that saves a run."""

    run: Path  # its directory
    save_id: SaveId  # of one of the job's saves
    origin: int  # iteration that the job resumed from
    resumed: SaveId | None  # the save there, if it is known


class JobNotes:
    """Notes that are still to be written, each to a folder of a run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Path, JobNote] = {}  # by folder
        self._has_new = False
        # Used by the drain's thread alone.
        self._is_warned = False  # that one could not be written
        self._complete_lists: set[Path] = set()  # lists of jobs that have what the run's list has

    @property
    def has_new(self) -> bool:
        """Returns whether there are notes that nobody has tried to write yet."""
        with self._lock:
            return self._has_new

    def add(self, note: JobNote, folders: Sequence[Path]) -> None:
        """Adds a note for these folders: the run's directory, and its folders in near tiers."""
        with self._lock:
            self._waiting.update(dict.fromkeys(folders, note))
            self._has_new = self._has_new or bool(folders)

    def write(self) -> None:
        """Writes the notes; what fails is tried again with the next call. Never raises."""
        with self._lock:
            notes, self._waiting, self._has_new = self._waiting, {}, False
        for folder, note in notes.items():
            try:
                self._write(folder, note)
            except Exception as error:
                with self._lock:
                    self._waiting.setdefault(folder, note)
                if not self._is_warned:
                    logger.warning(
                        "%s: the list of jobs there does not name this job yet (%s): after a rollback, a "
                        "node that was absent may bring back what was abandoned",
                        folder,
                        error,
                    )
                self._is_warned = True

    def _write(self, folder: Path, note: JobNote) -> None:
        known: Sequence[Job] = ()
        if folder != note.run and folder not in self._complete_lists:
            with contextlib.suppress(OSError, DataStatesError):
                known = jobs_in(note.run)
                self._complete_lists.add(folder)
        between = note_job(folder, note.save_id, note.origin, known, note.resumed)
        if between is not None and folder == note.run:
            logger.warning(
                "%s: another job (%016x) has begun to save this run since the last save of this one (%016x): "
                "if both are running, end one; a restart resumes from the one that has saved last",
                folder,
                between.run_id,
                note.save_id.run_id,
            )
