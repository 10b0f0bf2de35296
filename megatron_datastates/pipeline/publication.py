"""From durable files on every rank to one published checkpoint, or to one agreed failure.

Protocol (everything on the trainer's thread, except step 4):
  1. Every poll (polls.py: it is one for all unfinished saves) starts a sum of flags (not durable, failed,
     manifest in place) over all ranks and reads the sum that the previous poll started. All ranks read the
     same sums, so all take the same next step. What a step gathers is read at the next poll as well: no poll
     reads what it has started itself.
  2. Any failure: every rank's error is gathered, and one last poll reads the errors; all ranks report the
     same text. Each rank removes its file, unless a manifest that names it may be in place (rank 0 is about
     to write it, or could not sync it).
  3. All ranks durable, and every earlier save as far as this step: one record per rank is gathered on all
     ranks. The next poll reads them, unless a rank has failed meanwhile, which shows in the sum that was
     started with them. Then the ranks' own indexes and lists of state providers are gathered on rank 0, as
     far as they are new.
  4. Rank 0's publishing thread waits for those indexes (polls notice their arrival) and writes the index. It
     checks that every file that the manifest will name is in the directory with the expected size. Then it
     writes the manifest (engine/atomic_files.py), checks once more, writes Megatron's metadata.json, and
     removes what that manifest replaced. From the rename of the manifest on, no failure removes a file that
     it names, not even if another manifest has taken its place since: a crash may bring it back.
  5. Polls continue until rank 0 reports that the checkpoint is published.
If any rank's file is in a near tier, steps 4 and 5 differ. Rank 0's thread writes nothing: the next
polls send index, manifest and what else belongs to the checkpoint to all ranks, and a thread of the first
rank of each node stores them beside the node's data files. Threads of all ranks then copy files of other
nodes, if they are to (near/replicas.py). When all are done, the save is published near. The nodes' drains
bring everything into the checkpoint's directory (near/drain.py), without any collective call.
A directory without a manifest is not a checkpoint; one with a manifest is complete.
tests/model/ searches all interleavings of a model of this protocol, written by hand, between two runs, with
crashes, failures and prune.
"""

from __future__ import annotations

import enum
import functools
import itertools
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import DataStatesError, SaveFailedError, is_interrupt
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.publisher import Publisher
from megatron_datastates.pipeline.publishing.collectives import PendingResult
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.publishing.lateness import Lateness, LatenessOfOthers
from megatron_datastates.pipeline.publishing.layouts import LayoutStore
from megatron_datastates.pipeline.publishing.polls import Flags, Polls
from megatron_datastates.pipeline.saving.held import trainer_held
from megatron_datastates.pipeline.saving.milestones import State
from megatron_datastates.pipeline.saving.rank_save import REMOVAL_SECONDS, RankSave
from megatron_datastates.pipeline.saving.records import (
    RankContribution,
    Records,
    decode_failures,
    encode_failure,
)

# Between two polls of a trainer that waits. Each is a sum over all ranks: as long as a write lasts, they must
# neither crowd the network nor fill NCCL's record of recent calls.
_LEAST_POLL_SECONDS, _POLL_SHARE, _MOST_POLL_SECONDS = 0.002, 0.02, 0.05
_NOTHING = "Nothing was published; earlier checkpoints are as they were."
_KEPT = "Its manifest may be in place, so its files were kept."
_UNKNOWN = "`datastates ls` shows whether it was published; its files were kept."


class Outcome(enum.Enum):
    """The outcome of a save, the same on every rank."""

    PENDING = "pending"
    PUBLISHED = "published"
    FAILED = "failed"


