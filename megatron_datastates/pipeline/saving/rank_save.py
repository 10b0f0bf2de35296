"""One rank's side of one save: from state to a durable data file.

Milestones: enqueued -> staged -> written -> durable, or failed (published is set by publication.py). Two
threads work on a save. The trainer's thread starts it, waits for it at fences, confirms that nothing changed
before it was copied, and polls. The finishing thread serializes objects and streams into the tail of the
file, and seals the file once it has that confirmation: a torn save leaves no valid footer. Where that thread
cannot start, the trainer's does its work before the save returns. Errors are values until all ranks have
agreed (publication.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence

from megatron_datastates.config import Options
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.native import Output
from megatron_datastates.engine.staging import FileSave, StagingEngine
from megatron_datastates.errors import DataStatesError, forget_frames, is_interrupt
from megatron_datastates.flag import Flag
from megatron_datastates.format.footer import TRAILER_BYTES, Footer, decode_trailer
from megatron_datastates.format.header import Header
from megatron_datastates.format.tail import TailEntry
from megatron_datastates.pipeline.saving.held import HeldTime, charge_open_intervals, trainer_held
from megatron_datastates.pipeline.saving.links import Link
from megatron_datastates.pipeline.saving.milestones import FirstError, SaveContext, State
from megatron_datastates.pipeline.saving.plans import FilePlan, Memory, StatePlan
from megatron_datastates.pipeline.saving.postponement import Postponement
from megatron_datastates.pipeline.saving.records import STABLE_GROUP, DurableFile
from megatron_datastates.pipeline.saving.stable import StableFile
from megatron_datastates.pipeline.saving.tail import Tail
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.collect import Collected
from megatron_datastates.providers.objects import check_saved
from megatron_datastates.threads import BackgroundThread, lost

logger = logging.getLogger(__name__)
_WAIT_SECONDS = 0.1
_AWAITED_SECONDS = 0.01
_DROPPING_SECONDS, _LOOK_SECONDS = 1.0, 0.005
REMOVAL_SECONDS = 5.0  # how long those who wait anyway wait for the removal of a failed save's files


class RankSave:
    """One rank's part of one save; see the module.

    Args:
        awaited: the thread that starts the save, whichever it is, waits until it is durable, and nothing that
            it reads changes meanwhile. So no fence knows of it, and the trainer is not charged.
    """

    def __init__(self, context: SaveContext, options: Options, *, awaited: bool = False) -> None:
        self.context = context
        self._trust_objects = options.trust_objects
        self.fence_deadline = options.fence_deadline
        self.held = HeldTime()
        self.fence_seconds = 0.0
        self.plan: StatePlan | None = None
        self.saves_before = 0  # number of saves that were unfinished when this one started
        self.file: DurableFile | None = None  # once durable; None for a rank that stores nothing
        self.stable: StableFile | None = None  # of tensors that are not expected to change
        self._save: FileSave | None = None
        self._files: list[FileSave | StableFile] = []  # these two, if they exist
        self._copied = False  # no source is read any more
        self._durable = Flag()
        self._confirmed = Flag()  # nothing changed before the copies were done
        self.confirmed_at: float | None = None
        self._written = Flag()
        self._removal_wanted = Flag()
        self._failed_elsewhere = False  # whatever fails from now on was cancelled
        self._error = FirstError()
        self._finisher: BackgroundThread | None = None  # joined by Saver.close
        self.started_at = time.perf_counter()  # when the save began: its times count from here
        self._serialized_seconds = 0.0
        self.tail = Tail(options.trust_objects)
        self.released_callback: Callable[[], None] = lambda: None
        self.postponement = Postponement(self._files, self.held, options.lazy_delay, awaited)
        if not awaited and charge_open_intervals(self):  # last: their end uses all of the above
            self.postponement.note_interval()

    # -- start ------------------------------------------------------------------------------------------

    def start(
        self,
        engine: StagingEngine,
        plan: StatePlan,
        memory: Memory,
        state: Collected,
        link: Link | None = None,
    ) -> None:
        """Starts the copies of tensors and secures what may change at once. Errors are values: see `failure`.

        Args:
            link: to a file of the last checkpoint with the plan's second layout.

        Raises:
            BaseException: KeyboardInterrupt and the like, after the save was failed and its file removed.
        """
        self.plan = plan
        try:
            self.tail.secure(state)
            if not memory.owners and not state.tail:
                self._durable.set()
                return
            self._begin(engine, plan, memory, link)
            assert self._save is not None
            self._watch(plan)
            self.tail.write_now(self._save.tail, time.monotonic() + self.fence_deadline)
            finisher = BackgroundThread(functools.partial(self._finish, self._save, plan))
            try:
                finisher.start()
                self._finisher = finisher
            except RuntimeError:  # such as while the interpreter ends: Python starts no threads then
                self._finish_here(self._save, plan)
            if plan.stable is not None and plan.stable.has_eager:
                self.postponement.end()  # the finishing thread links, and `_settle` waits for that
                self._settle()
        except BaseException as error:
            self.fail(error)
            self.tail.close()
            if self._finisher is None:
                self.tail.drop_sources()
            self._cancel(self.failure or "")  # an error may have no text
            if is_interrupt(error):  # nobody will poll this save
                self.cancel_and_remove(f"interrupted by {type(error).__name__}", patience=REMOVAL_SECONDS)
                raise

    def _begin(self, engine: StagingEngine, plan: StatePlan, memory: Memory, link: Link | None) -> None:
        self.started_at = time.perf_counter()
        self.postponement.begin()
        self._save = self._begin_file(engine, plan.first, memory.of(plan.first.members), 0, plan.tail_bytes)
        self._files.append(self._save)
        if plan.stable is None:
            return
        part = memory.of(plan.stable.members)
        begin = functools.partial(self._begin_file, engine, plan.stable, part, STABLE_GROUP, 0)
        self.stable = StableFile(self.context.save_id, begin, part.owners, link)
        self._files.append(self.stable)
        self.stable.start()

    def _begin_file(
        self,
        engine: StagingEngine,
        plan: FilePlan,
        memory: Memory,
        group: int,
        tail_bytes: int,
        output: Output = Output.FILE,
    ) -> FileSave:
        context = self.context
        return engine.begin(
            context.folder / context.save_id.data_file_name(context.rank, group),
            Header(context.save_id, context.rank, context.world_size, group=group).encode(),
            plan.layout,
            plan.copies,
            memory.addresses,
            memory.owners,
            tail_bytes,
            self.postponement.delay,
            output,
        )

    def _settle(self) -> None:
        """Waits until stable tensors that may change at once are not needed any more."""
        assert self.stable is not None
        if not self._wait(self.stable.fence, self.fence_deadline):
            self._cancel(f"tensors that may change at once were not compared in {self.fence_deadline:g} s")
        if self.stable.failure is not None:
            raise self.stable.failure

    def _finish_here(self, save: FileSave, plan: StatePlan) -> None:
        """Does the finishing thread's work before the save returns: nothing changes before it is copied."""
        self._confirm()
        self.advance()
        self._finish(save, plan, settles=True)
        self.advance()

    def _cancel(self, reason: str) -> None:
        self.postponement.end()
        for file in self._files:
            file.cancel(reason)

    def _remove(self) -> None:
        for file in self._files:
            file.remove()

    def _watch(self, plan: StatePlan) -> None:
        if self.postponement.is_awaited:
            self._confirm()
            return
        FENCE.add_reader(self)
        if Mutability.AT_FENCE in plan.structure.mutability or not self.tail.wait_read(0.0):
            FENCE.add(self)
        else:
            self._confirm()  # nothing that the save still reads can change

    def _confirm(self) -> None:
        if self.confirmed_at is None:
            self.confirmed_at = time.perf_counter()
        self._confirmed.set()

    # -- the trainer's thread ---------------------------------------------------------------------------

    def fence(self, reason: str) -> None:
        """Waits until the sources may change; the save fails if that takes too long. Never raises."""
        if self._save is None or self._confirmed.is_set():
            return
        self.postponement.end_at_fence()
        begin = time.perf_counter()
        with trainer_held("fence", self):
            waits: list[Callable[[float], bool]] = [file.fence for file in self._files]
            waits.append(self.tail.wait_read)
            if not all(self._wait(wait, begin + self.fence_deadline - time.perf_counter()) for wait in waits):
                self._cancel(
                    f"{reason} waited {self.fence_deadline:g} s for its copies (--datastates-fence-deadline)"
                )
            if not self._note_failure():
                self._confirm()
        self.fence_seconds += time.perf_counter() - begin

    def await_copies(self) -> None:
        """Waits until the save reads no memory of the trainer, which may then be unmapped. Never raises."""
        if self._save is None:
            return
        self.postponement.end()
        begin = time.perf_counter()
        with trainer_held("fence", self):
            for file in self._files:
                file.allow_lazy_copies(hurries=True)
            # The stable file's decision needs the finishing thread, too.
            if self.stable is not None and not self._wait(self.stable.settle, self.fence_deadline):
                self._cancel(f"not everything was read within {self.fence_deadline:g} s")
            for file in self._files:
                file.await_copies(self.fence_deadline)
            if not self._wait(self.tail.wait_read, self.fence_deadline):
                self._cancel(f"objects and streams were not serialized within {self.fence_deadline:g} s")
            self.advance()
        self.fence_seconds += time.perf_counter() - begin

    def reads(self, storage: int) -> bool:
        """Returns whether the save may still read a storage (engine.fence.Reader)."""
        if self._save is None:
            return False
        return self.tail.reads(storage) or any(file.reads(storage) for file in self._files)

    def mark_torn(self, reason: str) -> None:
        """Fails the save, even if its copies are done by now: they may have ended after the change."""
        if self._save is None or self._confirmed.is_set():
            return
        self._cancel(reason)
        self.fail(DataStatesError(f"{reason}: its copies would mix values from before and after the change"))

    def advance(self) -> None:
        """Starts postponed work for a trainer that waits for it, and updates."""
        self.postponement.end_at_poll(is_awaited=True)
        self.update()

    def update(self) -> None:
        """Confirms copies that are done, drops their sources, and records a failure of the engine."""
        if self._save is None:
            return
        if not self._copied:
            copied = [file.sources_copied() for file in self._files]  # each drops its own
            self._copied = all(copied) and self.tail.wait_read(0.0)
            if self._copied:
                # Seen on the trainer's thread, before any later statement of the program could change them.
                self._confirm()
                FENCE.discard(self)
                FENCE.discard_reader(self)
        self._note_failure()
        self._note_lost_finisher()

    def _wait(self, wait: Callable[[float], bool], seconds: float) -> bool:
        """Waits for what the finishing thread may have to do; returns False after `seconds`."""
        deadline = time.monotonic() + seconds
        while not wait(max(min(deadline - time.monotonic(), _WAIT_SECONDS), 0.0)):
            self._note_lost_finisher()
            if time.monotonic() >= deadline:
                return False
        return True

    def _note_lost_finisher(self) -> None:
        finisher = self._finisher  # another thread, which aborts the save, may forget it meanwhile
        if finisher is not None and finisher.is_lost and not self.is_durable:
            self._finisher = None  # what it would have removed is the trainer's now
            self.fail(lost("finishes the save"))
            self._cancel(self.failure or "")
            self.tail.close()
            self.tail.drop_sources()

    def _note_failure(self) -> bool:
        failures = [file.failure for file in self._files if file.failure is not None]
        if failures:
            self.fail(failures[0])
        return bool(failures)

    @property
    def is_durable(self) -> bool:
        return self._durable.is_set()

    def awaited(self) -> tuple[int, str] | None:
        """Returns how many bytes storage has taken, if that, or a source of the tail, is waited for.

        The text names that source; "" if storage is waited for.
        """
        if self._save is None or self.is_durable or self.failure is not None:
            return None
        statuses = [file.status() for file in self._files]
        staged, written = (
            sum(one.get(f"bytes_{what}", 0) for one in statuses) for what in ("staged", "written")
        )
        if staged > written:
            return int(written), ""
        return (int(written), self.tail.writing) if self._copied else None

    def await_durable(self) -> None:
        """Waits until an awaited save is durable or has failed, on the thread that started it."""
        while not self._durable.wait(_AWAITED_SECONDS) and self.failure is None:
            self.advance()
        self.advance()

    def cancel_and_remove(
        self, reason: str, *, failed_elsewhere: bool = False, patience: float = 0.0
    ) -> None:
        """Cancels the save and removes its files. Only valid while no manifest can name them.

        Args:
            failed_elsewhere: ranks have agreed on that. This rank does not log it as an error of its own:
                rank 0 logs which ranks failed, and why.
            patience: seconds to wait at most for the removal, if nothing else of the save is at work.
        """
        self._failed_elsewhere |= failed_elsewhere
        # Order: the finishing thread reads _removal_wanted after it has set _durable, so one of the two
        # threads sees the other's flag and removes the file (removing it twice does no harm).
        self._removal_wanted.set()
        FENCE.discard(self)
        if self._save is None:
            return
        self._note_lost_finisher()
        self._cancel(reason)
        if self.is_durable or self._finisher is None:
            self._remove_beside_trainer()
            self.join(patience)

    def _remove_beside_trainer(self) -> None:
        # Storage may hang in this call, too, and the trainer is in a poll, or its program ends.
        remover = BackgroundThread(self._remove, after=self._finisher)
        try:
            remover.start()
            self._finisher = remover
        except RuntimeError:  # such as while the interpreter ends: Python starts no threads then
            self._remove()

    def drop_sources(self) -> None:
        """Lets go of the trainer's memory if a cancelled save reads nothing of it within a second.

        For a restart within the process, which makes the model again. Otherwise, whoever frees that memory
        still waits.
        """
        if self._save is None:  # it has not begun: nobody reads anything, or will
            return
        deadline = time.monotonic() + _DROPPING_SECONDS
        while not all(file.sources_copied() for file in self._files):
            if time.monotonic() >= deadline:
                return
            time.sleep(_LOOK_SECONDS)
        if self.tail.wait_read(deadline - time.monotonic()):
            FENCE.discard_reader(self)

    def join(self, seconds: float | None = None) -> bool:
        """Waits for the finishing thread of a save that is over; returns whether it has ended."""
        return self._finisher is None or self._finisher.join(seconds)

    def on_trainer_released(self) -> None:
        """Notes that the trainer resumes (held.Holder)."""
        self.postponement.release()
        self.released_callback()

    # -- any thread -------------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Returns the text of this rank's first error, if any."""
        return self._error.text

    @property
    def cause(self) -> BaseException | None:
        """Returns this rank's first error, if any."""
        return self._error.cause

    @property
    def state(self) -> State:
        """Returns the last milestone that this rank has reached."""
        if self.failure is not None:
            return State.FAILED
        reached = {State.DURABLE: self._durable, State.WRITTEN: self._written, State.STAGED: self._confirmed}
        return next((state for state, event in reached.items() if event.is_set()), State.ENQUEUED)

    def fail(self, error: BaseException) -> None:
        """Records an error, if it is this rank's first. The other ranks learn of it at the next poll."""
        if self._error.record(error) and not self._failed_elsewhere:
            logger.error("save %s on rank %d: %s", self.context.save_id, self.context.rank, self.failure)
        with contextlib.suppress(Exception):
            forget_frames(error)

    def times(self) -> dict[str, float]:
        """Returns the seconds to staged, serialized, written and durable, and those of the save's waits."""
        each = [file.status() for file in self._files]

        def values(key: str) -> list[float]:
            return [0.0, *(status.get(key, 0.0) for status in each)]

        names = {"staging": "staged_at", "writing": "written_at", "durable": "durable_at"}
        times = {name: max(values(key)) for name, key in names.items()}
        times["serializing"] = self._serialized_seconds
        times["stream_wait"] = sum(file.stream_waited() for file in self._files)
        waits = {"slot_wait": "waited_for_slots", "memory_wait": "waited_for_memory"}
        return times | {name: sum(values(key)) for name, key in waits.items()}

    # -- the finishing thread ---------------------------------------------------------------------------

    def _finish(self, save: FileSave, plan: StatePlan, *, settles: bool = False) -> None:
        try:
            self.postponement.wait()
            if self.stable is not None:
                self.stable.make_link()
                if settles:
                    self._settle()
            self.tail.write_later(save.tail)
            self._serialized_seconds = time.perf_counter() - self.started_at
            data_end = save.tail.close()
            plan.tail_bytes = data_end - plan.layout.tensor_end
            self.file = self._seal(save, data_end, self.tail.entries())
            if self.stable is not None:
                self.stable.complete(self._seal)
            self._durable.set()
        except BaseException as error:  # a writer of streams may raise SystemExit, and somebody waits
            self.fail(error)  # before cancelling, or the next poll reports the cancellation as the cause
            self._cancel(self.failure or "")  # an error may have no text
            self.tail.close()  # before what may take long: the trainer may wait for it
            self._remove()
        self.tail.close()
        if self._removal_wanted.is_set():
            self._remove()

    def _seal(
        self, save: FileSave, data_end: int, entries: Sequence[TailEntry] = (), group: int = 0
    ) -> DurableFile:
        """Writes a file's footer once its data are written and confirmed; returns when it is durable."""
        while not (self._confirmed.wait(_WAIT_SECONDS) and save.wait_written()):
            if (error := save.failure) is not None:
                raise error
        context = self.context
        footer = Footer(
            context.save_id,
            context.rank,
            context.world_size,
            data_end,
            save.layout.digest,
            entries,
            save.block_checksums(),
            group=group,
        ).encode()
        save.finish(footer)
        self._written.set()
        while not save.wait_durable():
            pass
        _, _, crc = decode_trailer(footer[-TRAILER_BYTES:], save.path.name)
        return DurableFile(data_end + len(footer), data_end, crc)

    def check_object(self, stored: bytes, key: str) -> None:
        """Raises UnsafeObjectError if a load would refuse the object. Thread-safe."""
        check_saved(stored, key, trust=self._trust_objects)
