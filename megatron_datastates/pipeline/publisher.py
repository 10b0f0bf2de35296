"""One rank's part in publishing a save: what it sends, and what its thread writes beside the trainer.

What belongs here: steps 3 and 4 of the protocol in publication.py, as far as one rank does them alone. Rank
0 writes index and manifest into the checkpoint's directory; if files are in near tiers, it prepares them for
all ranks instead, and the first rank of each node stores them. What does not: which step comes next
(publication.py).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from megatron_datastates.engine.faults import Faults
from megatron_datastates.flag import Flag
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.near.publishing import NearPlace, NearPublishing
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.publishing.directory_publisher import DirectoryPublisher, SmallFiles
from megatron_datastates.pipeline.publishing.documents import PublicationExtras, small_files
from megatron_datastates.pipeline.publishing.indexes import PATIENCE_SECONDS, IndexExchange
from megatron_datastates.pipeline.publishing.layouts import LayoutStore
from megatron_datastates.pipeline.saving.background import AFTER_POLL_SECONDS
from megatron_datastates.pipeline.saving.rank_save import RankSave
from megatron_datastates.pipeline.saving.records import RankContribution, RankRecord, Records
from megatron_datastates.pipeline.saving.stable import stable_fields
from megatron_datastates.threads import BackgroundThread, is_in_background, lost


class Publisher:
    """This rank's part in publishing one save.

    Args:
        far_published: called by rank 0's thread, with False, as the last act of publishing in the directory.

    Attributes:
        place: set before the save starts.
        records: of all ranks; set before `start`.
        near: once records are known, if there are files in near tiers.
        is_manifest_in_place: the manifest is in its place, or may yet be; also after a failure.
        published_at: by perf_counter: on rank 0 once it has published, elsewhere once that is known.
        polls_are_over: nobody polls the save any more; set by the trainer's thread.
    """

    def __init__(
        self,
        save: RankSave,
        layouts: LayoutStore,
        faults: Faults,
        extras: PublicationExtras,
        far_published: Callable[[SaveId, bool], None] | None,
    ) -> None:
        self._save, self._faults = save, faults
        self.layouts, self.extras, self.far_published = layouts, extras, far_published
        self.indexes = IndexExchange(save, layouts)
        self.place = NearPlace()
        self.records = Records()
        self.near: NearPublishing | None = None
        self.is_manifest_in_place = False
        self.published_at: float | None = None
        self.polls_are_over = False
        self._done = Flag()
        self._thread: BackgroundThread | None = None
        self._written_as: dict[int, SaveId] = {}  # the save ids of ranks' own files, if not the save's

    @property
    def is_done(self) -> bool:
        """Returns whether this rank has done its part."""
        return self._done.is_set()

    def join(self, seconds: float | None = None) -> bool:
        """Waits until no manifest is being written any more; returns False if that takes longer."""
        return self._thread is None or self._thread.join(seconds)

    # -- the trainer's thread ---------------------------------------------------------------------------

    def record(self) -> RankRecord:
        """Returns what this rank sends to all ranks."""
        save, file, times = self._save, self._save.file, self._save.times()
        layouts, stable = self.indexes.own, save.stable.linkable if save.stable is not None else None
        index_bytes, providers_bytes = self.indexes.unknown_bytes()
        return RankRecord(
            rank=save.context.rank,
            has_file=file is not None,
            file_bytes=file.bytes if file else 0,
            footer_offset=file.footer_offset if file else 0,
            footer_crc=file.footer_crc if file else 0,
            layout_digest=layouts[0].digest if layouts else bytes(16),
            layout_bytes=index_bytes[0] if layouts else 0,
            held=save.held.total,
            fence=save.fence_seconds,
            stream_wait=times["stream_wait"],
            staging=times["staging"],
            writing=times["writing"],
            durable=times["durable"],
            slot_wait=times["slot_wait"],
            providers_digest=self.indexes.providers[0],
            providers_bytes=providers_bytes,
            node=self.place.node,
            is_near=save.context.near is not None,
            forgets=save.context.rank == 0 and self.layouts.should_forget(),
            host=self.place.host,
            endpoint=self.place.endpoint,
            iteration=-1 if save.context.iteration is None else save.context.iteration,
            **(stable_fields(stable, layouts[1].digest, index_bytes[1]) if stable else {}),
        )

    def start(self, collectives: Collectives) -> None:
        """Starts to publish, now that the records of all ranks are here. Collective."""
        records = self.records
        if records.columns["is_near"].any():
            self.near = NearPublishing(
                records, self._save.context, self.layouts, self._faults, self.place.replicas
            )
        elif collectives.rank != 0:
            self._done.set()  # all that is left is rank 0's
        sizes = records.sent_bytes()
        if sizes.any():  # the same on every rank: all have read the same records
            self.indexes.start(collectives, sizes)
        if collectives.rank == 0:
            self.layouts.add_providers(*self.indexes.providers)
            self._run(self._publish)

    def look(self) -> None:
        """Notices what has arrived from other ranks; starts this rank's part of publishing near."""
        self.indexes.look()
        if self._thread is not None and self._thread.is_lost and self._save.failure is None:
            self.is_manifest_in_place &= self._thread.has_begun
            self._save.fail(lost("publishes the save"))
        near = self.near
        if near is None or not near.has_arrived():
            return
        if near.has_part:
            self._run(functools.partial(self._publish_near, near), writes_manifest=near.stores)
        else:
            self._done.set()

    def _run(self, function: Callable[[], None], *, writes_manifest: bool = True) -> None:
        """Runs a part of publishing beside the trainer, and after those of earlier saves."""
        delay = 0.0 if self._save.postponement.is_awaited else AFTER_POLL_SECONDS
        before = self.layouts.publisher
        thread = BackgroundThread(function, after=before, delay=delay)
        try:
            self.is_manifest_in_place = writes_manifest  # until the thread reports that it is not
            thread.start()
            self._thread = self.layouts.publisher = thread
            return
        except RuntimeError as error:  # no thread could be started, on this rank only
            cause = error.with_traceback(None)
        # While the interpreter ends, Python starts no threads; the program may still wait for its saves. This
        # waits for an earlier one, but not for long: that may need something that only polls notice.
        if before is None or before.join(PATIENCE_SECONDS):
            function()
        else:
            self.is_manifest_in_place = False
            self._save.fail(cause)

    # -- where another program brings the ranks together (external_ranks.py) --------------------------------

    def contribution(self) -> RankContribution:
        """Returns this rank's contribution to a durable save."""
        record = self.record()
        # A rank that stores nothing has a layout, and no data file.
        indexes = tuple(layout.index for layout in self.indexes.own[: len(record.layouts())])
        return RankContribution(
            self._save.context.save_id, record.encode(), indexes, self.indexes.providers[1]
        )

    def publish_contributions(
        self, contributions: Sequence[RankContribution], extras: PublicationExtras
    ) -> None:
        """Publishes all ranks' contributions, in their order, on this thread. A failure is the save's."""
        self.records, self.extras = Records(b"".join(one.record for one in contributions)), extras
        epoch = self.layouts.begin_use()
        try:
            if self.layouts.should_forget():
                self.layouts.forget(epoch)
            self._written_as = self.indexes.store_contributions(self.records, contributions)
            self._publish_here()
        finally:
            self.layouts.end_use(epoch, ())  # this process sends nothing to itself: it needs to know nothing

    # -- the publishing thread --------------------------------------------------------------------------

    def _publish(self) -> None:
        """Publishes on rank 0; or prepares what all ranks need to do so near."""
        try:
            # The trainer's own thread, where no other could be started, has to look itself.
            self.indexes.store(self.records, lambda: self.polls_are_over or not is_in_background())
            if self.near is not None:  # changes nothing in --save: waits for no drain that publishes there
                self.is_manifest_in_place = False  # until this rank stores it
                self.near.offer(self._new_small_files())
                return
        except BaseException as error:  # or polls would wait forever
            self.is_manifest_in_place = False
            self._save.fail(error)
            return
        self._publish_here()

    def _publish_here(self) -> None:
        """Publishes in the checkpoint's directory."""
        with self.layouts.publishing:
            publisher: DirectoryPublisher | None = None
            try:
                publisher = self.in_directory(self._new_small_files())
                publisher.publish()
                if self.far_published is not None:
                    self.far_published(self._save.context.save_id, False)
            except BaseException as error:  # as above
                self.is_manifest_in_place = publisher is not None and publisher.is_in_place
                self._save.fail(error)
                return
            self._note_done()  # last: no later save publishes while this one still removes files

    def _publish_near(self, near: NearPublishing) -> None:
        try:
            near.do_part(lambda: self.polls_are_over)
        except BaseException as error:  # as above
            self.is_manifest_in_place = near.is_in_place
            self._save.fail(error)
            return
        self._note_done()

    def _note_done(self) -> None:
        self.published_at = time.perf_counter()
        self._done.set()

    def _new_small_files(self) -> SmallFiles:
        return small_files(self._save, self.records, self.layouts, self.extras, self._written_as)

    def in_directory(self, files: SmallFiles) -> DirectoryPublisher:
        """Returns what publishes this save in the directory of its checkpoint."""
        context, superseded = self._save.context, self.extras.superseded
        return DirectoryPublisher(context.directory, context.save_id, files, self._faults, superseded)
