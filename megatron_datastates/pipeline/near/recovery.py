"""Before a load: the newest checkpoint that near tiers hold is brought to the directory of the run.

A job that was killed leaves checkpoints that were published near and are not far yet. The nodes of the next
job say what their near tiers hold. Of the newest checkpoint whose files are all somewhere (in a near tier,
or in its own directory), each node copies its files, and one rank publishes it. Then every rank loads as
ever, and reads what its own near tier has from there (pipeline/loading/data_files.py).

A file is known by its name, which has the save id, and by the checksum of its footer: files of other jobs
never mix in. Only what follows the checkpoint that the tracker names is brought there (branches.py), or what
a later job has saved that was rolled back (pipeline/runs/jobs.py). No clocks are compared, but for a tracker
that was set back by hand (holdings.py).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from megatron_datastates.config import Options
from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.engine.memory import is_first_of_node
from megatron_datastates.errors import DataStatesError, OptionError, StorageError, some_of
from megatron_datastates.format.directory import (
    FILES_OF_TORCH_DIST,
    TRACKER_NAME,
    iteration_in_name,
)
from megatron_datastates.format.manifest import FileEntry, Manifest
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.near.choice import Choice
from megatron_datastates.pipeline.near.copying import Copier, Limit, SourceError, is_unread, why_not_whole
from megatron_datastates.pipeline.near.holdings import (
    Far,
    Held,
    Node,
    far_in,
    held_in,
    metadata_of,
    named_jobs,
    require_readable_tracked,
    small_files_of,
)
from megatron_datastates.pipeline.near.places import (
    manifest_in,
    near_root,
    near_run,
    node_of,
    published_in,
    warn_if_shared,
)
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.publishing.directory_publisher import DirectoryPublisher, SmallFiles
from megatron_datastates.pipeline.publishing.lateness import Lateness
from megatron_datastates.pipeline.runs.jobs import Job
from megatron_datastates.threads import ThreadPool

logger = logging.getLogger(__name__)
T = TypeVar("T")
_COPIES = 4  # files at a time
_LOOKS = 16  # at files, at a time
_POLL_SECONDS = 0.05
_NAMED = 3  # files in a message
_LATE_PART = 100  # of the ranks, one in so many is late if all others are done
_Damaged = dict[tuple[int, str], str]  # by rank whose near tier has it, and data file: what is wrong with it


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What the rank that publishes a checkpoint has decided."""

    manifest: Manifest
    copies: dict[int, list[FileEntry]] = dataclasses.field(default_factory=dict)  # by rank
    lost: list[str] = dataclasses.field(default_factory=list)  # data files that are nowhere


def recover_newest(
    run: Path, options: Options, notify: Callable[[str], None] = logger.info, *, wanted: int | None = None
) -> int | None:
    """Publishes in `run` the newest complete checkpoint of the near tiers, if it is newer than what is there.

    Collective: all ranks call it. Megatron's tracker in `run` names the checkpoint afterwards.

    Args:
        notify: gets a line on rank 0 for each checkpoint that was tried.
        wanted: an iteration that is to be loaded instead (--ckpt-step): it is published if it is not there,
            also of a branch that a later job has left, and the tracker stays as it is.

    Returns:
        Its iteration; None if there is none.

    Raises:
        StorageError: `run` cannot be read, or the checkpoint cannot be written there. On all ranks.
    """
    recovery = _Recovery(run, options, wanted)
    nodes = recovery.look()
    error = next((node.error for node in nodes if node.error), None)
    if error is not None:
        raise StorageError(error)
    if nodes[0].far.has_wanted:
        return None
    choice, brought = Choice(nodes, wanted, run), None
    for name, save_id in choice.candidates():
        reason = choice.reason_to_leave(save_id)
        if reason is not None:
            if recovery.rank == 0 and reason:
                is_other = published_in(run / name) not in (None, save_id)  # which --ckpt-step would load
                advice = (
                    "" if is_other else f". --ckpt-step {iteration_in_name(name)} loads it, if it is complete"
                )
                notify(f"datastates: {name} in a near tier is skipped: {reason}{advice}")
            continue
        outcome = recovery.bring(name, save_id, nodes)
        if recovery.rank == 0:
            why = choice.why(save_id)
            notify(f"datastates: iteration {iteration_in_name(name)} is {why}, and {outcome.text}")
        if outcome.is_far:
            brought = save_id
            break
    if recovery.rank == 0 and (warning := choice.warning(brought)):
        notify(warning)
    return None if brought is None else iteration_in_name(name)


@dataclasses.dataclass(frozen=True)
class _Outcome:
    is_far: bool
    text: str


