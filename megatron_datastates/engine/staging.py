"""The staging engine of a process, and the save of one data file.

Belongs here: what Python adds to the native engine (addresses, streams, time limits, errors for users). Does
not belong here: fences, agreement of ranks, publishing.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_datastates.config import Options
from megatron_datastates.engine import native
from megatron_datastates.engine.memory import most_slots, ranks_sharing_memory, slot_bytes
from megatron_datastates.engine.tail import TailWriter
from megatron_datastates.errors import CHANGED_TOO_EARLY, DataStatesError, FailedCallError, some_of
from megatron_datastates.format.index import Index
from megatron_datastates.format.tables import Words
from megatron_datastates.plan.copies import CopyPlan
from megatron_datastates.plan.layout import Layout

_EAGER_SECONDS = 3600.0  # longer than eager copies take; lazy ones get their time once those are done


class StagingEngine:
    """The native engine with its threads and its staging memory. One per process and `Options.of_engine`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.has_hung_threads = False  # some thread did not end in time
        self.slot_bytes = slot_bytes(options, on_gpu_machine=torch.cuda.device_count() > 0)
        self._most_slots = most_slots(options.staging_memory, self.slot_bytes, ranks_sharing_memory())
        self._bounded_for = 0  # slots: the most that were wanted so far
        with native.errors_for_users():
            self.native = native.Engine(
                slot_bytes=self.slot_bytes,
                most_slots=self._most_slots,
                copy_threads=options.copy_threads,
                write_threads=options.write_threads,
                direct=options.direct_io,
                checksums=options.checksums,
                copy_limit=options.copy_limit,
                write_limit=options.write_limit,
                driver=options.driver,
                faults=options.faults,
                discard=options.discard,
                tripwire=options.tripwire,
                paranoid=options.paranoid,
                sysfs=options.sysfs,
                most_in_flight=options.most_in_flight,
                sample_seed=options.sample_seed,
            )

    def begin(
        self,
        path: Path,
        header: bytes,
        layout: Layout,
        copies: CopyPlan,
        addresses: Words,
        owners: Sequence[object],
        tail_bytes: int,
        lazy_seconds: float = 0.0,
        output: native.Output = native.Output.FILE,
    ) -> FileSave:
        """Starts `copies` into the data file `path`, according to `layout`.

        Returns when eager sources may change: they are copied, or their copies are ordered before anything
        that is enqueued on the trainer's current stream afterwards.

        Args:
            addresses: current addresses of the fragments; a stale one would save other bytes.
            owners: the storages that own that memory, one for each fragment; kept until it is staged. Those
                of eager fragments alone are dropped before this returns: they may hold as much device memory
                as a model (dequantized weights), which the trainer needs for its next forward pass.
            tail_bytes: an estimate of the bytes of the tail, for reserving space.
            lazy_seconds: seconds after this returns until lazy copies may begin; see
                FileSave.allow_lazy_copies.
            output: what becomes of the copies. With DIGESTS nothing is made at `path`.

        Raises:
            DataStatesError: sources are on a device that is not the current one.
            EngineError: there is no driver for sources on a device, or an earlier save used another device.
        """
        self._bound(layout.tensor_end + tail_bytes)
        first = np.frombuffer(header, np.uint8)
        device = _current_device_of(copies.devices)
        start = functools.partial(
            self.native.start,
            path=str(path),
            reserve_bytes=layout.tensor_end + tail_bytes,
            end=layout.tensor_end,
            sources=copies.sources(first.ctypes.data, addresses),
            bytes=copies.bytes,
            offsets=copies.offsets,
            row_bytes=copies.row_bytes,
            row_steps=copies.row_steps,
            storages=copies.storages(list(map(id, owners)) if device is not None else ()),
            flags=copies.eager * np.uint8(native.EAGER_FLAG)
            | copies.on_device * np.uint8(native.DEVICE_FLAG),
            stream=_current_stream(device) if device is not None else 0,
            lazy_seconds=_EAGER_SECONDS,
            output=output,
        )
        made: list[native.SaveJob] = []
        try:
            with native.errors_for_users():
                # Started and noted without a step between: at an interrupt there, nobody would end the job.
                made.extend(itertools.starmap(start, [()]))
            save = FileSave(self, made[0], path, layout, [first, *owners], device)
            save.wait_eager(self.options.fence_deadline)
            if copies.eager.any() and save.failure is None:  # else a copy may still be under way
                save.drop_all_but([owners[fragment] for fragment in copies.lazy_fragments])
            save.allow_lazy_copies(lazy_seconds)
        except BaseException:  # an interrupt: the caller gets no save to fence, so it must not keep reading
            for job in made:
                job.cancel("its start was interrupted")
                self.remove(job)
            raise
        return save

    def remove(self, job: native.SaveJob) -> None:
        """Waits until nothing of a failed job is in flight, then removes its file."""
        while not job.wait(native.Milestone.RELEASED, native.SLICE_SECONDS):
            if self.has_hung_threads:
                return
        job.remove()

    def page_lock(self) -> bool:
        """Page-locks staging memory in the background if CUDA is initialized; returns whether it is.

        Does not initialize CUDA. Without this, the first save from a device page-locks. Call it on the
        trainer's thread.
        """
        return torch.cuda.is_initialized() and bool(self.native.page_lock_pool())

    def grow(self, wanted_bytes: int) -> None:
        """Builds `wanted_bytes` of staging memory in the background, or as much as the budget allows."""
        self._bound(wanted_bytes)
        self.native.grow(math.ceil(wanted_bytes / self.slot_bytes))

    def _bound(self, wanted_bytes: int) -> None:
        """Bounds what an automatic size may still grow by, if more is wanted than ever before.

        Engines are made when a program starts. What is free then is not, once its model and optimizer exist.
        """
        slots = math.ceil(wanted_bytes / self.slot_bytes)
        if self.options.staging_memory or slots <= self._bounded_for:
            return
        self._bounded_for = slots
        made, more = int(self.native.pool()["slots"]), most_slots(0, self.slot_bytes, ranks_sharing_memory())
        self.native.limit(min(made + more, self._most_slots))

    def pool_facts(self) -> dict[str, object]:
        """Returns facts of staging memory; `staging_trouble` says why it is too small or slow."""
        pool = self.native.pool()
        return {
            "staging_bytes": int(pool["slots"]) * self.slot_bytes,
            "page_locked_bytes": pool["page_locked_bytes"],
            "staging_trouble": pool["trouble"],
        }

    def close(self, seconds: float = math.inf) -> bool:
        """Cancels what is unfinished and joins the threads; returns whether they ended within `seconds`.

        Threads that a hung disk or device blocks for longer are abandoned, with the memory that they use.
        """
        self.has_hung_threads = not self.native.close(seconds)
        return not self.has_hung_threads


