"""The three comparisons. "Without" is built here, around the same engine: the product has no such option."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.ablation.samples import POLL_SECONDS, Sample, Sizes, compare, figures, finish, save_once
from benchmarks.command import Result
from benchmarks.saves import Saves
from benchmarks.states import bytes_of, host_tensors, lazy
from megatron_datastates.config import KIB, MIB, Options
from megatron_datastates.pipeline.publication import Publication
from megatron_datastates.pipeline.saving.rank_save import RankSave
from megatron_datastates.providers.base import Entry, Mutability, StateReader, Write
from megatron_datastates.providers.objects import ObjectSource, check_pickle
from megatron_datastates.providers.streams import StreamSource

_TENSOR_BYTES = 32 * MIB
_TINY_BYTES = 4 * KIB
_WRITERS = 4  # threads of the contender that writes with pwrite


@contextlib.contextmanager
def _saves(folder: Path, **options: Any) -> Iterator[Saves]:
    saves = Saves(folder, Options(**({"staging_memory": 256 * MIB} | options)))
    saves.saver.warm_up()
    try:
        yield saves
    finally:
        saves.close()


# -- overlapping serialization with tensors -----------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Delayed(ObjectSource):
    """An object that is serialized once `wait` has returned."""

    wait: Callable[[], None] = lambda: None

    def write(self, write: Write) -> bytes | None:
        self.wait()
        return ObjectSource.write(self, write)


class Mixed:
    """Large tensors, and objects that nobody changes.

    Args:
        when: objects are serialized "meanwhile", as tensors are staged and written, which is what the product
            does; "before" the save begins, into memory; or "after" all tensors are written.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], objects: list[Any], when: str) -> None:
        self._tensors, self._objects, self._when = lazy(tensors), objects, when
        self._started = threading.Event()
        self._save: RankSave | None = None

    def started(self, publication: Publication) -> None:
        """Notes the save of this state, right after its call has returned."""
        self._save = publication.save
        self._started.set()

    def entries(self) -> Iterator[Entry]:
        self._started.clear()
        if self._when == "before":
            stored = [_serialize_checked(f"o{i}", value) for i, value in enumerate(self._objects)]
            for i, data in enumerate(stored):
                yield StreamSource.from_buffers(f"o{i}", [data], Mutability.NEVER)
        else:
            wait = self._await_tensors if self._when == "after" else lambda: None
            for i, value in enumerate(self._objects):
                yield _Delayed(f"o{i}", value, Mutability.NEVER, wait=wait)
        yield from self._tensors.entries()

    def restore(self, reader: StateReader) -> None:
        """Is never called: the benchmark only saves."""
        raise NotImplementedError("the benchmark only saves")

    def _await_tensors(self) -> None:
        self._started.wait()
        save = self._save
        assert save is not None and save.plan is not None and save._save is not None
        while int(str(save._save.status()["bytes_written"])) < save.plan.layout.tensor_end:
            if save.failure is not None:
                return
            time.sleep(POLL_SECONDS)


def _serialize_checked(key: str, value: Any) -> bytes:
    """Returns a serialized object, checked as every save checks its objects."""
    buffer = io.BytesIO()
    pickle = ObjectSource(key, value).write(buffer.write)
    assert pickle is not None
    check_pickle(pickle, key)
    return buffer.getvalue()


