"""Starts, reports and closes saves with one set of options, and keeps their engine between them.

A process has one SaveSession (session.py), whatever the options of its saves, and one Saver for each set of
options, which serves any number of strategy objects and directories (saver_pool.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_datastates.config import Options
from megatron_datastates.engine.faults import Faults
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.staging import StagingEngine
from megatron_datastates.errors import DataStatesError, OptionError, is_interrupt, raise_from
from megatron_datastates.files import absolute, is_object, path_of
from megatron_datastates.format.values import BLOCK_BYTES, SaveId
from megatron_datastates.pipeline.near.tier import NearTier
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.report import Reporter, save_report
from megatron_datastates.pipeline.saving.links import Link
from megatron_datastates.pipeline.saving.milestones import SaveContext, State
from megatron_datastates.pipeline.saving.plans import Memory, StatePlan, tail_items
from megatron_datastates.pipeline.saving.rank_save import REMOVAL_SECONDS, RankSave
from megatron_datastates.pipeline.saving.unplanned import with_key
from megatron_datastates.pipeline.saving.warm_up import AtFirstFences
from megatron_datastates.pipeline.session import SaveSession
from megatron_datastates.providers.base import Mutability, StateProvider
from megatron_datastates.providers.collect import Collected, check_names, collect
from megatron_datastates.providers.transforms import sampled

logger = logging.getLogger(__name__)
_WARM_BYTES = 64 << 20  # staging memory made before the size of the shard is known
_CLOSING_SECONDS = 60.0  # how long the end of a program waits for copies and writes that hang
_LAST_JOIN_SECONDS = 5.0  # for what Python still does once the engine is closed
_LONG_WAIT_SECONDS = 0.01  # for staging memory; a longer wait is logged
_EAGER = {Mutability.AT_FENCE: Mutability.NOW}


# What a save stores: one provider, or a function that returns several by name. The function is called when
# errors of one rank already fail the save on all.
Providers = StateProvider | Callable[[], Mapping[str, StateProvider]]


class Saver:
    """Starts saves with one set of options. Threads take turns (polls.Turn)."""

    def __init__(
        self,
        options: Options,
        session: SaveSession,
        *,
        engine_owner: Saver | None = None,
        before_object_store: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes a saver; starts nothing.

        Args:
            engine_owner: whose engine this one uses; it is closed later. None for an engine of its own.
            before_object_store: called before each save into an object store.
        """
        self.options = options
        self.session = session
        self.engine_owner = engine_owner
        self._engine: StagingEngine | None = None
        self._before_object_store = before_object_store
        self.used_at = 0.0  # by time.monotonic: when a save was to be made with it
        self._faults = Faults(options.faults)
        self.reporter = Reporter(options.report_file)
        self._preparing: AtFirstFences | None = None
        self._pool_trouble_reported = False
        self._unfinished: list[Publication] = []
        self.near: NearTier | None = None
        if options.near:
            self.near = NearTier(options, self._faults, self.reporter.write_later)

    def start(
        self,
        directory: Path,
        providers: Providers,
        *,
        iteration: int | None = None,
        mode: str = "async",
        extras: PublicationExtras | None = None,
        await_copies: bool = False,
        far_published: Callable[[SaveId, bool], None] | None = None,
        is_of_training: bool = False,
        is_kept: bool = False,
    ) -> Publication:
        """Starts a save of this rank's part of the state into `directory`.

        Returns as soon as everything that may change at once has been copied (copies from a device may still
        run: the trainer's stream waits for them). The rest must not change before the next fence
        (engine.fence.FENCE). With `await_copies`, or if the option `lazy` is off, returns when everything has
        been copied, so that memory may also be unmapped. Nothing is published before every rank has polled
        the returned publication a few times. Errors of the save itself are values: polls bring them to all
        ranks.

        Args:
            far_published: called on rank 0, on some thread, once the checkpoint is published in `directory`,
                with whether it is called again if it raises an error (from a near tier). Of a save that it
                raises an error for, nothing is removed. Allows a near tier, if the options
                name one; the call then comes after the save is published.

            is_of_training: whether a training loop makes it (SaveSession.last_error).
            is_kept: whether it is to be in `directory`, whatever `drain_every` says; the same on all ranks.

        Raises:
            BaseException: KeyboardInterrupt and the like (errors.is_interrupt), which end the save.
            DataStatesError: another save is being started or polled, further up the stack.
            RanksDifferError: on all ranks, in the first save of a world, as SaveSession.agree.
        """
        session, options = self.session, self.options

        def start() -> Publication:
            session.enter_world()
            self._abandon_old_world()
            session.agree(options)
            for earlier in session.begun:  # before this one links what their end would remove
                earlier.end_if_abandoned()
            save_id, ranks = session.next_id(), session.collectives
            context = SaveContext(
                save_id, absolute(path_of(directory)), ranks.rank, ranks.size, _plain(iteration)
            )
            publication = Publication(
                RankSave(context, options),
                session.polls,
                session.layouts,
                self._faults,
                extras,
                far_published=far_published,
                ended=self._on_end,
                released=functools.partial(self._report_once, mode=mode),
            )
            publication.is_of_training, publication.is_kept = is_of_training, is_kept
            self._start_save(publication, providers, await_copies=await_copies or not options.lazy)
            return publication

        return session.turn.take(start)

    def _start_save(self, publication: Publication, providers: Providers, *, await_copies: bool) -> None:
        save = publication.save
        try:
            # Interrupted before this, no poll knows of the save; after it, polls end it.
            self.session.polls.add(publication)
            save.saves_before = len(self._under_way())
            _check_iteration(save.context.iteration)
            plan, memory, state = self._plan(providers)
            if self.near is not None and publication.publisher.far_published is not None:
                self._choose_tier(self.near, publication, plan)
            _refuse_without_near(save.context)
            if is_object(save.context.directory):
                self._before_object_store()
            save.start(self._get_engine(), plan, memory, state, self._link(plan, save.context))
            if await_copies:
                save.await_copies()
        except BaseException as error:
            save.fail(error)  # polls of later saves end this one
            if is_interrupt(error):
                save.cancel_and_remove(f"interrupted by {type(error).__name__}", patience=REMOVAL_SECONDS)
                raise
        finally:
            self._unfinished = [p for p in self._unfinished if p.outcome is Outcome.PENDING] + [publication]
            self.session.begun = [p for p in self.session.begun if p.is_at_work] + [publication]

    def _choose_tier(self, tier: NearTier, publication: Publication, plan: StatePlan) -> None:
        # Until a first save has shown its size, an upper bound: encoding only makes tensors smaller.
        tail = plan.tail_bytes or sum(item.fragment.bytes for item in plan.tail if item.fragment is not None)
        wanted = sum(layout.tensor_end for layout in plan.layouts()) + tail
        near = tier.choose(publication, wanted)
        publication.save.context = dataclasses.replace(publication.save.context, near=near)

    def _on_end(self, publication: Publication) -> None:
        if publication.collectives is self.session.collectives:  # ordinals and links are those of a world
            self.session.on_end(publication)
            if publication.outcome is Outcome.PUBLISHED:
                self._keep_link(publication)
        if self.near is not None and publication.publisher.far_published is not None:
            self.near.on_end(publication)

    def unfinished_save(self) -> Path | None:
        """Returns the directory of the oldest save that is not finished; the same on all ranks."""
        before = self._under_way()
        return before[0].save.context.directory if before else None

    def _under_way(self) -> list[Publication]:
        return [earlier for earlier in self._unfinished if earlier.is_under_way]

    def _plan(self, providers: Providers) -> tuple[StatePlan, Memory, Collected]:
        named = providers() if callable(providers) else {"": providers}
        if self.options.compress:
            named = {name: _compressed(one, self.options.compress) for name, one in named.items()}
        state = collect(named)
        if self.options.tripwire:
            for number in state.others():
                state.tail[number] = sampled(state.tail[number])
        tensors = state.tensors
        if not self.options.lazy:
            tensors.mutability = [_EAGER.get(mutability, mutability) for mutability in tensors.mutability]
        try:
            plan, memory = self.session.plans.find(tensors, tail_items(state), self._least_stable())
        except Exception as error:
            raise_from(with_key(error, state), error)
        names = [one.name for one in state.by_provider]
        if plan.names != names:  # once for each structure: it takes time for each key
            check_names(state)
            plan.names = names
        return plan, memory, state

    def _least_stable(self) -> int | None:
        """Returns how many bytes of stable tensors get a file of their own; None if they never do."""
        has_digests = self._get_engine().slot_bytes % BLOCK_BYTES == 0
        return self.options.link_from if self.options.link and has_digests else None

    def _link(self, plan: StatePlan, context: SaveContext) -> Link | None:
        """Returns a link to the last checkpoint's file of stable tensors, if there is one to be had.

        Not beside another save to the same directory, whichever saver began it: the one that is published
        last removes what only the other one names, and one that has failed may yet remove its link.
        """
        if plan.stable is None or context.directory in self.session.directories_at_work():
            return None
        file = self.session.links.find(context.folder, plan.stable.layout.digest)
        return Link(file, context.folder, self._faults) if file is not None else None

    def _keep_link(self, publication: Publication) -> None:
        save, links = publication.save, self.session.links
        if save.plan is None or save.plan.stable is None or save.stable is None:
            return
        if save.stable.link_error is not None:
            links.note_refusal(save.context.folder, save.stable.link_error)
        if save.stable.linkable is not None:
            links.keep(save.stable.linkable, save.plan.stable.layout.digest, save.stable.has_changed)

    def _abandon_old_world(self) -> None:
        old = [p for p in self._unfinished if p.collectives is not self.session.collectives]
        for publication in old:
            publication.abandon("torch.distributed was initialized anew before the save was published")
        self._unfinished = [p for p in self._unfinished if p not in old or not p.join(0.0)]

    def warm_up(self, shard_bytes: Callable[[], int] = lambda: 0) -> None:
        """Starts the engine, which allocates staging memory in the background before the first save.

        Memory is page-locked as soon as the program uses CUDA: now, or at its first optimizer step. If the
        user chose no size, memory for the first save is allocated once optimizer states exist
        (AtFirstFences). Never raises: if memory cannot be allocated, the first save fails on all ranks.

        Args:
            shard_bytes: returns about how many bytes of tensors this rank will store, by what has stepped so
                far. A save that needs more allocates the rest itself.
        """
        try:
            engine = self._get_engine()
            engine.grow(self.options.staging_memory or _WARM_BYTES)
            is_locked = engine.page_lock()
        except Exception as error:
            logger.warning("staging memory was not allocated before the first save: %s", error)
            return
        if self._preparing is None and not (is_locked and self.options.staging_memory):
            self._preparing = AtFirstFences(engine, is_locked, shard_bytes)
            FENCE.add(self._preparing)

    def close(self) -> None:
        """Abandons unpublished saves and joins every thread.

        A device or a disk that hangs must not keep the program from ending: waits up to _CLOSING_SECONDS for
        it and then abandons the copies or writes.
        """
        deadline = time.monotonic() + _CLOSING_SECONDS
        for publication in self._unfinished:
            _abandon(publication, deadline)
        if self._preparing is not None:
            FENCE.discard(self._preparing)
        for publication in self._unfinished:
            publication.save.join(max(deadline - time.monotonic(), 0.0))
        if self._engine is not None:
            if not self._engine.close(max(deadline - time.monotonic(), 1.0)):
                logger.error("a copy or a write still hangs after %g s and is abandoned", _CLOSING_SECONDS)
            self._engine = None
        if self.near is not None:
            self.near.close()
        for publication in self._unfinished:
            # The engine is closed: the program's own stream may wait for ever, and so may storage.
            if not publication.save.join(_LAST_JOIN_SECONDS):
                logger.error(
                    "the save to %s: a state provider still writes an object or a stream, or storage has not "
                    "removed a file, and is abandoned",
                    publication.save.context.directory,
                )
        if not self.reporter.flush(_LAST_JOIN_SECONDS):
            logger.error("%s hangs: the last reports are not written", self.options.report_file or "the log")
        self._unfinished = []
        self.session.begun = [p for p in self.session.begun if p.is_at_work]  # others hold memory of devices

    def close_if_idle(self) -> bool:
        """Closes the saver, unless a save is unfinished or being started; returns whether it has.

        Not one with a near tier, which works on its own, or with listeners, which a new one would lack.
        """
        turn = self.session.turn
        if not turn.lock.acquire(blocking=False):
            return False
        try:
            is_idle = turn.owner is None and self._is_idle()
            if is_idle:
                self.close()
            return is_idle
        finally:
            turn.lock.release()

    def _is_idle(self) -> bool:
        if self.near is not None or self.reporter.listeners:
            return False
        over = (p.outcome is not Outcome.PENDING and not p.hold_report for p in self._unfinished)
        return all(over) and all(p.join(0.0) for p in self._unfinished) and self.reporter.flush(0.0)

    def _get_engine(self) -> StagingEngine:
        if self.engine_owner is not None:
            return self.engine_owner._get_engine()
        if self._engine is None:
            self._engine = StagingEngine(self.options)
        return self._engine

    def _report_once(self, publication: Publication, mode: str) -> None:
        """Reports a save the first time that the trainer resumes after the save is over.

        The whole path of a report: held.py -> RankSave.on_trainer_released -> here -> Reporter.emit.
        """
        if publication.outcome is Outcome.PENDING or publication.hold_report:
            return
        publication.save.released_callback = lambda: None  # once; it refers to the publication
        pool = self._pool_facts()
        self._warn_of_memory(publication, pool)
        self.reporter.emit(
            publication.save.context.rank,
            lambda: save_report(publication, mode) | pool,
            later=not publication.postponement.is_awaited,
        )

    def _warn_of_memory(self, publication: Publication, pool: dict[str, object]) -> None:
        trouble = pool.get("staging_trouble")
        if trouble and not self._pool_trouble_reported:
            self._pool_trouble_reported = True
            logger.warning("rank %d: %s", publication.save.context.rank, trouble)
        waited = publication.save.times()["memory_wait"]
        if waited > _LONG_WAIT_SECONDS and not self.session.memory_wait_reported:
            self.session.memory_wait_reported = True
            logger.info(
                "rank %d: copies of the save to %s waited %.0f ms for staging memory to be allocated; with a "
                "fixed size, as in --datastates-staging-memory 4GiB, it is allocated when the program starts",
                publication.save.context.rank,
                publication.save.context.directory,
                waited * 1e3,
            )

    def _pool_facts(self) -> dict[str, object]:
        engine = (self.engine_owner or self)._engine
        with contextlib.suppress(ValueError):  # another thread closes it, as this saver has nothing to do
            return engine.pool_facts() if engine is not None else {}
        return {}


