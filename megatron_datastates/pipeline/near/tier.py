"""The near tier as saves use it: where each is written first, and what becomes of it once it is published.

Used by the trainer's thread only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_datastates.config import Options
from megatron_datastates.engine.faults import Faults
from megatron_datastates.engine.memory import is_first_of_node, local_ranks
from megatron_datastates.errors import DataStatesError, printable
from megatron_datastates.files import is_object
from megatron_datastates.format.directory import TRACKER_NAME, iteration_in_name, iteration_name
from megatron_datastates.pipeline.near.drain import Drain
from megatron_datastates.pipeline.near.job_notes import JobNote
from megatron_datastates.pipeline.near.near_save import NearSave
from megatron_datastates.pipeline.near.places import (
    SPARE_BYTES,
    free_bytes,
    near_root,
    near_run,
    node_of,
    occupied_bytes,
    warn_if_shared,
)
from megatron_datastates.pipeline.near.publishing import NearPlace
from megatron_datastates.pipeline.near.removal import remove_earlier
from megatron_datastates.pipeline.near.replicas import Copied, Replicas, host_name
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.runs.branches import Origin
from megatron_datastates.pipeline.runs.runs import is_complete
from megatron_datastates.pipeline.runs.tracker import read_tracked, tracked_iteration
from megatron_datastates.pipeline.saving.background import Answers
from megatron_datastates.pipeline.saving.milestones import SaveContext
from megatron_datastates.units import milliseconds

logger = logging.getLogger(__name__)
_PATIENCE_SECONDS = 5.0  # for --save, once


class NearTier:
    """The near tier of this rank's node."""

    def __init__(
        self,
        options: Options,
        faults: Faults,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self.root = near_root(options.near)
        self._options = options
        self._report = report
        self._node = 0
        self._ranks = local_ranks()  # of the node, as far as known
        self._folders: dict[Path, Path] = {}  # of runs in the near tier, by their directories
        self._storage = Answers()  # that of --save
        self._failure = ""  # of the last save, if it was in the near tier
        self._is_warned = False
        self._is_ahead = False  # of what the tracker in --save names, as every later save is then
        self._published = 0  # saves, in near tiers
        self._run_id = 0  # of the saves that this is said of: a restart within the process is another job
        self._begun: list[tuple[Publication, Path, int]] = []  # with the bytes of all ranks of the node
        self.replicas = Replicas(options, faults) if options.near_replicas else None
        self.drain = Drain(options, faults, report)

    def choose(self, publication: Publication, wanted_bytes: int) -> Path | None:
        """Returns where a save's file is written first; None if the near tier has no room, or is not there.

        Args:
            wanted_bytes: of this rank's data files.

        Raises:
            DataStatesError: likewise, for a checkpoint in an object store, which is reached from here alone.
        """
        context = publication.save.context
        is_first = context.save_id.run_id != self._run_id
        if is_first:
            self._run_id, self._is_ahead, self._published = context.save_id.run_id, False, 0
        try:
            return self._choose(publication, wanted_bytes)
        finally:
            if is_first:
                # While the first save is written: a job that is killed in it came later than others, too.
                # After what is said above, which may be why a list cannot be written.
                origin = publication.publisher.extras.origin
                self._note_job(context, origin, context.rank == 0, is_first_of_node())

    def _choose(self, publication: Publication, wanted_bytes: int) -> Path | None:
        directory = publication.save.context.directory
        try:
            if "$" in os.fspath(self.root):  # else it would be made in the working directory
                raise OSError(errno.ENOENT, "a variable in its name is not set on this node")
            self.root.mkdir(0o700, parents=True, exist_ok=True)  # weights may be private
            if not self._node:
                self._node = node_of(self.root)
                if is_first_of_node():
                    warn_if_shared(self.root)
            place = NearPlace(self._node, host_name())
            publication.publisher.place = place
            if self._is_rolled_back(directory):
                return None
            folder = self._run_folder(directory) / directory.name
            lack = self._lack_of_room(publication.save.context, folder, wanted_bytes)
            if not lack and self._failure and not is_object(directory):
                lack = f"a save there has failed ({self._failure})"
                self._failure = ""  # the next one tries again
            if not lack:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._fall_back(directory, f"it cannot be used: {error.strerror}")
            return None
        if lack:
            self._fall_back(directory, lack)
            return None
        self._is_warned = False
        self._begun.append((publication, folder, wanted_bytes * self._ranks))
        if self.replicas is not None:
            endpoint = self.replicas.offer(publication.save.context.save_id, folder)
            publication.publisher.place = place._replace(endpoint=endpoint, replicas=self.replicas)
        return folder

    def _run_folder(self, checkpoint: Path) -> Path:
        """Returns the folder of a checkpoint's run in the near tier.

        Links in the path are followed once for all saves: while --save is away, they lead nowhere. While it
        hangs, they count as they were when the job started: ranks of a node, and the next job's load, have to
        find the same folder.
        """
        run = checkpoint.absolute().parent
        if run not in self._folders:
            try:
                found = self._storage.get(lambda: near_run(self.root, run), _PATIENCE_SECONDS)
            except TimeoutError:
                return near_run(self.root, run, follows_links=False)
            self._folders[run] = found
        return self._folders[run]

    def _lack_of_room(self, context: SaveContext, folder: Path, wanted_bytes: int) -> str:
        """Returns why a save does not fit; empty if it does. Raises OSError.

        If need be, removes what earlier jobs have left, as far as loads have no use for it: --save has that
        iteration, or a later one.
        """
        wanted = wanted_bytes * self._ranks + SPARE_BYTES

        def free() -> int:
            # What other ranks of the node have taken for this save already is part of what is wanted.
            own = occupied_bytes(folder, context.save_id)
            return max(free_bytes(self.root) - self._unwritten_bytes() + own, 0)

        if free() < wanted:
            run, held = context.directory.parent, None
            with contextlib.suppress(TimeoutError):
                held = self._storage.get(lambda: _complete_iteration(run), _PATIENCE_SECONDS)
            if held:
                remove_earlier(folder.parent, held, context.save_id.run_id)
        found = free()
        if found >= wanted:
            return ""
        return f"{found >> 20} MiB are free, {wanted >> 20} MiB are needed for {self._ranks} ranks"

    def _unwritten_bytes(self) -> int:
        """Returns how many bytes saves under way have yet to write, or to reserve in files yet to open."""
        self._begun = [one for one in self._begun if _is_unwritten(one[0])]
        return sum(
            max(size - occupied_bytes(folder, publication.save.context.save_id), 0)
            for publication, folder, size in self._begun
        )

    def _is_rolled_back(self, checkpoint: Path) -> bool:
        """Returns whether the tracker in --save names this iteration or a later one: the run was rolled back.

        A load would prefer that checkpoint to a near one, so saves go to --save until one has replaced it. An
        object store is reached through the near tier alone: there the tracker follows with the next drain. So
        it does if --save does not answer now, or with an error; then the next save asks again.
        """
        iteration = iteration_in_name(checkpoint.name)
        if is_object(checkpoint) or self._is_ahead or iteration is None:
            return False
        tracker = checkpoint.parent / TRACKER_NAME
        try:
            tracked = self._storage.get(lambda: read_tracked(tracker), _PATIENCE_SECONDS)
        except OSError:  # or no answer in time
            return False
        self._is_ahead = tracked is None or tracked < iteration
        return not self._is_ahead

    def _fall_back(self, directory: Path, reason: str) -> None:
        if is_object(directory):
            raise DataStatesError(
                f"the near tier {self.root} cannot hold the save to {directory}, and saves reach an object "
                f"store only through it: {reason}"
            )
        if not self._is_warned:
            logger.warning(
                "the near tier %s is not used, and saves go directly to --save: %s", self.root, reason
            )
        self._is_warned = True

    def on_end(self, publication: Publication) -> None:
        """Notes a save that is over."""
        context, publisher = publication.save.context, publication.publisher
        near = publisher.near
        if self.replicas is not None:
            self.replicas.withdraw(context.save_id)
        is_first = publication.collectives.rank == 0
        if publication.outcome is not Outcome.PUBLISHED:
            failure = publication.save.failure if context.near is not None else None
            self._failure = "" if failure is None else printable(str(failure))
            if context.near is not None and near is not None and near.stores:
                self.drain.note_failed(context.near, context.save_id, near.storing.withdraw)
            return
        self._note_job(context, publisher.extras.origin, is_first, near is not None and near.stores)
        if near is None:
            self.drain.note_published(is_far=True)
            return
        near.note_published()
        if is_first and (near.copied is not None or publication.ranks_without_copies):
            self._report(_report_of(publication, near.copied or Copied(time.time(), [])))
        self._published += 1
        self._ranks = max(int((publication.records.columns["node"] == self._node).sum()), 1)
        if near.small_files is None or not (near.stores or is_first):
            self.drain.note_published(is_far=False)
            return
        assert publisher.far_published is not None  # or the save would not be near
        every = self._options.drain_every
        self.drain.add(
            NearSave(
                save_id=context.save_id,
                iteration=context.iteration,
                far=context.directory,
                near=context.near if near.stores else None,
                files=near.files,
                small_files=near.small_files,
                others=near.others,
                publisher=publisher.in_directory(near.small_files) if is_first else None,
                publishing=publisher.layouts.publishing,
                is_drained=near.needs_drain or publication.is_kept or self._published % every == 0,
                has_copies=self.replicas is not None and not publication.ranks_without_copies,
                published=publisher.far_published,
            )
        )

    def _note_job(self, context: SaveContext, origin: Origin | None, is_first: bool, stores: bool) -> None:
        """Notes in the lists of jobs that this one is the last that saves.

        Args:
            is_first, stores: whether this is rank 0, and whether it writes its node's list.
        """
        iteration = iteration_in_name(context.directory.name)
        if iteration is None:
            return
        run, near = context.directory.parent, self._run_folder(context.directory)
        is_usable = "$" not in os.fspath(self.root)  # see `_choose`
        folders = [*([run] if is_first else []), *([near] if stores and is_usable else [])]
        # Without an origin, all that is older may be what it resumed from.
        begun = origin.iteration if origin is not None else max(iteration - 1, 0)
        resumed = origin.resumed if origin is not None else None
        self.drain.note_job(JobNote(run, context.save_id, begun, resumed), folders)

    def close(self) -> None:
        """Drains what is left, unless the program ends with an error: then the next job does it."""
        # In an interactive session, the last error may be a slip of hours ago.
        has_failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
        self.drain.close(abandon=has_failed)
        if self.replicas is not None:
            self.replicas.close()


def _complete_iteration(run: Path) -> int | None:
    """Returns the iteration that a run's tracker names, if that is complete there."""
    tracked = tracked_iteration(run / TRACKER_NAME)
    return tracked if tracked and is_complete(run / iteration_name(tracked)) else None


def _is_unwritten(publication: Publication) -> bool:
    save = publication.save
    return publication.is_under_way and save.failure is None and not save.is_durable


def _report_of(publication: Publication, copied: Copied) -> dict[str, Any]:
    """Returns the report of the copies that this rank has made; docs/reports.md lists the fields."""
    context, incomplete = publication.save.context, publication.ranks_without_copies
    error = copied.error
    if incomplete and not error:
        error = f"{incomplete} of {context.world_size} ranks have left copies out: see their logs"
    return {
        "event": "copies",
        "save_id": str(context.save_id),
        "directory": str(context.directory),
        "iteration": context.iteration,
        "rank": context.rank,
        "state": "incomplete" if error else "made",
        "error": error or None,
        "incomplete_ranks": incomplete,
        "started_at": round(copied.started_at, 3),
        "copying_ms": milliseconds(copied.seconds),
        "partners": copied.origins,
        "files": copied.files,
        "bytes": copied.bytes,
    }