def measure_overlap(folder: Path, sizes: Sizes) -> Result:
    """Compares serializing objects while tensors move with doing one after the other."""
    tensors = host_tensors(max(sizes.bytes // _TENSOR_BYTES, 1), _TENSOR_BYTES)
    objects = [_object(i, sizes.object_bytes) for i in range(sizes.objects)]
    states = {when: Mixed(tensors, objects, when) for when in ("meanwhile", "before", "after")}
    with _saves(folder) as saves:
        contenders = {
            f"objects serialized {when}": functools.partial(save_once, saves, state, state.started)
            for when, state in states.items()
        }
        found = compare(sizes.repeats, contenders)
    facts = {"tensor_bytes": bytes_of(tensors), "objects": sizes.objects, "object_bytes": sizes.object_bytes}
    return facts | {"contenders": found}


def _object(number: int, size: int) -> Any:
    return {"step": number, "history": list(range(2_000)), "state": torch.full((size,), number % 251).byte()}


# -- coalescing ---------------------------------------------------------------------------------------------


def measure_coalescing(folder: Path, sizes: Sizes) -> Result:
    """Compares saving many tiny tensors by slots with one write for each tensor."""
    tensors = host_tensors(sizes.tiny_tensors, _TINY_BYTES)
    state = lazy(tensors)
    with _saves(folder) as slots, _saves(folder, slot_size=_TINY_BYTES) as single:
        contenders = {
            "slots of 2 MiB": lambda: save_once(slots, state),
            "the same engine, a slot for each tensor": lambda: save_once(single, state),
            "pwrite of each tensor, no checksums": lambda: write_each(folder / "file", tensors),
        }
        found = compare(sizes.repeats, contenders)
    return {"tensors": len(tensors), "tensor_bytes": bytes_of(tensors), "contenders": found}


def write_each(path: Path, tensors: dict[str, torch.Tensor]) -> Sample:
    """Writes each tensor by itself with a few threads, and syncs; the trainer waits for the writes."""
    views = [memoryview(tensor.numpy()) for tensor in tensors.values()]
    os.sync()
    begin = time.perf_counter()
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        os.posix_fallocate(descriptor, 0, len(views) * _TINY_BYTES)

        def write(first: int) -> int:
            places = range(first, len(views), _WRITERS)
            return sum(os.pwrite(descriptor, views[i], i * _TINY_BYTES) for i in places)

        with ThreadPoolExecutor(_WRITERS) as pool:
            written = sum(pool.map(write, range(_WRITERS)))
        held = time.perf_counter() - begin
        os.fsync(descriptor)
        return figures(held, time.perf_counter() - begin, written)
    finally:
        os.close(descriptor)
        path.unlink()


# -- lazy copies --------------------------------------------------------------------------------------------


def measure_lazy(folder: Path, sizes: Sizes) -> Result:
    """Compares one training iteration with a lazy save, with an eager one, and without a save."""
    tensors = host_tensors(max(sizes.bytes // _TENSOR_BYTES, 1), _TENSOR_BYTES)
    work = _work(sizes.step_seconds)
    pool = {"staging_memory": 2 * bytes_of(tensors)}  # the disk holds nobody up
    with _saves(folder, **pool) as on, _saves(folder, **pool, lazy=False) as off:
        contenders = {
            "lazy copies": lambda: _iterate(tensors, work, on),
            "copies before the save returns": lambda: _iterate(tensors, work, off),
            "no save": lambda: _iterate(tensors, work, None),
        }
        found = compare(sizes.repeats, contenders)
    facts = {"tensor_bytes": bytes_of(tensors), "step_seconds": sizes.step_seconds}
    return facts | {"contenders": found}


def _iterate(tensors: dict[str, torch.Tensor], work: Callable[[], None], saves: Saves | None) -> Sample:
    """Saves, works as a forward and backward pass does, passes the fence, and changes the tensors."""
    os.sync()
    begin = time.perf_counter()
    publication = saves.start(lazy(tensors)) if saves is not None else None
    held = time.perf_counter() - begin
    work()
    fence = time.perf_counter()
    if saves is not None:
        saves.fence()
    held += time.perf_counter() - fence
    for tensor in tensors.values():
        tensor[:64].add_(1)
    iteration = {"iteration_ms": 1e3 * (time.perf_counter() - begin)}
    return iteration if publication is None else iteration | finish(publication, begin, held)


def _work(seconds: float) -> Callable[[], None]:
    """Returns a fixed number of matrix products, which take about `seconds` of one core's time."""
    torch.set_num_threads(1)
    factor = torch.randn(384, 384)
    begin, count = time.thread_time(), 0
    while time.thread_time() - begin < seconds:
        torch.mm(factor, factor)
        count += 1

    def work() -> None:
        for _ in range(count):
            torch.mm(factor, factor)

    return work