def _abandon(publication: Publication, deadline: float) -> None:
    """Abandons a save if it is unpublished; waits until the deadline for what is being published."""
    directory, state = publication.save.context.directory, publication.state
    if publication.is_under_way and state is State.FAILED:
        logger.warning("the save to %s has failed and was not published", directory)
    elif publication.is_under_way:
        logger.warning("the save to %s was not published: it had only reached %s", directory, state.value)
    if publication.outcome is Outcome.PENDING:
        publication.abandon("the program ended before the save was published")
    if not publication.publisher.join(max(deadline - time.monotonic(), 0.0)):
        logger.error(
            "the manifest of the save to %s still hangs after %g s: whether it was published is not known",
            directory,
            _CLOSING_SECONDS,
        )
    publication.forget()


def _compressed(provider: StateProvider, level: int) -> StateProvider:
    from megatron_datastates.providers.transforms import Compressed

    return provider if isinstance(provider, Compressed) else Compressed(provider, level=level)


def _plain(iteration: Any) -> Any:
    """Returns numpy's integers as Python's, which the manifest can have, and all else as it is."""
    try:
        return iteration if isinstance(iteration, bool) else operator.index(iteration)
    except Exception:  # it is no integer: the save is refused on all ranks
        return iteration


def _check_iteration(iteration: Any) -> None:
    is_number = isinstance(iteration, int) and not isinstance(iteration, bool)
    if iteration is not None and not (is_number and 0 <= iteration < 1 << 63):
        raise OptionError(f"iteration={iteration!r}: expected a whole number from 0 to 2**63 - 1, or None")


def _refuse_without_near(context: SaveContext) -> None:
    """Raises DataStatesError if a data file would be written into an object store."""
    if context.near is None and is_object(context.directory):
        raise DataStatesError(
            f"{context.directory} is in an object store, which saves reach only through a near tier "
            "(--datastates-near, in Megatron's training loop), and this rank has none, or no room in it"
        )
