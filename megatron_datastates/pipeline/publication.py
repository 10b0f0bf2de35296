"""From durable files on every rank to one published checkpoint, or to one agreed failure.

Protocol (all of it on the trainer's thread, but for step 4):
  1. Every poll asks for a sum of flags (not durable, failed, manifest in place) and reads the one asked for
     at the poll before. All ranks read the same sums, so all take the same next step. What a step gathers is
     read at the next poll, too: nothing is read at the poll that asks for it.
  2. Any failure: every rank's error is gathered, and the last poll reads them; all ranks report the same
     text. Each removes its file, unless a manifest that names it may be in place (rank 0 is about to write
     it, or could not sync it).
  3. All durable: one record per rank goes to everybody. The next poll reads them, unless a rank has failed
     meanwhile, which the sum that was asked for with them says. If a layout is new, ranks' own indexes then
     go to rank 0.
  4. Rank 0's publishing thread awaits those (polls see that they are there) and writes the index. It looks
     whether every file that the manifest will name is in the directory with its size. Then it writes the
     manifest (engine/commit.py), looks once more, writes Megatron's metadata.json, and removes what that
     manifest replaced. From the rename of the manifest on, no failure removes a file that it names, not even
     where another manifest is in its place by then: a crash may bring it back.
  5. Polls go on until rank 0 says that it is published.
A directory without a manifest is not a checkpoint; one with a manifest is complete.
tests/model/ searches all interleavings of this protocol between two runs, with crashes, failures and prune.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import itertools
import logging
import threading
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from megatron_datastates.engine.commit import remove_replaced, write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.errors import DataStatesError, FormatError
from megatron_datastates.format.directory import METADATA_NAME
from megatron_datastates.format.features import COMPATIBLE_CHECKSUMS
from megatron_datastates.format.index import Index, index_entry, merge_indexes
from megatron_datastates.format.manifest import FileEntry, IndexEntry, Manifest, OtherFile
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.agreement import Arriving, Collectives, Pending
from megatron_datastates.pipeline.held import holding
from megatron_datastates.pipeline.presence import (
    described,
    files_of,
    has_whole,
    named_by_save,
    require_files,
    require_published,
    sync_above,
)
from megatron_datastates.pipeline.records import RankRecord, decode_failure, encode_failure
from megatron_datastates.pipeline.save import RankSave, State
from megatron_datastates.plan.coverage import coverage_faults

logger = logging.getLogger(__name__)
_BLOCKING_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 10.0  # with a device, once the save is abandoned or has failed
_KEPT_INDEXES = 2  # persistent and non-persistent saves alternate
_NOTHING = "Nothing was published; earlier checkpoints are as they were."
_KEPT = "Its manifest may be in place, so its files were kept."


class Outcome(enum.Enum):
    """Of a save, alike on every rank."""

    PENDING = "pending"
    PUBLISHED = "published"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class MergedIndex:
    """The index of a checkpoint, as it is stored."""

    entry: IndexEntry
    encoded: bytes


class LayoutStore:
    """Which layouts rank 0 knows, so that a save with an old one gathers, merges and hashes nothing.

    Every rank keeps the digests of its own; rank 0 keeps all ranks' indexes and the merged ones used last.
    """

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        # One at a time: a save removes what earlier ones of its run have left, and must not do so between
        # the look and the rename of one of them.
        self.publishing = threading.Lock()
        self._parts: dict[tuple[int, bytes], bytes] = {}
        self._merged: dict[tuple[tuple[int, bytes], ...], MergedIndex] = {}

    def add(self, rank: int, digest: bytes, index: bytes) -> None:
        """Rank 0 has received a rank's own index."""
        self._parts[rank, digest] = index

    def merged(self, records: list[RankRecord]) -> MergedIndex:
        """The index of a checkpoint with these files.

        Raises:
            FormatError: ranks disagree on a tensor, or together do not hold all of it, or some of it twice.
        """
        wanted = tuple((record.rank, record.layout_digest) for record in records)
        found = self._merged.pop(wanted, None) or self._merge(wanted)
        kept = list(self._merged.items())[1 - _KEPT_INDEXES :]
        self._merged = dict([*kept, (wanted, found)])
        return found

    def _merge(self, wanted: tuple[tuple[int, bytes], ...]) -> MergedIndex:
        return merge_layouts((key[0], self._parts[key]) for key in wanted)


