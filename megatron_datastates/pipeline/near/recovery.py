"""Before a load: the newest checkpoint that near tiers hold is brought to the directory of the run.

A job that was killed leaves checkpoints that were published near and are not far yet. The nodes of the next
job say what their near tiers hold. Of the newest checkpoint whose files are all somewhere (in a near tier,
or in its own directory), each node copies its files, and one rank publishes it. Then every rank loads as
ever, and reads what its own near tier has from there (pipeline/load.py).

A file is known by its name, which has the save id, and by the checksum of its footer: files of other jobs
never mix in. Iterations are compared, not clocks.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from megatron_datastates.config import Options
from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.engine.reader import read_small
from megatron_datastates.errors import DataStatesError, FormatError, StorageError
from megatron_datastates.files import DOCUMENT_BYTES, INDEX_BYTES, OBJECT_BYTES
from megatron_datastates.format.directory import (
    FILES_OF_TORCH_DIST,
    METADATA_NAME,
    TRACKER_NAME,
    iteration_in_name,
    iteration_name,
)
from megatron_datastates.format.manifest import FileEntry, Manifest
from megatron_datastates.format.values import SaveId, is_data_file_name, save_id_in_name
from megatron_datastates.pipeline.agreement import Collectives, gather_objects
from megatron_datastates.pipeline.commit import Commit, SmallFiles
from megatron_datastates.pipeline.near.copying import Copier, Limit, SourceError, is_whole
from megatron_datastates.pipeline.near.jobs import JOBS_NAME, Job, abandoned_by, jobs_in
from megatron_datastates.pipeline.near.places import manifest_in, near_root, near_run, node_of, nodes_in
from megatron_datastates.pipeline.runs import find_iterations, is_complete, is_published, require_tracked

logger = logging.getLogger(__name__)
Shared = TypeVar("Shared")
_COPIES = 4  # files at a time
_POLL_SECONDS = 0.05
_NAMED = 3  # files in a message
_Damaged = dict[tuple[int, str], str]  # by rank whose near tier has it, and data file: what is wrong with it


@dataclasses.dataclass(frozen=True)
class _Held:
    """What one node's near tier holds of one checkpoint."""

    name: str  # of its directory
    save_id: SaveId
    has_manifest: bool
    files: frozenset[str]  # data files
    copies: frozenset[str] = frozenset()  # those of them that are copies of other nodes' (replicas.py)

    @property
    def iteration(self) -> int:
        return iteration_in_name(self.name) or 0


