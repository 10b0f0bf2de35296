"""What a process keeps between saves: the run's identity and layouts, and an engine.

A Run is the same on all ranks and for all options. A Saver has an engine with its options; it serves any
number of strategy objects and directories.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
from pathlib import Path

from megatron_datastates.config import Options
from megatron_datastates.engine.faults import Faults
from megatron_datastates.engine.fence import FENCE, Fenced
from megatron_datastates.engine.staging import StagingEngine
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.agreement import Collectives
from megatron_datastates.pipeline.plans import Plans
from megatron_datastates.pipeline.publication import Labels, LayoutStore, Outcome, Publication
from megatron_datastates.pipeline.report import Reporter, save_report
from megatron_datastates.pipeline.save import RankSave, SaveContext
from megatron_datastates.providers.base import Mutability, StateProvider

logger = logging.getLogger(__name__)
_WARM_BYTES = 64 << 20  # staging memory made before the size of the shard is known
_CLOSING_SECONDS = 60.0  # after which what still hangs is left behind
_FIRST_FENCES = 8  # at which staging memory is prepared: those of about two steps
_LONG_WAIT_SECONDS = 0.01  # for staging memory; worth a line in the log
_EAGER = {Mutability.AT_FENCE: Mutability.NOW}
_KEPT_PLANS = 8  # persistent and non-persistent saves alternate; more than a few means they change


class Run:
    """What all saves of a process share, whatever their options. Used by the trainer's thread alone."""

    def __init__(self) -> None:
        self.store = LayoutStore()
        self.plans = Plans(_KEPT_PLANS)
        self.collectives = Collectives()
        self.told_of_memory = False  # that a save had to wait for it
        self._run_id: int | None = None
        self._ordinal = 0

    def enter_world(self) -> None:
        """Begins anew where torch.distributed was initialized (again) since the last save.

        Options are known before it is; and a restart within the process gives ranks new numbers and peers, so
        nothing that was agreed on holds any more.
        """
        if not self.collectives.is_current():
            self.collectives, self.store = Collectives(), LayoutStore()
            self._run_id, self._ordinal = None, 0

    def next_id(self) -> SaveId:
        """Counted alike on every rank. The first one makes a collective call."""
        if self._run_id is None:
            self._run_id = self.collectives.share_from_first(secrets.randbits(63))
        self._ordinal += 1
        return SaveId(self._run_id, self._ordinal)


