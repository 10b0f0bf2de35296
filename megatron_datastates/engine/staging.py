"""The engine of a process, and one data file on its way through it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.config import Options
from megatron_datastates.engine import native
from megatron_datastates.engine.memory import most_slots
from megatron_datastates.errors import StorageError
from megatron_datastates.plan.layout import Layout, place_objects
from megatron_datastates.providers.base import Mutability, TensorSource

_SLICE_SECONDS = 0.1  # native waits return this often, so that signals and restarts get through
Words = npt.NDArray[np.uint64]


class StagingEngine:
    """Owns the native engine: its threads and its staging memory. One per process."""

    def __init__(self, options: Options, local_ranks: int = 1) -> None:
        self.options = options
        self.native = native.Engine(
            slot_bytes=options.slot_size,
            most_slots=most_slots(options.staging_memory, options.slot_size, local_ranks),
            copy_threads=options.copy_threads,
            write_threads=options.write_threads,
            direct=options.direct_io,
            checksums=options.checksums,
            copy_limit=options.copy_limit,
            write_limit=options.write_limit,
            driver=options.driver,
            faults=options.faults,
        )

    def begin(
        self, path: Path, header: bytes, layout: Layout, sources: Sequence[TensorSource], object_bytes: int
    ) -> FileSave:
        """Starts copying `sources` (in the order of `layout.order`) to the data file `path`.

        Returns when the eager ones are safe: copied, or ordered before whatever the trainer's current
        stream does next. `object_bytes` is a guess of what will be appended, for reserving space.
        """
        ordered = [sources[i] for i in layout.order]
        runs = _collect_runs(header, layout, ordered)
        on_device = any(source.on_device for source in ordered)
        job = self.native.start(
            path=str(path),
            reserve_bytes=layout.tensor_end + object_bytes,
            end=layout.tensor_end,
            sources=runs.sources,
            bytes=runs.bytes,
            offsets=runs.offsets,
            flags=runs.flags,
            stream=_current_stream() if on_device else 0,
        )
        keep = [header, runs, *(source.owner for source in ordered)]
        save = FileSave(self, job, path, layout, keep, on_device)
        save.wait_eager()
        return save

    def close(self) -> None:
        """Cancels what is unfinished and joins the threads."""
        self.native.close()


@dataclasses.dataclass
class _Runs:
    sources: Words
    bytes: Words
    offsets: Words
    flags: npt.NDArray[np.uint8]
    header: np.ndarray  # keeps its memory alive


def _collect_runs(header: bytes, layout: Layout, ordered: Sequence[TensorSource]) -> _Runs:
    """Arrays for the native call, built anew at every save: a stale pointer would save old bytes."""
    first = np.frombuffer(header, np.uint8)
    sources, sizes, offsets, flags = [first.ctypes.data], [len(header)], [0], [0]
    pieces: list[tuple[tuple[Words, Words, int], int]] = []  # the rare strided ones
    for source, offset in zip(ordered, layout.offsets.tolist(), strict=True):
        addresses, within, size = source.runs()
        flag = native.EAGER_FLAG if source.mutability is Mutability.NOW else 0
        flag |= native.DEVICE_FLAG if source.on_device else 0
        if len(addresses) > 1:
            pieces.append(((addresses, within + np.uint64(offset), size), flag))
        elif len(addresses) == 1:
            sources.append(int(addresses[0]))
            sizes.append(size)
            offsets.append(offset)
            flags.append(flag)
    arrays = (np.array(sources, np.uint64), np.array(sizes, np.uint64), np.array(offsets, np.uint64))
    runs = _Runs(*arrays, np.array(flags, np.uint8), first)
    return _insert(runs, pieces) if pieces else runs


def _insert(runs: _Runs, pieces: list[tuple[tuple[Words, Words, int], int]]) -> _Runs:
    sources, sizes = [runs.sources], [runs.bytes]
    offsets, flags = [runs.offsets], [runs.flags]
    for (addresses, places, size), flag in pieces:
        sources.append(addresses)
        sizes.append(np.full(len(addresses), size, np.uint64))
        offsets.append(places)
        flags.append(np.full(len(addresses), flag, np.uint8))
    places = np.concatenate(offsets)
    order = np.argsort(places, kind="stable")
    return _Runs(
        np.concatenate(sources)[order],
        np.concatenate(sizes)[order],
        places[order],
        np.concatenate(flags)[order],
        runs.header,
    )


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


class FileSave:
    """One data file being saved.

    The trainer's thread starts it, fences it and drops the sources; another thread appends the objects
    and finishes it. Errors are values: `error` is set, nothing raises.
    """

    def __init__(
        self,
        engine: StagingEngine,
        job: native.SaveJob,
        path: Path,
        layout: Layout,
        keep: list[object],
        on_device: bool,
    ) -> None:
        self._engine = engine
        self._job = job
        self._on_device = on_device
        self._sources: list[object] | None = keep
        self._objects: list[object] = []
        self.path = path
        self.layout = layout
        self.data_end = layout.tensor_end

    # -- the trainer's thread ---------------------------------------------------------------------------

    def wait_eager(self) -> None:
        while not self._job.wait(native.Milestone.EAGER, _SLICE_SECONDS):
            pass
        if self._on_device:
            self._job.hold_back(_current_stream(), True)

    def fence(self, seconds: float) -> bool:
        """Waits until no source can be torn by what the trainer does next; False after `seconds`.

        Copies from host memory are done then. Copies from a device are enqueued, and the current stream
        waits for the last of them.
        """
        deadline = time.monotonic() + seconds
        while not self._job.wait(native.Milestone.STAGED, _SLICE_SECONDS):
            if time.monotonic() > deadline:
                return False
        if self._on_device:
            self._job.hold_back(_current_stream(), False)
        return True

    def sources_copied(self) -> bool:
        """Whether no source is read any more; if so they are dropped, here on the trainer's thread."""
        done = native.Milestone.RELEASED if self.error else native.Milestone.COPIED
        if self._sources is not None and self._job.wait(done, 0.0):
            self._sources = None
        return self._sources is None

    # -- the finishing thread ---------------------------------------------------------------------------

    def append_objects(self, objects: Sequence[bytes]) -> list[tuple[int, int]]:
        """Queues serialized objects behind the tensors; gives (offset, bytes) of each."""
        sizes = [len(data) for data in objects]
        offsets, end = place_objects(sizes, self.layout.tensor_end)
        memory = [np.frombuffer(data, np.uint8) for data in objects]
        self._objects = [*objects, *memory]
        present = [i for i, size in enumerate(sizes) if size]
        self._engine.native.append(
            job=self._job,
            begin=self.layout.tensor_end,
            end=end,
            sources=np.array([memory[i].ctypes.data for i in present], np.uint64),
            bytes=np.array([sizes[i] for i in present], np.uint64),
            offsets=np.array([offsets[i] for i in present], np.uint64),
            flags=np.zeros(len(present), np.uint8),
        )
        self._job.close_input()
        self.data_end = end
        return list(zip(offsets, sizes, strict=True))

    def wait_written(self) -> bool:
        """Waits a little; True when all data is in the file. Raises StorageError if the save failed."""
        return self._wait(native.Milestone.WRITTEN)

    def wait_durable(self) -> bool:
        return self._wait(native.Milestone.DURABLE)

    def _wait(self, milestone: native.Milestone) -> bool:
        reached = bool(self._job.wait(milestone, _SLICE_SECONDS))
        if self.error:
            raise StorageError(self.error)
        return reached

    def block_checksums(self) -> bytes:
        return bytes(self._job.block_checksums()) if self._engine.options.checksums else b""

    def finish(self, footer: bytes) -> None:
        """Writes the footer and makes the file durable, in the background."""
        self._engine.native.finish(job=self._job, footer=footer, offset=self.data_end)

    def remove(self) -> None:
        """Waits until nothing of a failed save is in flight, then removes its file."""
        while not self._job.wait(native.Milestone.RELEASED, _SLICE_SECONDS):
            pass
        self._job.remove()

    # -- any thread -------------------------------------------------------------------------------------

    def cancel(self, reason: str) -> None:
        self._job.cancel(reason)

    @property
    def error(self) -> str:
        """What went wrong first, or nothing."""
        return str(self._job.status()["error"])

    def status(self) -> dict[str, object]:
        """Counters and times of the native job (cuda/engine/save_job.h, Status)."""
        return dict(self._job.status())