class _Recovery:
    """What one rank does. Every method without an underscore is collective."""

    def __init__(self, run: Path, options: Options, wanted: int | None) -> None:
        self._run = run
        self._wanted = wanted
        self._root, self._refusal = Path(), ""  # for a node without the option
        try:
            self._root = near_root(options.near) if options.near else self._root
        except OptionError as error:  # of this node's environment: the other ranks have to know
            self._refusal = str(error)
        self._folder = near_run(self._root, run)
        self._faults = Faults(options.faults)
        # Without --datastates-drain-limit: no training needs the network, and the job waits for this.
        self._copier = Copier(options, self._faults, Limit(0))
        self._collectives = Collectives()
        self.rank = self._collectives.rank
        self._moved = 0  # grows with looks at files and copied bytes; threads may lose an addition

    def look(self) -> list[Node]:
        """Returns what each rank's node has; of the ranks of a node only the first one says it."""
        own = self._node()
        is_first = self._collectives.gather_values(own).index(own) == self.rank

        def of_error(error: Exception) -> Node:
            if isinstance(error, StorageError):
                return Node(error=str(error))
            return Node(error=f"rank {self.rank}: cannot find out what to resume from: {error!r}")

        seen = self._while_polling(lambda: self._look(own, is_first), of_error)
        return self._collectives.gather_values(seen)

    def _node(self) -> int:
        if self._root == Path():
            return 0
        if "$" in os.fspath(self._root):
            if self.rank == 0 or is_first_of_node():
                logger.warning(
                    "%s: a variable in this near tier's name is not set: nothing is resumed from there",
                    self._root,
                )
            return 0
        try:
            if self.rank == 0 or is_first_of_node():
                warn_if_shared(self._root)
            return node_of(self._root)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                logger.warning("%s in the near tier is left out: %s", self._folder, error)
            return 0

    def _look(self, node: int, is_first: bool) -> Node:
        """Returns what this rank sees."""
        if self._refusal:
            return Node(error=f"rank {self.rank}: {self._refusal}")
        require_readable_tracked(self._run)
        far = far_in(self._run, self._wanted) if self.rank == 0 else Far()
        if node == 0 or not is_first:
            return Node(node, far=far)
        return Node(node, self._held(), self._near_jobs(), far)

    def _held(self) -> tuple[Held, ...]:
        try:
            return tuple(held for one in sorted(self._folder.iterdir()) for held in held_in(one))
        except FileNotFoundError:
            return ()
        except OSError as error:
            logger.warning("%s in the near tier is left out: %s", self._folder, error)
            return ()

    def _near_jobs(self) -> tuple[Job, ...]:
        try:
            return named_jobs(self._folder)
        except OSError as error:
            logger.warning("which jobs have saved the run is not known from %s: %s", self._folder, error)
            return ()

    def bring(self, name: str, save_id: SaveId, nodes: Sequence[Node]) -> _Outcome:
        """Tries to make one checkpoint far. The same outcome on all ranks."""
        holders = {
            rank: held
            for rank, node in enumerate(nodes)
            for held in node.held
            if (held.name, held.save_id) == (name, save_id)
        }
        publisher = next(rank for rank, held in holders.items() if held.point is not None)
        try:
            plan, outcome = self._bring_files(name, holders, publisher)
            if outcome.is_far:
                self._together(lambda: self._publish(name, plan) if self.rank == publisher else None)
        except SourceError as error:
            return _Outcome(False, f"could not be copied there from the near tiers: {error}")
        return outcome

    def _bring_files(self, name: str, holders: Mapping[int, Held], publisher: int) -> tuple[_Plan, _Outcome]:
        """Copies all files that are missing; for a damaged one, another node's copy is taken."""
        damaged: _Damaged = {}
        copied = from_copies = 0
        while True:
            plans = self._together(functools.partial(self._plan, publisher, name, holders, damaged))
            plan = plans[publisher]
            assert plan is not None
            if plan.lost:
                return plan, _Outcome(False, _why_left(plan.lost, damaged))
            found = self._together(functools.partial(self._copy, name, plan))
            newly_damaged = {key: text for one in found for key, text in one.items()}
            taken = [(rank, file.name) for rank, files in plan.copies.items() for file in files]
            good = [(rank, file) for rank, file in taken if (rank, file) not in newly_damaged]
            copied += len(good)
            from_copies += sum(file in holders[rank].copies for rank, file in good)
            damaged |= newly_damaged
            if not newly_damaged:
                break
        tiers = f"{len(holders)} near tier{'s' * (len(holders) != 1)}"
        text = f"was copied there from {tiers}: {copied} files were missing"
        return plan, _Outcome(
            True, text + (f", {from_copies} of them taken from copies on other nodes" if from_copies else "")
        )

    def _while_polling(self, work: Callable[[], T], of_error: Callable[[Exception], T]) -> T:
        """Does all ranks' work, on threads while ranks poll: no collective call waits for a disk.

        Args:
            of_error: returns what the other ranks, which wait for this one, are to know of an error: the
                work's, or that its thread is lost.
        """
        with ThreadPool(1, "looks for a newer checkpoint") as thread:
            share = thread.submit(work)
            size, lateness = self._collectives.size, Lateness(self._run, self.rank)
            while (done := self._collectives.start_sum([int(share.done())]).result()[0]) < size:
                # Copies may take all ranks long. No watchdog ends the wait for one whose storage hangs.
                is_late = not share.done() and size - done <= max(size // _LATE_PART, 1)
                lateness.look(
                    self._moved if is_late else None,
                    "its look for a newer checkpoint, or its copy, stands still",
                )
                time.sleep(_POLL_SECONDS)
        try:
            return share.result()
        except Exception as error:
            return of_error(error)

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Does all ranks' work; returns what each rank's has returned.

        Raises:
            SourceError: of some rank: a near tier has lost something. On all ranks.
            StorageError: any other error of some rank: nothing is lost yet, so nothing older is loaded.
        """

        def of_error(error: Exception) -> tuple[str, bool, list[T]]:
            return f"rank {self.rank}: {error}", isinstance(error, SourceError), []

        own = self._while_polling(lambda: ("", False, [work()]), of_error)
        outcomes = self._collectives.gather_values(own)
        failed = [one for one in outcomes if one[0]]
        lost = [text for text, is_lost, _ in failed if is_lost]
        if lost:
            raise SourceError(lost[0])
        if failed:
            raise StorageError(
                f"a newer checkpoint in the near tiers could not be copied to {self._run}: {failed[0][0]}: "
                f"repair that, or leave out --datastates-near to load the checkpoint in {self._run}"
            )
        return [found for _, _, one in outcomes for found in one]

    def _plan(
        self, publisher: int, name: str, holders: Mapping[int, Held], damaged: _Damaged
    ) -> _Plan | None:
        if self.rank != publisher:
            return None
        manifest = manifest_in(self._folder / name)
        if manifest is None:
            raise SourceError(f"the manifest in {self._folder / name} cannot be read")
        plan = _Plan(manifest)
        held_by: dict[str, list[int]] = {}
        for rank, held in holders.items():
            for file_name in held.files:
                held_by.setdefault(file_name, []).append(rank)

        def look(file: FileEntry) -> DataStatesError | None:
            error = why_not_whole(self._run / name / file.name, manifest, file)
            self._note_moved(1)
            return error

        with ThreadPool(_LOOKS, "looks at data files") as threads:  # storage may answer late
            errors = threads.map(look, manifest.files)
        for file, error in zip(manifest.files, errors, strict=True):
            if error is None:
                continue
            have = [
                (file.name in holders[rank].copies, len(plan.copies.get(rank, [])), rank)
                for rank in held_by.get(file.name, [])
                if (rank, file.name) not in damaged
            ]
            if not have and is_unread(error):
                raise error  # it may be there: nothing older is loaded
            elif not have:
                plan.lost.append(file.name)
            else:  # from the node that wrote it, else from one with little to do
                plan.copies.setdefault(min(have)[2], []).append(file)
        return plan

    def _note_moved(self, count: int) -> None:
        self._moved += count

    def _copy(self, name: str, plan: _Plan) -> _Damaged:
        """Copies this rank's share; returns what was damaged."""
        near, far = self._folder / name, self._run / name

        def copy(file: FileEntry) -> _Damaged:
            try:
                self._copier.copy(near / file.name, far / file.name, plan.manifest, file, self._note_moved)
            except StorageError as error:  # of reading: see Copier.copy
                return {(self.rank, file.name): f"rank {self.rank}: {error}"}
            return {}

        with ThreadPool(_COPIES, "copies data files") as threads:
            found = threads.map(copy, plan.copies.get(self.rank, []))
        return {key: text for damaged in found for key, text in damaged.items()}

    def _publish(self, name: str, plan: _Plan) -> None:
        near, far, manifest = self._folder / name, self._run / name, plan.manifest
        try:
            index, others = small_files_of(near, manifest)
        except (OSError, DataStatesError) as error:
            raise SourceError(str(error)) from error
        far.mkdir(parents=True, exist_ok=True)
        for other, content in others.items():
            write_whole(far / other, content, self._faults, manifest.save_id)
        small = SmallFiles(manifest, index, metadata_of(near))
        DirectoryPublisher(far, manifest.save_id, small, self._faults, FILES_OF_TORCH_DIST).publish()
        if self._wanted is None:
            tracked = str(iteration_in_name(name)).encode()
            write_whole(self._run / TRACKER_NAME, tracked, self._faults, manifest.save_id)


def _why_left(lost: list[str], damaged: _Damaged) -> str:
    texts = [text for (_, name), text in damaged.items() if name in lost]
    if texts:
        return f"could not be copied there from the near tiers: {texts[0]}"
    return f"is skipped: no near tier has {some_of(lost, _NAMED)}, nor has its directory"