def _tensors_at(layout: Layout, begin: int, end: int) -> list[str]:
    """Returns the keys of the tensors with bytes in [begin, end) of the data file."""
    return [
        key
        for key, entry in Index.decode(layout.index, "the layout", files=1).tensors.items()
        if np.any(
            (entry.file_offsets < end)
            & (entry.file_offsets + entry.file_bytes > begin)
            & (entry.file_bytes > 0)
        )
    ]


def _one_of(keys: Sequence[str]) -> str:
    if len(keys) == 1:
        return f"tensor {keys[0]!r}"
    return f"one of the tensors {some_of([repr(key) for key in keys], 5)}"


def _current_device_of(devices: Sequence[int]) -> int | None:
    """Returns the device that sources are on, if any. Raises DataStatesError if it is not the current one."""
    if devices and devices != (current := _current_device(),):
        names = " and ".join(f"cuda:{device}" for device in devices)
        raise DataStatesError(
            f"this save has tensors on {names}, and the current device is cuda:{current}: start one process "
            "per device, each with its own device current (torch.cuda.set_device)"
        )
    return devices[0] if devices else None


def _order_reuse(storages: Sequence[object]) -> None:
    """Lets torch's allocator use device memory again only after the work now in the current stream."""
    of_torch = [one for one in storages if isinstance(one, torch.UntypedStorage) and one.is_cuda]
    if of_torch:
        stream = torch.cuda.current_stream()
        view = torch.empty(0, dtype=torch.uint8, device=of_torch[0].device)
        for storage in of_torch:
            view.set_(storage)
            view.record_stream(stream)