@dataclasses.dataclass(frozen=True)
class _Node:
    """What one rank says of its node."""

    node: int  # 0: it has no near tier
    held: tuple[_Held, ...]
    tracked: int | None  # iteration that would be resumed from, as this rank sees the run's directory
    error: str = ""  # why nobody knows that
    jobs: tuple[Job, ...] = ()  # that have saved the run, as its near tier's list says
    far_jobs: tuple[Job, ...] = ()  # as the list in the run's directory says; from rank 0 alone


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What the rank that publishes a checkpoint has decided."""

    manifest: Manifest | None = None
    copies: dict[int, list[FileEntry]] = dataclasses.field(default_factory=dict)  # by rank
    lost: list[str] = dataclasses.field(default_factory=list)  # data files that are nowhere
    error: str = ""


def bring_home(run: Path, options: Options, tell: Callable[[str], None] = logger.info) -> int | None:
    """Publishes in `run` the newest checkpoint that near tiers hold whole, if it is newer than what is there.

    Collective: all ranks call it. Megatron's tracker in `run` names the checkpoint afterwards.

    Args:
        tell: gets a line on rank 0 for each checkpoint that was tried.

    Returns:
        Its iteration; None if there is none.

    Raises:
        StorageError: `run` cannot be read, or the checkpoint cannot be written there. On all ranks.
    """
    recovery = _Recovery(run, options)
    nodes = recovery.look()
    tracked = nodes[0].tracked
    if nodes[0].error:
        raise StorageError(nodes[0].error)
    lists = [nodes[0].far_jobs, *(node.jobs for node in nodes)]
    for name, save_id in _candidates(nodes, tracked):
        later = abandoned_by(save_id.run_id, iteration_in_name(name) or 0, lists)
        if later is not None:
            if recovery.rank == 0:
                tell(
                    f"datastates: {name} in a near tier is left: a later job went on from an earlier "
                    f"iteration, and saved iteration {later.first}. To resume from it, remove "
                    f"{run / JOBS_NAME}, and the same in near tiers"
                )
            continue
        outcome = recovery.bring(name, save_id, nodes)
        iteration = iteration_in_name(name)
        there = "nothing" if tracked is None else f"iteration {tracked}"
        if recovery.rank == 0:
            tell(f"datastates: iteration {iteration} is newer than what is in {run} ({there}), and {outcome}")
        if outcome.is_far:
            return iteration
    return None


@dataclasses.dataclass(frozen=True)
class _Outcome:
    is_far: bool
    text: str

    def __str__(self) -> str:
        return self.text


def _candidates(nodes: Sequence[_Node], tracked: int | None) -> list[tuple[str, SaveId]]:
    """Returns names and save ids of checkpoints that are newer than the tracked one, newest first."""
    found = {
        (held.iteration, held.save_id.ordinal, held.name, held.save_id)
        for node in nodes
        for held in node.held
        if held.has_manifest and held.iteration > (tracked or 0)
    }
    ordered = sorted(found, key=lambda one: (*one[:3], one[3].run_id), reverse=True)
    return [(name, save_id) for _, _, name, save_id in ordered]


class _Recovery:
    """What one rank does. Every method without an underscore is collective."""

    def __init__(self, run: Path, options: Options) -> None:
        self._run = run
        self._root = near_root(options.near)
        self._folder = near_run(self._root, run)
        self._faults = Faults(options.faults)
        # Without --datastates-drain-limit: no training needs the network, and the job waits for this.
        self._copier = Copier(options, self._faults, Limit(0))
        self._collectives = Collectives()
        self.rank = self._collectives.rank

    def _share(self, value: Shared) -> list[Shared]:
        return gather_objects(value) if self._collectives.distributed else [value]

    def look(self) -> list[_Node]:
        """Returns what each rank's node has; of the ranks of a node only the first one says it."""
        nodes, seen = self._share(self._look()), {0}
        for rank, node in enumerate(nodes):
            if node.node in seen:
                nodes[rank] = dataclasses.replace(node, held=())
            seen.add(node.node)
        return nodes

    def _look(self) -> _Node:
        try:
            nothing = _Node(0, (), _resumable(self._run))
            if self.rank == 0:
                nothing = dataclasses.replace(nothing, far_jobs=_jobs_in(self._run))
        except StorageError as error:
            return _Node(0, (), None, str(error))
        try:
            held = tuple(held for one in sorted(self._folder.iterdir()) for held in _held_in(one))
            node = node_of(self._root)
        except FileNotFoundError:
            return nothing
        except OSError as error:
            logger.warning("%s in the near tier is left out: %s", self._folder, error)
            return nothing
        return dataclasses.replace(nothing, node=node, held=held, jobs=_jobs_in(self._folder))

    def bring(self, name: str, save_id: SaveId, nodes: Sequence[_Node]) -> _Outcome:
        """Tries to make one checkpoint far. The same outcome on all ranks."""
        holders = {
            rank: held
            for rank, node in enumerate(nodes)
            for held in node.held
            if (held.name, held.save_id) == (name, save_id)
        }
        publisher = next(rank for rank, held in holders.items() if held.has_manifest)
        try:
            plan, outcome = self._bring_files(name, holders, publisher)
            if outcome.is_far:
                self._together(lambda: self._publish(name, plan) if self.rank == publisher else {})
        except SourceError as error:
            return _Outcome(False, f"could not be brought there from the near tiers: {error}")
        return outcome

    def _bring_files(self, name: str, holders: Mapping[int, _Held], publisher: int) -> tuple[_Plan, _Outcome]:
        """Copies all files that are missing; for a damaged one, another node's copy is taken."""
        damaged: _Damaged = {}
        copied = from_copies = 0
        while True:
            own = self._plan(name, holders, damaged) if self.rank == publisher else _Plan()
            plan = self._share(own)[publisher]
            if plan.lost:
                return plan, _Outcome(False, _why_left(plan.lost, damaged))
            found = self._together(functools.partial(self._copy, name, plan))
            taken = [(rank, file.name) for rank, files in plan.copies.items() for file in files]
            good = [(rank, file) for rank, file in taken if (rank, file) not in found]
            copied += len(good)
            from_copies += sum(file in holders[rank].copies for rank, file in good)
            damaged |= found
            if not found:
                break
        text = f"was brought there from {len(holders)} near tiers: {copied} files were missing"
        return plan, _Outcome(
            True, text + (f", {from_copies} of them taken from copies on other nodes" if from_copies else "")
        )

    def _together(self, work: Callable[[], _Damaged]) -> _Damaged:
        """Does all ranks' work, on threads while ranks poll: no collective call waits for a disk.

        Returns:
            What all ranks' work has returned.

        Raises:
            SourceError: of some rank: a near tier has lost something. On all ranks.
            StorageError: any other error of some rank: nothing is lost yet, so nothing older is loaded.
        """

        def outcome() -> tuple[str, bool, _Damaged]:
            try:
                return "", False, work()
            except Exception as error:  # which the other ranks have to know
                return f"rank {self.rank}: {error}", isinstance(error, SourceError), {}

        with ThreadPoolExecutor(1, "datastates-recovery") as thread:
            share = thread.submit(outcome)
            while self._collectives.start_sum([int(share.done())]).result()[0] < self._collectives.size:
                time.sleep(_POLL_SECONDS)
        outcomes = self._share(share.result())
        failed = [one for one in outcomes if one[0]]
        lost = [text for text, is_lost, _ in failed if is_lost]
        if lost:
            raise SourceError(lost[0])
        if failed:
            raise StorageError(
                f"what the near tiers hold could not be brought to {self._run}: {failed[0][0]}: see to that, "
                "or leave out --datastates-near to load what is there"
            )
        return {key: text for _, _, damaged in outcomes for key, text in damaged.items()}

    def _plan(self, name: str, holders: Mapping[int, _Held], damaged: _Damaged) -> _Plan:
        manifest = manifest_in(self._folder / name)
        if manifest is None:
            return _Plan(error=f"the manifest in {self._folder / name} cannot be read")
        plan = _Plan(manifest)
        for file in manifest.files:
            if is_whole(self._run / name / file.name, manifest, file):
                continue
            have = [
                (file.name in held.copies, len(plan.copies.get(rank, [])), rank)
                for rank, held in holders.items()
                if file.name in held.files and (rank, file.name) not in damaged
            ]
            if not have:
                plan.lost.append(file.name)
            else:  # from the node that wrote it, else from one with little to do
                plan.copies.setdefault(min(have)[2], []).append(file)
        return plan

    def _copy(self, name: str, plan: _Plan) -> _Damaged:
        """Copies this rank's share; returns what was damaged."""
        near, far, manifest = self._folder / name, self._run / name, plan.manifest
        if manifest is None:
            raise SourceError(plan.error)

        def copy(file: FileEntry) -> _Damaged:
            try:
                self._copier.copy(near / file.name, far / file.name, manifest, file)
            except StorageError as error:  # of reading: see Copier.copy
                return {(self.rank, file.name): f"rank {self.rank}: {error}"}
            return {}

        with ThreadPoolExecutor(_COPIES) as threads:
            found = list(threads.map(copy, plan.copies.get(self.rank, [])))
        return {key: text for damaged in found for key, text in damaged.items()}

    def _publish(self, name: str, plan: _Plan) -> _Damaged:
        near, far, manifest = self._folder / name, self._run / name, plan.manifest
        assert manifest is not None
        try:
            others = {other.name: read_small(near / other.name, OBJECT_BYTES) for other in manifest.others}
            index = read_small(near / manifest.index.name, INDEX_BYTES)
            path = near / METADATA_NAME
            metadata = read_small(path, DOCUMENT_BYTES) if path.exists() else b""
        except (OSError, DataStatesError) as error:
            raise SourceError(str(error)) from error
        far.mkdir(parents=True, exist_ok=True)
        for other, content in others.items():
            write_whole(far / other, content, self._faults, manifest.save_id)
        small = SmallFiles(manifest, index, metadata)
        Commit(far, manifest.save_id, small, self._faults, FILES_OF_TORCH_DIST).publish()
        tracked = str(iteration_in_name(name)).encode()
        write_whole(self._run / TRACKER_NAME, tracked, self._faults, manifest.save_id)
        return {}