def merge_layouts(parts: Iterable[tuple[int, bytes]]) -> MergedIndex:
    """The index of a checkpoint from (rank, own index) of each file, in the order of the files.

    Raises:
        FormatError: as LayoutStore.merged.
    """
    indexes = (Index.decode(data, f"the layout of rank {rank}", 1) for rank, data in parts)
    whole = merge_indexes((part, file) for file, part in enumerate(indexes))
    told = (fault for key, entry in whole.tensors.items() for fault in coverage_faults(key, entry))
    faults = list(itertools.islice(told, 3))
    if faults:
        raise FormatError(f"the state of all ranks together is not whole: {'; '.join(faults)}")
    encoded = whole.encode(packed=True)
    return MergedIndex(index_entry(encoded), encoded)


@dataclasses.dataclass(frozen=True)
class Labels:
    """What a manifest tells beside its files."""

    parallel: dict[str, int] = dataclasses.field(default_factory=dict)
    other_files: tuple[str, ...] = ()  # that somebody else may have written into the directory before
    superseded: tuple[str, ...] = ()  # patterns of files that belonged to a checkpoint in another format
    metadata: bytes = b""  # content of metadata.json; none where Megatron is not concerned


class Publication:
    """One save of all ranks. Use `poll` until it is no longer pending, or `wait`."""

    def __init__(
        self,
        save: RankSave,
        collectives: Collectives,
        layouts: LayoutStore,
        faults: Faults,
        labels: Labels | None = None,
    ) -> None:
        self.save = save
        self.outcome = Outcome.PENDING
        self.error: str | None = None  # of the whole save, the same text on every rank
        self.records: list[RankRecord] = []
        self.hold_report = False  # set while somebody will hold the trainer for this save once more
        self.is_reported = False
        self.collectives = collectives
        self._layouts = layouts
        self._faults = faults
        self._labels = labels or Labels()
        # What the next poll reads: flags, or errors alone; and records while ranks have sent theirs.
        self._flags_asked: Pending[list[int]] | None = None
        self._errors_asked: Pending[list[bytes]] | None = None
        self._records_asked: Pending[list[bytes]] | None = None
        self._indexes_asked: Arriving[list[bytes]] | None = None  # read by rank 0's publishing thread
        self._indexes_arrived = threading.Event()
        self._keep_file = False  # although the save fails
        self.refused = False  # it was never begun, on any rank, and waits to be told so
        self._abandoned = False
        self._publishing = False  # records went out: from here on a manifest may name this rank's file
        self._manifest_in_place = False  # rank 0: it may be, or may come to be
        self._published = threading.Event()
        self._publisher: threading.Thread | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether this was begun and is not over. Alike on every rank, between polls: outcomes are agreed."""
        return self.outcome is Outcome.PENDING and not (self.refused or self._abandoned)

    @property
    def state(self) -> State:
        """How far it has come: agreed once it is published or failed, before that on this rank."""
        if self.outcome is Outcome.PENDING:
            return self.save.state
        return State.PUBLISHED if self.outcome is Outcome.PUBLISHED else State.FAILED

    # -- polls ------------------------------------------------------------------------------------------

    def poll(self) -> Outcome:
        """Takes one step. Collective: every rank calls it equally often.

        Waits only for ranks that are a poll late, and for the device to reach the place of the poll before.
        """
        if self.outcome is not Outcome.PENDING:
            return self.outcome
        with holding("polls", self.save):
            FENCE.polled()
            self.save.advance()
            self._look_for_indexes()
            if self._errors_asked is not None:
                self._fail(self._errors_asked.result())
            elif self._flags_asked is not None:
                self._act(*self._flags_asked.result())
            if self.outcome is Outcome.PENDING and self._errors_asked is None:
                self._flags_asked = self.collectives.start_sum(self._flags())
        return self.outcome

    def wait(self) -> Outcome:
        """Polls until the outcome is there. Collective, so no rank ever waits alone before a poll."""
        while self.poll() is Outcome.PENDING:
            time.sleep(_BLOCKING_POLL_SECONDS)
        return self.outcome

    def _flags(self) -> list[int]:
        save = self.save
        unfinished = self._publishing and self.collectives.rank == 0 and not self._published.is_set()
        if not self._publishing:
            unfinished = not save.is_durable
        return [int(unfinished), int(save.failure is not None), int(self._manifest_in_place)]

    def _act(self, unfinished: int, failed: int, in_place: int) -> None:
        if failed:
            self._keep_file = in_place > 0
            self._errors_asked = self.collectives.start_gather(encode_failure(self.save.failure))
        elif self._records_asked is not None:
            records, self._records_asked = self._records_asked.result(), None
            self._exchange([RankRecord.decode(data) for data in records])
        elif unfinished:
            return
        elif self._publishing:
            self._end(Outcome.PUBLISHED)
        else:
            self._publishing = True
            self._records_asked = self.collectives.start_gather(self._record().encode())

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self.save.plan is not None and outcome is Outcome.PUBLISHED:
            self._layouts.known.add(self.save.plan.layout.digest)

    def _fail(self, failures: list[bytes]) -> None:
        told = [(rank, text) for rank, text in enumerate(map(decode_failure, failures)) if text is not None]
        causes = "; ".join(f"rank {rank}: {text}" for rank, text in told[:3])
        more = f" (and {len(told) - 3} more ranks)" if len(told) > 3 else ""
        context = self.save.context
        self.error = (
            f"saving to {context.directory} failed on {len(told)} of {self.collectives.size} ranks: "
            f"{causes}{more}. {_KEPT if self._keep_file else _NOTHING}"
        )
        if not self._keep_file:
            self.save.give_up("another rank failed")
        self._end(Outcome.FAILED)

    def abandon(self, reason: str) -> None:
        """This rank will poll no more. Not collective."""
        self._abandoned = True
        if self.outcome is Outcome.PENDING and not self._publishing:
            self.save.give_up(reason)

    # -- all ranks are durable --------------------------------------------------------------------------

    def _exchange(self, records: list[RankRecord]) -> None:
        self.records = records
        sizes = [record.layout_bytes for record in records]
        if any(sizes):  # alike on every rank: all have read the same records
            # As the record says: another save may have made the layout known since.
            own = self._own_index() if sizes[self.collectives.rank] else b""
            self._indexes_asked = self.collectives.gather_to_first(own, sizes)
            self._look_for_indexes()
        if self.collectives.rank == 0:
            publisher = threading.Thread(target=self._publish, name="datastates-publish", daemon=True)
            try:
                self._manifest_in_place = True  # unless the thread finds that it is not
                publisher.start()
                self._publisher = publisher
            except RuntimeError as error:  # no thread to be had, on this rank alone
                self._manifest_in_place = False
                self.save.fail(error)

    def _look_for_indexes(self) -> None:
        # Here, on the trainer's thread: see Arriving.
        if self._indexes_asked is not None and self._indexes_asked.is_over():
            self._indexes_arrived.set()

    def _own_index(self) -> bytes:
        return self.save.plan.layout.index if self.save.plan is not None else b""

    def _record(self) -> RankRecord:
        save, file, times = self.save, self.save.file, self.save.times()
        digest = save.plan.layout.digest if save.plan is not None else bytes(16)
        return RankRecord(
            rank=self.collectives.rank,
            has_file=file is not None,
            file_bytes=file.bytes if file else 0,
            footer_offset=file.footer_offset if file else 0,
            footer_crc=file.footer_crc if file else 0,
            layout_digest=digest,
            layout_bytes=0 if digest in self._layouts.known else len(self._own_index()),
            held=save.held.total,
            fence=save.fence_seconds,
            stream_wait=times["stream_wait"],
            staging=times["staging"],
            writing=times["writing"],
            durable=times["durable"],
            slot_wait=times["slot_wait"],
        )

    # -- rank 0's publishing thread ---------------------------------------------------------------------

    def _publish(self) -> None:
        try:
            self._await_indexes()
        except Exception as error:
            self._manifest_in_place = False
            self.save.fail(error)
            return
        with self._layouts.publishing:
            self._publish_alone()

    def _publish_alone(self) -> None:
        context = self.save.context
        directory, encoded, own_index = context.directory, b"", ""
        renamed = threading.Event()
        try:
            manifest, index = self._manifest()
            if not manifest.files:
                directory.mkdir(parents=True, exist_ok=True)  # no rank had anything to write
            elif not directory.is_dir():
                raise DataStatesError(f"{directory} is gone, and with it all that ranks have written")
            own_index = manifest.index.name
            write_whole(directory / own_index, index.encoded, self._faults, context.save_id)
            require_files(directory, manifest)
            replaced = files_of(directory / MANIFEST_NAME)
            encoded = manifest.encode()
            sync_above(directory)
            write_whole(directory / MANIFEST_NAME, encoded, self._faults, context.save_id, renamed.set)
            require_published(directory, manifest, encoded)
            self._write_metadata(directory / METADATA_NAME)
        except Exception as error:
            in_place = renamed.is_set() or has_whole(directory / MANIFEST_NAME, encoded)
            if own_index and not in_place:
                with contextlib.suppress(OSError):
                    (directory / own_index).unlink()
            self._manifest_in_place = in_place
            self.save.fail(error)
            return
        try:
            keep = {manifest.index.name, *(file.name for file in manifest.files)}
            keep |= {other.name for other in manifest.others}
            remove_replaced(directory, keep, context.save_id, replaced, self._labels.superseded)
        except OSError as error:
            logger.warning("left-overs of earlier saves were not removed from %s: %s", directory, error)
        self._published.set()  # last, so that no later save publishes while this one still removes

    def _write_metadata(self, path: Path) -> None:
        content = self._labels.metadata
        if content and not has_whole(path, content):
            write_whole(path, content, self._faults, self.save.context.save_id)

    def _await_indexes(self) -> None:
        """Adds the indexes that ranks sent. A device that hangs keeps no save for long that is over."""
        if self._indexes_asked is None:
            return
        patience = _PATIENCE_SECONDS
        while not self._indexes_arrived.wait(_BLOCKING_POLL_SECONDS):
            if self.outcome is Outcome.PENDING and not self._abandoned:
                continue  # the trainer polls, and looks
            if self._indexes_asked.is_over():
                break
            patience -= _BLOCKING_POLL_SECONDS
            if patience <= 0.0:
                raise DataStatesError("the ranks' indexes did not arrive before the save was abandoned")
        for record, index in zip(self.records, self._indexes_asked.result(), strict=True):
            if index:
                self._layouts.add(record.rank, record.layout_digest, index)

    def _manifest(self) -> tuple[Manifest, MergedIndex]:
        context = self.save.context
        records = [record for record in self.records if record.has_file]
        index = self._layouts.merged(records)
        files = [
            FileEntry(
                name=context.save_id.data_file_name(record.rank),
                rank=record.rank,
                bytes=record.file_bytes,
                footer_offset=record.footer_offset,
                footer_crc=record.footer_crc,
            )
            for record in records
        ]
        manifest = Manifest(
            run_id=f"{context.save_id.run_id:016x}",
            ordinal=context.save_id.ordinal,
            world_size=context.world_size,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            index=named_by_save(index.entry, context.save_id),
            files=files,
            iteration=context.iteration,
            parallel=self._labels.parallel,
            others=self._others(),
            writer=releases(),
            compatible=COMPATIBLE_CHECKSUMS,
        )
        return manifest, index

    def _others(self) -> list[OtherFile]:
        paths = [self.save.context.directory / name for name in self._labels.other_files]
        return [described(path, self.save.check_object) for path in paths if path.is_file()]

    def join(self) -> None:
        """Waits for the threads of a save that is over."""
        self.save.join()
        self.join_publisher()

    def join_publisher(self) -> None:
        """Waits until a manifest that is being written is in place, or has failed."""
        if self._publisher is not None:
            self._publisher.join()


def releases() -> dict[str, str]:
    """Of the libraries involved, for a manifest."""
    found = {}
    for name in ("megatron-datastates", "megatron-core", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