class Saver:
    """Starts saves. Used by the trainer's thread alone."""

    def __init__(self, options: Options, run: Run) -> None:
        self.options = options
        self.run = run
        self._engine: StagingEngine | None = None
        self._faults = Faults(options.faults)
        self.reporter = Reporter(options.report_file)
        self._preparing: Fenced | None = None
        self._told_of_pool = False
        self._unfinished: list[Publication] = []

    def start(
        self,
        directory: Path,
        provider: StateProvider,
        *,
        iteration: int | None = None,
        mode: str = "async",
        labels: Labels | None = None,
        await_copies: bool = False,
    ) -> Publication:
        """Starts a save of this rank's part of the state into `directory`.

        Returns when everything that may change at once has been copied; what is copied from a device, the
        trainer's stream waits for. The rest may change after the next fence (engine.fence.FENCE). With
        `await_copies`, or without `lazy` among the options, returns when everything has been copied, so that
        memory may also be unmapped. Nothing is published before every rank has polled often enough. Errors of
        this rank are kept for the agreement: this raises none of them.
        """
        run, path = self.run, Path(directory).absolute()
        run.enter_world()
        self._abandon_old_world()
        context = SaveContext(run.next_id(), path, run.collectives.rank, run.collectives.size, iteration)
        options = self.options
        save = RankSave(
            context, options.fence_deadline, options.lazy_delay, trust_objects=options.trust_objects
        )
        publication = Publication(save, run.collectives, run.store, self._faults, labels)
        save.on_released = lambda: self._report_once(publication, mode)
        before = [earlier for earlier in self._unfinished if earlier.is_under_way]
        save.saves_before = len(before)
        try:
            if before and self.options.while_saving == "refuse":
                publication.refused = True
                raise DataStatesError(
                    f"the save to {before[0].save.context.directory} is not finished "
                    "(--datastates-while-saving refuse)"
                )
            tensors, objects = provider.tensors(), list(provider.objects())
            if not self.options.lazy:
                tensors.mutability = [_EAGER.get(mutability, mutability) for mutability in tensors.mutability]
            plan, memory = run.plans.find(tensors, [item.key for item in objects])
            save.start(self._get_engine(), plan, memory, objects)
            if await_copies or not self.options.lazy:
                save.await_copies()
        except Exception as error:
            save.fail(error)
        self._unfinished = [p for p in self._unfinished if p.outcome is Outcome.PENDING] + [publication]
        return publication

    def _abandon_old_world(self) -> None:
        for publication in self._unfinished:
            if publication.collectives is not self.run.collectives:
                publication.abandon("torch.distributed was initialized anew before the save was published")

    def warm_up(self) -> None:
        """Starts the engine, and lets it make staging memory in the background before the first save.

        Memory is page-locked as soon as the program is seen to use CUDA: now, or at its first optimizer step.
        Where the user chose no size, what the first save needs is made once optimizer states exist
        (_AtFirstFences). Raises nothing, on this rank alone: the first save reports what cannot be had.
        """
        try:
            engine = self._get_engine()
            engine.grow(self.options.staging_memory or _WARM_BYTES)
            is_locked = engine.page_lock()
        except Exception as error:
            logger.warning("staging memory is not made before the first save: %s", error)
            return
        if self._preparing is None and not (is_locked and self.options.staging_memory):
            self._preparing = _AtFirstFences(engine, is_locked)
            FENCE.add(self._preparing)

    def close(self) -> None:
        """Gives up what is not published, and joins every thread.

        A program is to end, though: of a device or a disk that hangs it takes leave after a while.
        """
        for publication in self._unfinished:
            if publication.outcome is Outcome.PENDING:
                directory, state = publication.save.context.directory, publication.state.value
                logger.warning("a save to %s was not published, only %s", directory, state)
                publication.abandon("the program ended before the save was published")
            publication.join_publisher()
        if self._preparing is not None:
            FENCE.discard(self._preparing)
        deadline = time.monotonic() + _CLOSING_SECONDS
        for publication in self._unfinished:
            publication.save.join(max(deadline - time.monotonic(), 0.0))
        if self._engine is not None:
            if not self._engine.close(max(deadline - time.monotonic(), 1.0)):
                logger.error("a copy or a write hangs: it is left behind after %g s", _CLOSING_SECONDS)
            self._engine = None
        for publication in self._unfinished:
            publication.save.join()  # what waits for a thread that hangs has been told not to
        self._unfinished = []

    def _get_engine(self) -> StagingEngine:
        if self._engine is None:
            self._engine = StagingEngine(self.options)
        return self._engine

    def _report_once(self, publication: Publication, mode: str) -> None:
        """Reports a save, each time that the trainer is let go: the first time that it is over for good.

        This is the whole way of a report: held.py -> RankSave.released -> here -> Reporter.emit.
        """
        if publication.outcome is Outcome.PENDING or publication.hold_report or publication.is_reported:
            return
        publication.is_reported = True
        self._warn_of_memory(publication)
        if self.reporter.is_wanted(publication.save.context.rank):
            self.reporter.emit(save_report(publication, mode) | self._pool_facts())

    def _warn_of_memory(self, publication: Publication) -> None:
        trouble = self._pool_facts().get("staging_trouble")
        if trouble and not self._told_of_pool:
            self._told_of_pool = True
            logger.warning("rank %d: %s", publication.save.context.rank, trouble)
        waited = publication.save.times()["memory_wait"]
        if waited > _LONG_WAIT_SECONDS and not self.run.told_of_memory:
            self.run.told_of_memory = True
            logger.info(
                "rank %d: copies of the save to %s waited %.0f ms for staging memory that was being made; "
                "with a size, as in --datastates-staging-memory 4GiB, it is made when the program starts",
                publication.save.context.rank,
                publication.save.context.directory,
                waited * 1e3,
            )

    def _pool_facts(self) -> dict[str, object]:
        return self._engine.pool_facts() if self._engine is not None else {}


class _AtFirstFences:
    """Stands at the first fences as a save does, to make the memory that the first save will need.

    At its first step a program that uses CUDA has initialized it: what there is gets page-locked. At those
    after it the pool grows to what torch has on the device, within the budget: optimizers make their states
    in their first step, one after another.
    """

    def __init__(self, engine: StagingEngine, is_locked: bool) -> None:
        self._engine = engine
        self._is_locked = is_locked
        self._fences_seen = 0

    def fence(self, reason: str) -> None:
        self._prepare(has_stepped=self._fences_seen > 0)

    def torn(self, reason: str) -> None:
        self._prepare(has_stepped=True)

    def polled(self) -> None:
        """Waits for nothing."""

    def _prepare(self, *, has_stepped: bool) -> None:
        engine = self._engine
        self._fences_seen += 1
        try:
            self._is_locked = self._is_locked or engine.page_lock()
            if not self._is_locked or engine.options.staging_memory:
                return
            if has_stepped:
                engine.grow_for_device()
            if self._fences_seen < _FIRST_FENCES:
                FENCE.add(self)
        except Exception as error:  # the first save makes what it needs, and fails on all ranks if it cannot
            logger.warning("staging memory is not made before the first save: %s", error)


_savers: dict[Options, Saver] = {}
_runs: list[Run] = []  # one, once there is one


def _forget() -> None:
    """In a forked child: what its copies stand for belongs to the parent."""
    _savers.clear()
    _runs.clear()


os.register_at_fork(after_in_child=_forget)


def saver_for(options: Options) -> Saver:
    """The process's Saver with these options; closed when the interpreter ends."""
    if not _runs:
        _runs.append(Run())
        atexit.register(close_all)
    if options not in _savers:
        _savers[options] = Saver(options, _runs[0])
    return _savers[options]


def close_all() -> None:
    """Closes every Saver of this process."""
    while _savers:
        _savers.popitem()[1].close()
