"""Saves whose ranks another program brings together, such as PyTorch's distributed checkpoints (dcp/).

That program chooses a save id, distributes it, gathers what ranks return, and reports failures to all.
Nothing here communicates, so a save may run on any thread, beside the trainer's own collective calls:
  1. each rank writes its part, waits until it is durable, and returns its contribution for the coordinator;
  2. the coordinator publishes all of them, once it has them: the manifest comes last, as in publication.py.
If a rank fails in step 1, its file is removed, nothing is published, and durable files of other ranks stay
as files that no manifest names. A later save of the same coordinator into the directory, or
`datastates prune`, removes them.
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import threading
from collections.abc import Iterator

from megatron_datastates.config import Options
from megatron_datastates.errors import SaveFailedError, is_interrupt
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.publishing.polls import Polls, Turn
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.saver_pool import kept_saver
from megatron_datastates.pipeline.saving.milestones import SaveContext
from megatron_datastates.pipeline.saving.rank_save import RankSave
from megatron_datastates.pipeline.saving.records import RankContribution
from megatron_datastates.pipeline.session import SaveSession
from megatron_datastates.providers.base import StateProvider

_MODE = "dcp"


class _GivenRanks(Collectives):
    """The ranks as another program numbers them; it alone makes collective calls."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.distributed, self.rank, self.size = False, rank, size


class ExternalRankSaver(Saver):
    """Writes this rank's parts of saves. Thread-safe; each call waits for its save.

    The session's turn is that of plans and of the list of unfinished saves.
    """

    def write(self, context: SaveContext, provider: StateProvider) -> Publication:
        """Writes this rank's part of a save. Nothing that `provider` yields may change meanwhile.

        Returns:
            The save: its `contribution` is for the coordinator, which calls `publish`.

        Raises:
            SaveFailedError: this rank failed. Its file was removed, unless storage takes too long for that.
        """
        save = RankSave(context, self.options, awaited=True)
        ranks = _GivenRanks(context.rank, context.world_size)
        publication = Publication(save, Polls(ranks), self.session.layouts, self._faults)
        with self.session.turn.lock:
            self._unfinished.append(publication)
        try:
            self._start(save, provider)
            save.await_durable()
        except BaseException as error:
            save.fail(error)
            save.cancel_and_remove("the call that saves was interrupted")
            if is_interrupt(error):
                raise
        finally:
            with self.session.turn.lock:
                self._unfinished.remove(publication)
        if save.failure is not None:
            publication.remove(save.failure)
            raise SaveFailedError(
                f"saving to {context.directory} failed on rank {context.rank}: {save.failure}. Nothing was "
                "published; earlier checkpoints are as they were."
            ) from save.cause
        return publication

    def _start(self, save: RankSave, provider: StateProvider) -> None:
        def start() -> None:
            plan, memory, state = self._plan(provider)
            save.start(self._get_engine(), plan, memory, state)

        if _publishing.owner == threading.get_ident():  # this is a signal handler, and could not publish
            _publishing.require_free()
        self.session.turn.take(start)

    def _least_stable(self) -> None:
        """Returns None: no tensors get a file of their own."""

    def publish(
        self, publication: Publication, contributions: list[RankContribution], extras: PublicationExtras
    ) -> None:
        """Publishes the contributions of all ranks, in their order, and reports the save. On the coordinator.

        Raises:
            SaveFailedError: see Publication.publish_contributions.
        """
        try:
            _publishing.take(functools.partial(publication.publish_contributions, contributions, extras))
        finally:
            if publication.outcome is not Outcome.PENDING:
                self._report_once(publication, _MODE)  # listeners may wait for another thread that saves


def _new_ids() -> Iterator[SaveId]:
    return map(functools.partial(SaveId, secrets.randbits(63)), itertools.count(1))


_ids = _new_ids()  # of this process's saves, as a coordinator
_lock = threading.RLock()  # of the pool; a signal handler may save in the middle
# One of these saves at a time, whatever its options: see LayoutStore.publishing. All are of one run.
_publishing = Turn()


def _forget() -> None:
    """Begins a new run, in a forked child."""
    global _lock, _ids, _publishing
    _lock, _ids, _publishing = threading.RLock(), _new_ids(), Turn()


os.register_at_fork(after_in_child=_forget)


def new_save_id() -> SaveId:
    """Returns a save id that no other save has; for a coordinator. Thread-safe."""
    return next(_ids)


def external_rank_saver_for(options: Options) -> ExternalRankSaver:
    """Returns the process's ExternalRankSaver with these options; it is closed when the interpreter ends."""
    with _lock:
        return kept_saver(ExternalRankSaver, options, SaveSession())