class Publication:
    """One save of all ranks. Call `poll` until it is no longer pending, or `wait`.

    Args:
        far_published: called by rank 0's thread, with False, as the last act of publishing in the directory.
        ended: called once the outcome is known, unless this rank gives up what a manifest may name already.
        released: called whenever the trainer resumes after a call for this save.
    """

    def __init__(
        self,
        save: RankSave,
        polls: Polls,
        layouts: LayoutStore,
        faults: Faults,
        extras: PublicationExtras | None = None,
        *,
        far_published: Callable[[SaveId, bool], None] | None = None,
        ended: Callable[[Publication], None] | None = None,
        released: Callable[[Publication], None] | None = None,
    ) -> None:
        self.save, self.postponement = save, save.postponement
        self.publisher = Publisher(save, layouts, faults, extras or PublicationExtras(), far_published)
        self.collectives = polls.collectives
        self._polls, self._layouts, self._ended = polls, layouts, ended
        self._lateness = Lateness(save.context.directory, save.context.rank)
        self._lateness_of_others = LatenessOfOthers(save.context.directory, self.collectives.size)
        # The step of the protocol, between polls the same on every rank.
        self.outcome = Outcome.PENDING
        self.error: str | None = None  # of the whole save, the same text on every rank
        self._pending_errors: PendingResult[bytes] | None = None  # step 2: the next poll reads no flags
        self.keeps_files = False  # step 2: although the save fails, as its manifest may be in place
        self._pending_records: PendingResult[bytes] | None = None  # step 3: read beside flags
        self._publishing = False  # records were sent: from now on a manifest may name this rank's file
        self._epoch: int | None = None  # of the layouts, once it relies on them
        self.ranks_without_copies = 0  # once published: ranks that have not made all of their copies
        self._abandoned_because: str | None = None  # on this rank alone
        # For the report.
        self.is_prepared = False  # the save has reused what the last one prepared
        self.not_prepared_because = ""  # if a reason is known
        self.hold_report = False  # set while a later call will hold the trainer for this save again
        self.is_of_training = False  # made by a training loop, and not by the program itself
        self.is_kept = False  # by the program's retention: a near tier brings it to its directory
        if released is not None:  # last: an interrupt may have the trainer released at once
            save.released_callback = functools.partial(released, self)

    @property
    def is_under_way(self) -> bool:
        """Returns whether the save began and is not over. Between polls the same on every rank."""
        return self.outcome is Outcome.PENDING and self._abandoned_because is None

    @property
    def is_abandoned(self) -> bool:
        """Returns whether this rank has given it up, which others need not have done."""
        return self._abandoned_because is not None

    @property
    def is_at_work(self) -> bool:
        """Returns whether its end is to come, or its threads may yet remove what it has made."""
        if self.outcome is Outcome.PUBLISHED:
            return False
        # One that was abandoned while it was being published removes nothing before it ends.
        may_end = self.outcome is Outcome.PENDING and (not self.is_abandoned or self._publishing)
        return may_end or not self.join(0.0)

    @property
    def state(self) -> State:
        """Returns the outcome once the ranks have agreed on it, and before that this rank's milestone."""
        if self.outcome is Outcome.PENDING:
            return self.save.state
        return State.PUBLISHED if self.outcome is Outcome.PUBLISHED else State.FAILED

    @property
    def records(self) -> Records:
        """Returns what the ranks have sent of their files; empty before all are durable."""
        return self.publisher.records

    # -- polls ------------------------------------------------------------------------------------------

    def poll(self, *, waits: bool = False) -> Outcome:
        """Takes one step of the protocol, for this and all other unfinished saves.

        Collective: every rank calls it equally often, for any of the saves. Waits only for ranks that are a
        whole poll late, and for the previous poll's call on the device.
        """
        is_old_world = self.collectives.distributed and not self.collectives.is_current()
        if is_old_world or self._abandoned_because is not None:
            self._end_alone()
        elif self.outcome is Outcome.PENDING:
            with trainer_held("polls", self.save):
                over = self._polls.poll(self, waits=waits)
            for other in over:
                if other is not self and isinstance(other, Publication):
                    other.save.on_trainer_released()
        return self.outcome

    def wait(self) -> Outcome:
        """Polls until the save is over. Collective: every rank calls it.

        The files of a failed save are removed by then, unless storage takes longer than REMOVAL_SECONDS.
        """
        self.postponement.is_awaited = True
        began, was_publishing = time.monotonic(), self._publishing
        while self.poll(waits=True) is Outcome.PENDING:
            if self._publishing != was_publishing:
                began, was_publishing = time.monotonic(), self._publishing
            waited = time.monotonic() - began
            time.sleep(min(max(_LEAST_POLL_SECONDS, waited * _POLL_SHARE), _MOST_POLL_SECONDS))
        if self.outcome is Outcome.FAILED:
            self.save.join(REMOVAL_SECONDS)
        return self.outcome

    @property
    def is_over(self) -> bool:
        """Returns whether the outcome is known; the same on every rank."""
        return self.outcome is not Outcome.PENDING

    @property
    def sums_flags(self) -> bool:
        """Returns whether the next poll reads flags, and not errors."""
        return self._pending_errors is None

    def flags(self) -> Flags:
        """Returns what this rank adds to the sum."""
        save, near = self.save, self.publisher.near
        is_done = self.publisher.is_done if self._publishing else save.is_durable
        failed, in_place = save.failure is not None, self.publisher.is_manifest_in_place
        offered_bytes = 0 if near is None else near.offered_bytes
        without_copies = near is not None and near.lacks_copies
        return Flags(
            unfinished=int(not is_done),
            failed=int(failed),
            in_place=int(in_place),
            offered_bytes=offered_bytes,
            without_copies=int(without_copies),
            unfinished_rank=0 if is_done else self.collectives.rank,
        )

    def step(self, sums: Flags | None, *, is_first: bool, may_publish: bool) -> bool:
        """Takes one step of the protocol; see polls.Polled."""
        self.save.update()
        self.publisher.look()
        if is_first:  # later ones wait for it
            self._look_if_late(1 if sums is None else max(sums.unfinished, 1))
            if sums is not None and self.collectives.rank == 0 and not self._publishing:
                others = sums.unfinished if self.save.is_durable else 0
                self._lateness_of_others.look(others, sums.unfinished_rank)
        if self._pending_errors is not None:
            self._fail(decode_failures(self._pending_errors.result()))
        elif sums is not None:
            self._act(sums, is_first=is_first, may_publish=may_publish)
        return self._publishing or self.is_over

    def _look_if_late(self, late: int) -> None:
        if not self._publishing:
            awaited = self.save.awaited()
            if awaited is not None and awaited[1]:
                doing, advice = f"{awaited[1]} has not been written", "look at what its source waits for"
                self._lateness.look(awaited, doing, late, advice)
            else:
                self._lateness.look(awaited, "nothing was written to its data file", late)
        elif self.publisher.near is None:  # copies of other nodes' files have deadlines of their own
            moved = None if self.publisher.is_done else ""
            self._lateness.look(moved, "it has not published the checkpoint", late)

    def _act(self, sums: Flags, *, is_first: bool, may_publish: bool) -> None:
        near = self.publisher.near
        if sums.failed:
            self.keeps_files = sums.in_place > 0
            node = socket.gethostname() if self.collectives.distributed else ""
            self._pending_errors = self.collectives.start_gather(encode_failure(self.save.failure, node))
        elif self._pending_records is not None:
            records, self._pending_records = self._pending_records.result(), None
            self._start_publishing(Records(records))
        elif sums.offered_bytes and near is not None and not near.is_sent:
            near.send(self.collectives, sums.offered_bytes)
        elif sums.unfinished:
            return
        elif self._publishing:
            if is_first:
                self.ranks_without_copies = sums.without_copies
                self._end(Outcome.PUBLISHED)
        elif may_publish:
            self._publishing = True
            self._epoch = self._layouts.begin_use()
            record = self.publisher.record()
            self._pending_records = self.collectives.start_gather(record.encode())

    def _start_publishing(self, records: Records) -> None:
        self.publisher.records = records
        try:
            records.check_iterations()
        except DataStatesError as error:  # on all ranks, which have the same records
            self.save.fail(error)
            return
        if records[0].forgets:
            self._layouts.forget(self._epoch)
        self.publisher.start(self.collectives)

    def _end(self, outcome: Outcome) -> None:
        self.outcome, publisher = outcome, self.publisher
        publisher.polls_are_over = True
        if outcome is Outcome.PUBLISHED:
            publisher.published_at = publisher.published_at or time.perf_counter()
        if self._epoch is not None:
            known = publisher.indexes.digests() if outcome is Outcome.PUBLISHED else ()
            self._layouts.end_use(self._epoch, known)
        ended, self._ended = self._ended, None  # a publication that is kept keeps no saver
        if ended is not None:
            ended(self)

    def _fail(self, failed: Mapping[int, str]) -> None:
        """Ends the save on this rank, with the errors of the ranks that have failed."""
        causes = "; ".join(f"rank {rank}: {text}" for rank, text in itertools.islice(failed.items(), 3))
        more = f" (and {len(failed) - 3} more ranks)" if len(failed) > 3 else ""
        context = self.save.context
        self.error = (
            f"saving to {context.directory} failed on {len(failed)} of {self.collectives.size} ranks: "
            f"{causes}{more}. {_KEPT if self.keeps_files else _NOTHING}"
        )
        if not self.keeps_files:
            self.save.cancel_and_remove("another rank failed", failed_elsewhere=True)
        self._end(Outcome.FAILED)

    def abandon(self, reason: str) -> None:
        """Ends the save on this rank, which will not poll again. Not collective."""
        self._abandoned_because = reason
        self.publisher.polls_are_over = True
        if self.outcome is Outcome.PENDING and not self._publishing:
            self.save.cancel_and_remove(reason)
            self.save.drop_sources()

    def end_if_abandoned(self) -> None:
        """Ends a save that nobody may poll again, once its threads are over. Not collective."""
        if self.is_abandoned and self.join(0.0):
            self._end_alone()

    def _end_alone(self) -> None:
        """Ends an abandoned save without the other ranks, which may have gone on or not."""
        if self.outcome is not Outcome.PENDING:
            return
        if self._publishing and self.collectives.size == 1 and self.publisher.join():
            if self.publisher.is_done:
                self._end(Outcome.PUBLISHED)
                return
            self._publishing = self.publisher.is_manifest_in_place
        reason = self._abandoned_because or "torch.distributed was initialized anew, or ended, meanwhile"
        self.abandon(reason)
        if self._publishing:
            self._ended = None  # would remove files that a manifest may name
        said = _UNKNOWN if self._publishing else _NOTHING
        rank, directory = self.collectives.rank, self.save.context.directory
        self.error = f"the save to {directory} was abandoned on rank {rank}: {reason}. {said}"
        self._end(Outcome.FAILED)

    def forget(self) -> None:
        """Leaves the polls of other saves."""
        self._polls.discard(self)

    # -- where another program brings the ranks together (external_ranks.py) --------------------------------

    def contribution(self) -> RankContribution:
        """Returns this rank's contribution to a durable save; from now on a manifest may name its files."""
        self._publishing = True
        return self.publisher.contribution()

    def publish_contributions(
        self, contributions: Sequence[RankContribution], extras: PublicationExtras
    ) -> None:
        """Publishes the contributions of all ranks, in their order: step 4 of the protocol, on this thread.

        Raises:
            SaveFailedError: it failed. `keeps_files` says whether the manifest may be in place.
            BaseException: KeyboardInterrupt and the like (errors.is_interrupt), after the same.
        """
        self.publisher.publish_contributions(contributions, extras)
        if self.save.failure is None:
            self._end(Outcome.PUBLISHED)
            return
        self.keeps_files = self.publisher.is_manifest_in_place
        self._fail({self.collectives.rank: self.save.failure})
        cause = self.save.cause
        if cause is not None and is_interrupt(cause):
            raise cause
        raise SaveFailedError(self.error) from cause

    def remove(self, reason: str) -> None:
        """Cancels a save that nobody will publish, and removes its files by then, as `wait` does."""
        self.save.cancel_and_remove(reason)
        self.save.join(REMOVAL_SECONDS)

    def join(self, seconds: float | None = None) -> bool:
        """Waits until the threads of a save that is over have ended; returns False if one takes longer."""
        return self.save.join(seconds) and self.publisher.join(seconds)