def _current_device() -> int:
    return torch.cuda.current_device()


def _current_stream(device: int) -> int:
    """Returns the stream of this thread's work on that device, which need not be the current one."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def _raise_failure_of(save: weakref.ref[FileSave]) -> None:
    found = save()
    if found is not None:
        found._raise_failure()


class FileSave:
    """The save of one data file.

    The trainer's thread starts it, fences it and drops its sources; the finishing thread writes the tail and
    seals the file. An error sets `failure`; only waits of the finishing thread, and the tail, raise it.
    """

    def __init__(
        self,
        engine: StagingEngine,
        job: native.SaveJob,
        path: Path,
        layout: Layout,
        keep: list[object],
        device: int | None,
    ) -> None:
        self._engine = engine
        self._job = job
        self._device = device  # that sources are on; None: none is on a device
        self._sources: list[object] | None = keep
        self._storages: set[int | None] | None = None  # _cdata of the sources, on demand
        self.path = path
        self.layout = layout
        # Kept as long as this object: the native job may read the writer's buffers until it is released.
        # It refers to this object weakly, so that both are freed without the garbage collector (--manual-gc).
        raise_failure = functools.partial(_raise_failure_of, weakref.ref(self))
        self.tail = TailWriter(engine.native, job, layout.tensor_end, engine.slot_bytes, raise_failure)

    # -- the trainer's thread ---------------------------------------------------------------------------

    def wait_eager(self, seconds: float) -> None:
        """Returns when eager sources may change. After `seconds` the save fails instead."""
        if not self._reaches(native.Milestone.EAGER, seconds):
            self.cancel(
                f"tensors that may change at once were not copied within {seconds:g} s "
                "(--datastates-fence-deadline)"
            )
        self._hold_back()

    def drop_all_but(self, lazy: Sequence[object]) -> None:
        """Drops the sources but for the header and those of `lazy`. Call it after `wait_eager`, at once.

        Freed device memory is used again in the order of the stream that it was allocated on. That is the
        current one, which waits for the copies; if it is another, the allocator waits for the current one.
        """
        assert self._sources is not None
        header, *owners = self._sources
        if self._device is not None:
            _order_reuse(owners)
        self._sources = [header, *lazy]

    def await_copies(self, seconds: float) -> None:
        """Returns when everything is staged: no source is read any more, so memory may be freed or unmapped.

        After `seconds` the save fails, and this returns as soon as no copy is under way: memory must stay
        mapped while a copy reads it, however slow the device or the disk.
        """
        self.allow_lazy_copies(hurries=True)
        if not self._reaches(native.Milestone.STAGED, seconds):
            self.cancel(f"not everything was copied within {seconds:g} s (--datastates-fence-deadline)")
            self._reaches(native.Milestone.STAGED)

    def allow_lazy_copies(self, seconds: float = 0.0, *, hurries: bool = False) -> None:
        """Lets lazy copies begin at the latest `seconds` from now; `hurries`: the trainer waits for them.

        They do not begin with the save: Megatron's timers synchronize the device right after it, and would
        wait for every copy enqueued by then; and other threads of the trainer's would wait for a core.
        """
        self._engine.native.allow_lazy_copies(self._job, seconds, hurries)

    def fence(self, seconds: float) -> bool:
        """Waits until the trainer may change every source; returns False after `seconds`.

        Copies from host memory are done then. Copies from a device are enqueued, and this thread's stream on
        that device waits for the last of them. At most a few hundred copies are in flight at a time, so all
        but these are done.
        """
        self.allow_lazy_copies(hurries=True)
        if not self._reaches(native.Milestone.ENQUEUED, seconds):
            return False
        self._hold_back()
        return True

    def _hold_back(self) -> None:
        """Lets the stream of the sources' device wait for the copies that are enqueued."""
        if self._device is not None:
            self._job.hold_back(_current_stream(self._device))

    def _reaches(self, milestone: native.Milestone, seconds: float = math.inf) -> bool:
        """Waits for a milestone; returns False after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self._job.wait(milestone, max(min(native.SLICE_SECONDS, deadline - time.monotonic()), 0.0)):
            if time.monotonic() >= deadline:
                return False
        return True

    def close_input(self) -> None:
        """Says that there is no tail: nothing more will be written."""
        self._job.close_input()

    def wait_hashed(self, seconds: float) -> bool:
        """Waits until all digests are taken, or the save has failed; returns False after `seconds`."""
        return self._reaches(native.Milestone.WRITTEN, seconds)

    def stream_waited(self) -> float:
        """Returns the seconds for which the trainer's stream has waited for copies, by the device's clock."""
        return float(self._job.stream_waited()) if self._device is not None else 0.0

    def sources_copied(self) -> bool:
        """Returns whether everything is staged; if so, drops the sources.

        On the trainer's thread, or on one that aborts the save.
        """
        if self._sources is not None and self._job.wait(native.Milestone.STAGED, 0.0):
            self._sources = self._storages = None
        return self._sources is None

    def reads(self, storage: int) -> bool:
        """Returns whether a source in that storage (an UntypedStorage's `_cdata`) may still be read."""
        sources = self._sources
        if self.sources_copied() or sources is None:
            return False
        storages = self._storages
        if storages is None:  # on demand: this is rarely called
            self._storages = storages = {getattr(source, "_cdata", None) for source in sources}
        return storage in storages

    # -- the finishing thread ---------------------------------------------------------------------------

    def wait_written(self) -> bool:
        """Waits up to 0.1 s; returns whether all data is in the file. Raises the save's failure."""
        return self._wait(native.Milestone.WRITTEN)

    def wait_durable(self) -> bool:
        """Waits up to 0.1 s; returns whether the file is durable. Raises the save's failure."""
        return self._wait(native.Milestone.DURABLE)

    def _wait(self, milestone: native.Milestone) -> bool:
        reached = bool(self._job.wait(milestone, native.SLICE_SECONDS))
        self._raise_failure()
        return reached

    def _raise_failure(self) -> None:
        if (error := self.failure) is not None:
            raise error

    def block_checksums(self) -> bytes:
        return bytes(self._job.block_checksums()) if self._engine.options.checksums else b""

    def block_digests(self) -> bytes:
        """Returns the SHA-256 of each block, if the job takes them. Call it once all are taken."""
        return bytes(self._job.block_digests())

    def finish(self, footer: bytes) -> None:
        """Writes the footer after the tail and makes the file durable, in the background."""
        self._engine.native.finish(job=self._job, footer=footer, offset=self.tail.position)

    def remove(self) -> None:
        """Waits until nothing of a failed save is in flight, then removes its file."""
        self._engine.remove(self._job)

    # -- any thread -------------------------------------------------------------------------------------

    def cancel(self, reason: str) -> None:
        self._job.cancel(reason)

    @property
    def failure(self) -> FailedCallError | None:
        """The first error, if any. For a torn copy it names the tensors that may have changed."""
        status = self._job.status()
        error, begin, size = status["error"], status["torn_at"], status["torn_bytes"]
        if error is None:
            return None
        if size == 0:
            return native.error_of(error)
        keys = _tensors_at(self.layout, begin, begin + size)
        text = f"{_one_of(keys)} {CHANGED_TOO_EARLY} {error.strerror}"
        return native.error_of(
            error, f"{text}. Code that changes it must call `megatron_datastates.fence()` first"
        )

    def status(self) -> dict[str, Any]:
        """Returns counters and times of the native job (cuda/engine/save_job.h, Status)."""
        return self._job.status()