def _why_left(lost: list[str], damaged: _Damaged) -> str:
    texts = [text for (_, name), text in damaged.items() if name in lost]
    if texts:
        return f"could not be brought there from the near tiers: {texts[0]}"
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    return f"is left: no near tier has {', '.join(lost[:_NAMED])}{more}, nor has its directory"


def _resumable(run: Path) -> int | None:
    """Returns the iteration that a load resumes from: the tracked one, or the newest complete one.

    The latter is used if the tracker is damaged (see mcore/training/tracker.py) or names what is not there.

    Raises:
        StorageError: the run's directory is there and cannot be read.
    """
    try:
        tracked = require_tracked(run / TRACKER_NAME)
        if tracked is None or is_complete(run / iteration_name(tracked)):
            return tracked
    except FormatError:
        pass
    try:
        return max((one.number for one in find_iterations(run) if one.complete), default=None)
    except OSError as error:
        raise StorageError(f"{run} cannot be listed: {error.strerror}") from error


def _jobs_in(folder: Path) -> tuple[Job, ...]:
    try:
        return tuple(jobs_in(folder))
    except (OSError, DataStatesError) as error:
        logger.warning("which jobs have saved the run is not known: %s", error)
        return ()


def _held_in(folder: Path) -> list[_Held]:
    """Returns what a folder holds; nothing if it cannot be read."""
    try:
        return _found_in(folder)
    except OSError as error:
        logger.warning("%s in the near tier is left out: %s", folder, error)
        return []


def _found_in(folder: Path) -> list[_Held]:
    """Returns what a folder holds, by save: a save may have begun where another one was published."""
    if iteration_in_name(folder.name) is None or not folder.is_dir():
        return []
    manifest = manifest_in(folder)
    if manifest is not None:
        files = [file for file in manifest.files if is_whole(folder / file.name, manifest, file)]
        nodes = nodes_in(folder)
        own = {file.rank for file in files} if nodes is None else set(nodes.nodes[nodes.own].ranks)
        names, copies = ([f.name for f in files], [f.name for f in files if f.rank not in own])
        return [_Held(folder.name, manifest.save_id, True, frozenset(names), frozenset(copies))]
    if is_published(folder):
        logger.warning("%s in the near tier is left out: its manifest cannot be read", folder)
    present = frozenset(filter(is_data_file_name, os.listdir(folder)))
    ids = {save_id for name in present if (save_id := save_id_in_name(name))}
    # Each may have files of earlier ones, too: a manifest says which.
    return [_Held(folder.name, save_id, False, present) for save_id in ids]
