"""The drain: brings what was published near into the directories of the checkpoints, in the background.

On the rank that stores a node's manifests, one thread copies the node's data files, one save after the
other. On rank 0 the thread also publishes (publish_queue.py): when all files of a save are in the
checkpoint's directory, wherever they came from, it publishes the manifest there. The shared directory is all
that nodes need to know of each other: no collective call is made, and the trainer waits for nothing.

A save is far when it is published in its checkpoint's directory. What fails is tried again for as long as
the process lives; a source that is missing or damaged is given up. No save waits for an older one that is
complete and cannot be published. What is not far when a job ends, the next one copies to its directory
(recovery.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_datastates import stores
from megatron_datastates.config import Options
from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import DataStatesError, StorageError
from megatron_datastates.files import is_object
from megatron_datastates.format.manifest import FileEntry
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.near.copying import Copier, Limit, SourceError
from megatron_datastates.pipeline.near.job_notes import JobNote, JobNotes
from megatron_datastates.pipeline.near.near_save import NearSave
from megatron_datastates.pipeline.near.publish_queue import REPORTED_ATTEMPT, PublishQueue
from megatron_datastates.pipeline.near.room import Room
from megatron_datastates.threads import BackgroundThread, lost

logger = logging.getLogger(__name__)
_COPIES = 5  # files at a time
_UPLOADS = 2  # the same to an object store: the client sends several parts of each at once
_LOOK_SECONDS = 0.5  # between two looks for other nodes' files
_LOOK_SECONDS_OBJECTS = 2.0  # the same in an object store, which counts requests
_ROOM_SECONDS = 10.0  # between two looks for what rank 0 has published
_PAUSES = (0.5, 2.0, 8.0, 30.0, 60.0)  # before the next attempt, in seconds; the last one from then on
_LONGEST_PAUSE_AT_THE_END = 3.0
_STALLED_SECONDS = 60.0  # at the end of a job: without any progress
_STALLED_SECONDS_OBJECTS = 600.0  # to object stores: of parts under way and of other nodes, nothing is seen


class Drain:
    """What this process brings from its near tier to the checkpoints' directories.

    Args:
        report: gets a report of each save that became far; on rank 0.
    """

    def __init__(
        self,
        options: Options,
        faults: Faults,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self._options = options
        self._faults = faults
        self._report = report
        self._limit = Limit(options.drain_limit)
        self._copier = Copier(options, faults, self._limit)
        # `with` this lock, not the condition: an interrupt within Condition.__enter__ may leave it held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._to_copy: deque[NearSave] = deque()
        self._queue = PublishQueue(  # on rank 0
            faults,
            self._pause_seconds,
            before=self._write_new_notes,  # the list of jobs says which of two saves is the later one
            published=self._note_far,
            progress=self._note_progress,
        )
        # All that are still near, in the order in which they began. Save ids do not show it: after a restart
        # within the process, they are another run's. Replaced as a whole, and read without the lock.
        self._kept: list[NearSave] = []
        self._copied_to: list[Path] = []  # the directory that the last save was copied to, near or not by now
        self._may_evict = False  # something has changed since room was made
        self._notes = JobNotes()
        self._room = Room(options.near_keep)
        self._thread: BackgroundThread | None = None
        self._has_ended = False  # that thread, or will not look at saves again
        self._closing = False
        self._abandoned = False
        self._progress = time.monotonic()
        self._progress_at_last_wait = 0.0  # `_progress` when a wait for all stopped; 0: wait
        self._failing_since: float | None = None  # copies, while the job ends
        self._left: list[NearSave] = []  # abandoned at the job's end, and nothing later was copied

    # -- the trainer's thread ---------------------------------------------------------------------------

    def add(self, save: NearSave) -> None:
        """Takes over a save that was just published near. Never raises."""
        self._room.begin(save)
        with self._lock:
            self._kept = [*self._kept, save]  # saves end in the order in which they began
            if save.is_drained:
                self._to_copy.append(save)
            self._progress_at_last_wait = 0.0  # for this save
            self._note_change()
        self._start(f"{save.name} stays")

    def note_job(self, note: JobNote, folders: Sequence[Path]) -> None:
        """Notes in these folders of a run that this job is the last that saves. Never raises."""
        with self._lock:
            self._notes.add(note, folders)
            self._changed.notify_all()
        if folders:
            self._start("checkpoints stay")

    def _start(self, otherwise: str) -> None:
        self._reopen()  # the end of training may have abandoned its wait, and the thread has ended since
        if self._thread is None or self._thread.is_lost:
            thread = BackgroundThread(self._run)
            try:
                thread.start()
            except RuntimeError as error:
                logger.error("%s in the near tier: no thread could be started (%s)", otherwise, error)
                return
            self._thread = thread

    def note_published(self, *, is_far: bool) -> None:
        """Notes a published save of this job of which this process has nothing in its near tier.

        Args:
            is_far: it was published in its directory, without a near tier.
        """
        with self._lock:
            self._room.note_published(is_far=is_far)
            self._note_change()

    def note_failed(self, near: Path, save_id: SaveId, withdraw: Callable[[], bytes]) -> None:
        """Notes a failed save; as Room.note_failed."""
        with self._lock:
            self._room.note_failed(near, save_id, withdraw)
            self._note_change()
        self._start("files of a failed save stay")

    def _note_change(self) -> None:
        self._may_evict = True
        self._changed.notify_all()

    def close(self, *, abandon: bool) -> None:
        """Waits until the newest save, and all that were to be drained, are far; or abandons them.

        Waits for as long as there is progress on this node or, on rank 0, on another. If it has waited in
        vain, a further call waits only if there is a further save, or was progress since.

        Args:
            abandon: the program has failed: leave everything to the job that follows.
        """
        if self._thread is None:
            return
        if self._thread.is_lost and not abandon:
            self._start("checkpoints stay")
        with self._lock:
            newest = self._kept[-1] if self._kept else None
        if newest is not None and not abandon:
            self._drain_now(newest)
        with self._lock:
            pending = [*self._to_copy, *self._queue.saves]
            self._closing, self._abandoned = True, abandon
            self._limit.set(0)  # training is over, and the job waits for this
            self._changed.notify_all()
        if pending and not abandon:
            logger.info("datastates: draining %s to %s", _names(pending), pending[-1].far.parent)
        if self._progress != self._progress_at_last_wait:
            self._progress = time.monotonic()
        while not abandon and not self._thread.join(_LOOK_SECONDS):
            if time.monotonic() - self._progress > self._stalled_seconds():
                self._progress_at_last_wait = self._progress
                break
        with self._lock:
            left = [*self._left, *self._to_copy, *self._queue.saves]
        if left:
            logger.warning(
                "%s: published in the near tiers only; the next job that loads from %s with "
                "--datastates-near copies the newest one there before it resumes",
                _names(left),
                left[-1].far.parent,
            )

    def _drain_now(self, save: NearSave) -> None:
        """Drains a save that was to stay near."""
        with self._lock:
            if not save.is_drained:
                save.is_drained = True
                self._to_copy.append(save)

    def finish_objects(self) -> None:
        """Waits as `close` does if checkpoints go to an object store, and takes further saves afterwards.

        For the end of training: an interpreter that is ending starts no threads, so that clients of object
        stores send one part at a time.
        """
        if not any(is_object(save.far) for save in self._kept):
            return
        self.close(abandon=False)
        self._reopen()

    def _reopen(self) -> None:
        """Takes further saves after a `close`, whether the thread has ended with it or not."""
        with self._lock:
            if not self._closing or self._abandoned:
                return
            self._closing, self._failing_since = False, None
            self._to_copy, self._left = deque([*self._left, *self._to_copy]), []
            self._limit.set(self._options.drain_limit)
            if self._has_ended:
                self._thread, self._has_ended = None, False

    def _stalled_seconds(self) -> float:
        with self._lock:
            in_store = any(is_object(save.far) for save in (*self._to_copy, *self._queue.saves))
        return _STALLED_SECONDS_OBJECTS if in_store else _STALLED_SECONDS

    # -- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._notes.write()
            with self._lock:
                save = self._to_copy[0] if self._to_copy else None
                has_more = self._notes.has_new or self._may_evict
                if self._abandoned or (self._closing and not has_more and self._is_done()):
                    self._has_ended = True
                    return
            self._publish_and_evict()  # before a copy, which may take long
            if save is not None:
                self._copy_or_pause(save)
            with self._lock:
                has_work = bool(self._to_copy) or self._may_evict or self._notes.has_new
                if not (has_work or (self._closing and self._is_done())):
                    self._changed.wait(self._look_seconds())

    def _publish_and_evict(self) -> None:
        """Does the work that must not wait for a copy. Never raises."""
        try:
            self._publish_what_is_complete()
            self._evict()
        except Exception:
            logger.exception("unexpected error in the drain, which continues; please report it")
            time.sleep(_LOOK_SECONDS)

    def _look_seconds(self) -> float | None:
        """Returns how long to wait for what other nodes do; None if there is nothing to wait for."""
        if not self._queue.saves and not self._closing:
            return None if self._is_done() else _ROOM_SECONDS
        in_store = bool(self._queue.saves) and is_object(self._queue.saves[0].far)
        return _LOOK_SECONDS_OBJECTS if in_store else _LOOK_SECONDS

    def _copy_or_pause(self, save: NearSave) -> None:
        is_ending = self._closing  # an attempt that began before may have met what is over by now
        try:
            self._copy(save)
        except Exception as error:
            if self._abandoned:
                return
            save.attempts += 1
            is_lost = isinstance(error, SourceError) or (
                # Unreadable for a while. Later saves must not wait for it forever.
                isinstance(error, StorageError)
                and save.attempts >= REPORTED_ATTEMPT
                and len(self._to_copy) > 1
            )
            has_tried = is_ending and save.attempts >= REPORTED_ATTEMPT
            is_left = not is_lost and has_tried and self._fails_for_long()
            is_given_up = is_lost or is_left
            if is_given_up or save.attempts == REPORTED_ATTEMPT:
                logger.error(
                    "%s was not copied from %s to %s: %s%s",
                    save.name,
                    save.near,
                    save.far,
                    error,
                    "" if is_given_up else "; it is tried again",
                )
            with self._lock:
                if is_given_up:
                    self._to_copy.remove(save)
                    self._left += [save] * is_left
                elif not (self._may_evict or self._abandoned):  # else there is something else to do
                    self._changed.wait(self._pause_seconds(save.attempts))
            return
        self._copied_to, self._failing_since = [save.far], None
        with self._lock:
            self._to_copy.remove(save)
            self._left.clear()
            self._may_evict = True  # earlier ones may have become far meanwhile
            save.attempts = 0
            if save.publisher is not None:
                self._queue.add(save)

    def _fails_for_long(self) -> bool:
        """Returns whether no copy has succeeded for so long, at the job's end, that the wait is over.

        An attempt that fails may have moved many bytes: it is no lack of progress.
        """
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        return time.monotonic() - self._failing_since > self._stalled_seconds()

    def _copy(self, save: NearSave) -> None:
        """Copies the node's files of a save. Raises the first error, once all threads are done."""
        begin, waiting = time.monotonic(), deque(save.files)
        errors: list[BaseException] = []

        def work() -> None:
            with contextlib.suppress(IndexError):
                while not errors:
                    file = waiting.popleft()
                    try:
                        self._copy_file(save, file)
                    except BaseException as error:  # a panic of a client in Rust is no Exception
                        errors.append(error)

        copies = _UPLOADS if is_object(save.far) else _COPIES
        threads = [BackgroundThread(work) for _ in range(min(copies, len(waiting)))]
        started = []
        for thread in threads:
            with contextlib.suppress(RuntimeError):  # no thread can be started: this one does the work
                thread.start()
                started.append(thread)
        if not started:
            work()
        for thread in started:
            while not thread.join(_LOOK_SECONDS):  # no other save waits for this copy, which may take long
                self._write_new_notes()
                self._publish_and_evict()
        if any(thread.is_lost for thread in started):
            raise lost("copies files")
        if errors:
            first = errors[0]
            if isinstance(first, Exception):
                raise first
            raise DataStatesError(f"unexpected {type(first).__name__}: {first}") from first
        save.copied_seconds = time.monotonic() - begin

    def _copy_file(self, save: NearSave, file: FileEntry) -> None:
        assert save.near is not None
        target = save.far / file.name
        if file.save_id:  # of an earlier save: it may be in the directory of that one
            kept = [one.far for one in reversed(self._kept) if one.save_id != save.save_id]
            for earlier in [*self._copied_to, *kept]:
                with contextlib.suppress(OSError):
                    save.far.mkdir(parents=True, exist_ok=True)
                    _link(earlier / file.name, target)
                    break

        def moved(count: int) -> None:
            if self._abandoned:
                raise DataStatesError("given up: the program ends")
            save.copied_bytes += count
            self._note_progress()

        self._copier.copy(save.near / file.name, target, save.small_files.manifest, file, moved)

    def _publish_what_is_complete(self) -> None:
        count = len(self._queue.saves)
        try:
            self._queue.publish_what_is_complete(looks_at_bytes=self._closing)
        finally:
            with self._lock:
                self._may_evict = self._may_evict or len(self._queue.saves) < count

    def _note_far(self, save: NearSave) -> None:
        self._room.note_published(is_far=True)
        self._report(save.report())

    def _note_progress(self) -> None:
        self._progress = time.monotonic()

    def _write_new_notes(self) -> None:
        if self._notes.has_new:
            self._notes.write()

    def _pause_seconds(self, attempts: int) -> float:
        seconds = _PAUSES[min(attempts, len(_PAUSES)) - 1]
        return min(seconds, _LONGEST_PAUSE_AT_THE_END) if self._closing else seconds

    def _evict(self) -> None:
        """Makes room in the near tier, if something has changed. An evicted save is no longer near."""
        with self._lock:
            may_evict, self._may_evict = self._may_evict, False
            busy = [*self._to_copy, *self._queue.saves]
            # Nothing says when rank 0 publishes what another node has copied.
            looks = not busy and not self._is_done()
        if not (may_evict or (looks and any(save.is_far for save in self._kept))):
            return
        gone = self._room.make(self._kept, lambda save: save in busy, self._drain_now)
        with self._lock:
            self._kept = [save for save in self._kept if save not in gone]

    def _is_done(self) -> bool:
        """Returns whether nothing is left: at a job's end, nodes wait for what rank 0 is to publish."""
        rest = len(self._kept) - len(self._left)
        if self._to_copy or self._queue.saves or rest > self._options.near_keep:
            return False
        return not self._closing or bool(self._left) or not self._room.waits_for_far(self._kept)


def _link(source: Path, target: Path) -> None:
    if is_object(target):
        stores.copy(source, target)
    else:
        os.link(source, target)
        sync_directory(target.parent)


def _names(saves: Sequence[NearSave]) -> str:
    return ", ".join(dict.fromkeys(save.name for save in saves))
