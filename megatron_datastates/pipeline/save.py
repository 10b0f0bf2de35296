"""One rank's side of one save: from state to a durable data file.

States: open -> staged -> sealed -> durable, or failed (and published, by publication.py). Two threads work
on it. The trainer's thread starts it, fences it, confirms that nothing changed before its copies were done,
and polls. The finishing thread serializes what is left, and seals the file once that confirmation is there: a
torn save leaves no valid footer. Errors are values until all ranks have agreed (publication.py).
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.staging import FileSave, StagingEngine
from megatron_datastates.errors import DataStatesError, printable
from megatron_datastates.format.footer import TRAILER_BYTES, Footer, decode_trailer
from megatron_datastates.format.header import Header
from megatron_datastates.format.values import Extent, SaveId
from megatron_datastates.pipeline.held import HeldTime, charge_open_spans, holding
from megatron_datastates.pipeline.plans import Memory, StatePlan
from megatron_datastates.providers.base import Mutability, ObjectSource
from megatron_datastates.providers.objects import check_saved

logger = logging.getLogger(__name__)
_SLICE_SECONDS = 0.1
_YIELD_SECONDS = 0.001
_HELD_SECONDS = 60.0  # longer than a call that saves holds the trainer


class State(enum.Enum):
    """Of a save, as one rank knows it."""

    OPEN = "open"  # it reads what may change at the next fence
    STAGED = "staged"  # that is copied, and did not change before
    SEALED = "sealed"  # all data is in the file, and its footer was given to be written
    DURABLE = "durable"  # the file will outlive a crash
    PUBLISHED = "published"  # a manifest names it: all ranks' files are a checkpoint
    FAILED = "failed"  # on this rank, or by agreement


@dataclasses.dataclass(frozen=True)
class SaveContext:
    """Which save, of whom, where to."""

    save_id: SaveId
    directory: Path
    rank: int
    world_size: int
    iteration: int | None = None


@dataclasses.dataclass(frozen=True)
class DurableFile:
    """A sealed and synced data file."""

    bytes: int
    footer_offset: int
    footer_crc: int


class RankSave:
    """See the module.

    Args:
        fence_deadline: seconds after which a fence lets the trainer go, and the save fails.
        lazy_delay: seconds after which lazy copies from a device begin by themselves. They begin at the first
            poll or fence, if that comes earlier: what is enqueued when the call that saves returns, a trainer
            that synchronizes the device there (Megatron's timers do) would wait for.
        trust_objects: whether what no load would accept is stored all the same.
    """

    def __init__(
        self,
        context: SaveContext,
        fence_deadline: float,
        lazy_delay: float = 0.0,
        *,
        trust_objects: bool = False,
    ) -> None:
        self.context = context
        self._trust_objects = trust_objects
        self.fence_deadline = fence_deadline
        self._lazy_delay = lazy_delay
        self._let_go_at: float | None = None  # from the return of the call that saves to a poll or fence
        self.held = HeldTime()
        self.fence_seconds = 0.0
        self.plan: StatePlan | None = None
        self.saves_before = 0  # that were not finished when this one started
        self.file: DurableFile | None = None  # once durable; None for a rank that stores nothing
        self._save: FileSave | None = None
        self._durable = threading.Event()
        self._confirmed = threading.Event()  # nothing changed before the copies were done
        self._sealed = threading.Event()
        self._given_up = threading.Event()
        self._failure: dict[
            str, tuple[str, BaseException]
        ] = {}  # the first one; any thread's, one atomic operation at a time
        self._finisher: threading.Thread | None = None
        self._begun = time.perf_counter()
        self._serialized_seconds = 0.0
        self.on_released: Callable[[], None] = lambda: None
        self._in_span = charge_open_spans(self)  # the trainer will be let go by the end of it

    # -- start ------------------------------------------------------------------------------------------

    def start(
        self, engine: StagingEngine, plan: StatePlan, memory: Memory, objects: Sequence[ObjectSource]
    ) -> None:
        """Starts the copies of what is in `memory`; secures the objects. Never raises: see `failure`."""
        self.plan = plan
        try:
            snapshots = [item.snapshot() for item in objects]
            if not memory.owners and not objects:
                self._durable.set()
                return
            header = Header(self.context.save_id, self.context.rank, self.context.world_size).encode()
            path = self.context.directory / self.context.save_id.data_file_name(self.context.rank)
            self._begun = time.perf_counter()
            self._save = engine.begin(
                path,
                header,
                plan.layout,
                plan.copies,
                memory.addresses,
                memory.owners,
                plan.object_bytes,
                _HELD_SECONDS if self._in_span else self._lazy_delay,
            )
            FENCE.add_reader(self)
            if Mutability.AT_FENCE in plan.structure.mutability:
                FENCE.add(self)
            else:
                self._confirmed.set()  # nothing that it still reads can change
            finisher = threading.Thread(
                target=self._finish,
                args=(self._save, plan, snapshots),
                name="datastates-finish",
                daemon=True,  # joined by Saver.close; the interpreter must not wait for it before that
            )
            finisher.start()
            self._finisher = finisher
        except Exception as error:
            self.fail(error)
            if self._save is not None:
                self._save.cancel(str(error))

    @property
    def eager_bytes(self) -> int:
        """Of tensors that were copied before the save returned."""
        return self.plan.eager_bytes if self.plan is not None else 0

    @property
    def lazy_bytes(self) -> int:
        """Of tensors that are copied behind the trainer."""
        return self.plan.lazy_bytes if self.plan is not None else 0

    # -- the trainer's thread ---------------------------------------------------------------------------

    def fence(self, reason: str) -> None:
        """Returns when the sources may change; the save fails if that takes too long. Never raises."""
        save = self._save
        if save is None or self._confirmed.is_set():
            return
        self._let_go_at = None
        begin = time.perf_counter()
        with holding("fence", self):
            if not save.fence(self.fence_deadline):
                save.cancel(
                    f"{reason} waited {self.fence_deadline:g} s for its copies (--datastates-fence-deadline)"
                )
            if save.failure is not None:
                self.fail(save.failure)
            else:
                self._confirmed.set()
        self.fence_seconds += time.perf_counter() - begin

    def await_copies(self) -> None:
        """Returns when the trainer's memory is read no more, and may also be unmapped. Never raises."""
        if self._save is None:
            return
        begin = time.perf_counter()
        with holding("fence", self):
            self._save.await_copies(self.fence_deadline)
            self.advance()
        self.fence_seconds += time.perf_counter() - begin

    def reads(self, storage: int) -> bool:
        """See engine.fence.Reader."""
        return self._save is not None and self._save.reads(storage)

    def torn(self, reason: str) -> None:
        """See engine.fence.Fenced. Copies that are over by now prove nothing: they may have just ended."""
        if self._save is None or self._confirmed.is_set():
            return
        self._save.cancel(reason)
        self.fail(DataStatesError(f"{reason}: its copies would have mixed two states"))

    def advance(self) -> None:
        """Looks after the save: confirms copies that are done and drops the sources."""
        self.polled()
        save = self._save
        if save is None:
            return
        if save.sources_copied():
            # Seen on the trainer's thread, before anything behind it in the program could change them.
            self._confirmed.set()
            FENCE.discard(self)
            FENCE.discard_reader(self)
        if save.failure is not None:
            self.fail(save.failure)

    def polled(self) -> None:
        """See engine.fence.Fenced."""
        # Megatron polls at the top of its next iteration. What comes before (timers that synchronize the
        # device, a barrier) it waits for because of the save.
        if self._save is not None:
            self._save.allow_lazy_copies()
        if self._let_go_at is not None and "save_checkpoint" in self.held.parts:
            self.held.add("until_poll", time.perf_counter() - self._let_go_at)
        self._let_go_at = None

    @property
    def is_durable(self) -> bool:
        return self._durable.is_set()

    def give_up(self, reason: str) -> None:
        """Stops everything and has the file removed. Only while no manifest can name it."""
        # Order: the finishing thread looks at _given_up after it has set _durable, so one of the two
        # sees the other's flag and removes the file (twice does no harm).
        self._given_up.set()
        FENCE.discard(self)
        if self._save is None:
            return
        self._save.cancel(reason)
        if self.is_durable or self._finisher is None:
            self._save.remove()

    def join(self, seconds: float | None = None) -> None:
        """Waits for the finishing thread of a save that is over."""
        if self._finisher is not None:
            self._finisher.join(seconds)

    def released(self) -> None:
        """See held.Holder."""
        if self._in_span:
            self._in_span = False
            self._let_go_at = time.perf_counter()
            if self._save is not None:
                self._save.allow_lazy_copies(self._lazy_delay)
        self.on_released()

    # -- any thread -------------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """The first error of this rank as a text, if any."""
        return self._failure["first"][0] if self._failure else None

    @property
    def cause(self) -> BaseException | None:
        """The first error of this rank, if any."""
        return self._failure["first"][1] if self._failure else None

    @property
    def state(self) -> State:
        """How far this rank has come."""
        if self.failure is not None:
            return State.FAILED
        reached = {State.DURABLE: self._durable, State.SEALED: self._sealed, State.STAGED: self._confirmed}
        return next((state for state, event in reached.items() if event.is_set()), State.OPEN)

    def fail(self, error: BaseException) -> None:
        """Keeps the first error. The others are told at the next agreement."""
        ours = isinstance(error, DataStatesError)
        text = printable(str(error) if ours else f"{type(error).__name__}: {error}", keep="\n")
        first = (text, error.with_traceback(None))  # whose frames would keep memory
        if self._failure.setdefault("first", first) is not first:
            return
        logger.error("save %s on rank %d: %s", self.context.save_id, self.context.rank, text)

    def times(self) -> dict[str, float]:
        """Seconds until the save was staged, serialized, written and durable, and those of its waits."""
        status = self._save.status() if self._save is not None else {}
        names = {"staging": "staged_at", "writing": "written_at", "durable": "durable_at"}
        times = {name: max(float(str(status.get(key, 0.0))), 0.0) for name, key in names.items()}
        times["serializing"] = self._serialized_seconds
        times["stream_wait"] = self._save.stream_waited() if self._save is not None else 0.0
        waits = {"slot_wait": "waited_for_slots", "memory_wait": "waited_for_memory"}
        return times | {name: float(str(status.get(key, 0.0))) for name, key in waits.items()}

    # -- the finishing thread ---------------------------------------------------------------------------

    def _finish(self, save: FileSave, plan: StatePlan, objects: list[ObjectSource]) -> None:
        try:
            # The trainer's thread has just started this one and wants Python's lock back; serializing
            # would keep it for milliseconds.
            time.sleep(_YIELD_SECONDS)
            data = [item.serialize() for item in objects]
            self._serialized_seconds = time.perf_counter() - self._begun
            plan.object_bytes = sum(len(one) + 64 for one in data)
            places = save.append_objects(data)
            extents = {item.key: Extent(0, *place) for item, place in zip(objects, places, strict=True)}
            self._check_objects(objects, data)
            while not (self._confirmed.wait(_SLICE_SECONDS) and save.wait_written()):
                if save.failure is not None:
                    raise save.failure
            footer = self._footer(save, extents)
            save.finish(footer)
            self._sealed.set()
            while not save.wait_durable():
                pass
            _, _, crc = decode_trailer(footer[-TRAILER_BYTES:], save.path.name)
            self.file = DurableFile(save.data_end + len(footer), save.data_end, crc)
            self._durable.set()
        except Exception as error:
            save.cancel(str(error))
            self.fail(error)
            save.remove()
        if self._given_up.is_set():
            save.remove()

    def _check_objects(self, objects: Sequence[ObjectSource], data: Sequence[bytes]) -> None:
        """Raises UnsafeObjectError: no load would accept one of them."""
        for item, stored in zip(objects, data, strict=True):
            time.sleep(0)  # Python's lock to whoever wants it: nobody waits for this
            self.check_object(stored, item.key)

    def check_object(self, stored: bytes, key: str) -> None:
        """Raises UnsafeObjectError: no load would accept it. Any thread may call it."""
        check_saved(stored, key, trust=self._trust_objects)

    def _footer(self, save: FileSave, extents: dict[str, Extent]) -> bytes:
        context = self.context
        return Footer(
            context.save_id,
            context.rank,
            context.world_size,
            save.data_end,
            save.layout.digest,
            extents,
            save.block_checksums(),
        ).encode()
