"""Saves by the whole pipeline, as gpu.py measures them, and what its parts share.

Every save goes through pipeline.saver.Saver with the product's defaults, so that what a trainer would wait
for is counted: collecting the tensors, looking up the layout, the native call, the fence and the polls.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_device import IS_FAKE, Device, bytes_of, make_shard

from megatron_datastates.config import GIB, MIB
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.memory import free_bytes
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.saver import Run, Saver
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider

Tell = Callable[..., None]  # records results under names
Shard = dict[str, torch.Tensor]
MEMORY = "DATASTATES_BENCH_MEMORY_GIB"  # of the machine, where its system shows less until it is used
SMALL_POOL = (64 if IS_FAKE else 256) * MIB
_SEGMENT = 64 * MIB  # a multiple of every slot size; staging memory is made in such pieces
_PATIENCE = 120.0  # seconds
_POLL_SECONDS = 0.002
_TMPFS = Path("/dev/shm")
_LEAST = (1 if IS_FAKE else 16) * MIB
_ORDINALS = itertools.count(1)


class Saving:
    """Saves into folders of their own, by one Saver.

    Args:
        staging_bytes: 0 for the product's default.
        options: beyond the product's defaults; `backend="discard"` leaves the disk out.
    """

    def __init__(self, device: Device, folder: Path, staging_bytes: int, **options: Any) -> None:
        self.device, self._folder = device, folder
        self.staging_bytes = -(-staging_bytes // _SEGMENT) * _SEGMENT
        self._saver = Saver(device.options(staging_memory=self.staging_bytes, **options), Run())

    def make_pool(self) -> dict[str, Any]:
        """Waits until all staging memory is page-locked, or until it is clear that it will not be.

        By default, staging memory grows with the first shard: then only what is made before it is waited for.
        """
        begin = time.perf_counter()
        self._saver.warm_up()
        engine = self._saver._get_engine()
        while True:
            facts, slots = engine.pool_facts(), int(engine.native.pool()["slots"])
            trouble = facts["staging_trouble"]
            if trouble or int(str(facts["page_locked_bytes"])) >= max(self.staging_bytes, 1):
                break
            assert time.perf_counter() - begin < _PATIENCE, f"staging memory is not ready: {facts}"
            time.sleep(0.001)
        self.slot_bytes = int(str(facts["staging_bytes"])) // slots if slots else 0
        made = {"bytes": self.staging_bytes, "slot_bytes": self.slot_bytes}
        return made | {"seconds": time.perf_counter() - begin} | ({"trouble": trouble} if trouble else {})

    def start(self, shard: Shard) -> Publication:
        directory = self._folder / f"save{next(_ORDINALS)}"
        return self._saver.start(directory, TensorProvider(shard, Mutability.AT_FENCE))

    def copied(self, shard: Shard, watch: Callable[[], None] = lambda: None) -> dict[str, float]:
        """One save, fenced at once and given up when its copies are done; seconds of its copies."""
        torch.cuda.synchronize()
        publication = self.start(shard)
        FENCE.wait("the benchmark")
        staging = await_copies(publication, watch)
        times = publication.save.times()
        self.drop(publication)
        return {"staging": staging, "slot_wait": times["slot_wait"]}

    def held(
        self,
        shard: Shard,
        *,
        synchronize: bool,
        work: Callable[[], None] | None,
        watch: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """One save as a training loop makes it; seconds that it held the loop, by part, and of its copies.

        Start, synchronize (as Megatron's timers do), first poll, `work` (which does not count), fence, polls.

        Args:
            work: the next forward and backward; None: a fence that comes at once, with no poll before it.
        """
        torch.cuda.synchronize()
        parts: dict[str, float] = {"synchronize": 0.0, "first_poll": 0.0}
        with timed(parts, "start"):
            publication = self.start(shard)
        if synchronize:
            with timed(parts, "synchronize"):
                torch.cuda.synchronize()
        if work is not None:
            with timed(parts, "first_poll"):
                publication.poll()
            work()
        stream = StreamWait()
        with stream, timed(parts, "fence"):
            FENCE.wait("the benchmark")
        parts["polls"] = 0.0
        staging, deadline = 0.0, time.monotonic() + _PATIENCE
        while not staging:
            staging = publication.save.times()["staging"]  # before the poll, so that the last one sees it
            with timed(parts, "polls"):
                publication.poll()
            _expect_copies(publication)
            assert time.monotonic() < deadline, "the copies do not end"
            watch()
            time.sleep(_POLL_SECONDS)
        self.drop(publication)
        parts["stream_wait"] = max(stream.seconds() - parts["fence"], 0.0)  # what the host waited counts once
        return parts | {"held": sum(parts.values()), "staging": staging}

    def published(self, shard: Shard) -> dict[str, float]:
        """One save until it is published, polled every 10 ms as by a trainer with short steps.

        The first and the last tensor are read back and compared.
        """
        torch.cuda.synchronize()
        begin = time.perf_counter()
        publication = self.start(shard)
        FENCE.wait("the benchmark")
        fenced = polled = time.perf_counter() - begin
        deadline = time.monotonic() + _PATIENCE
        while publication.outcome is Outcome.PENDING:
            assert time.monotonic() < deadline, "the save does not end"
            time.sleep(0.01)
            before = time.perf_counter()
            publication.poll()
            polled += time.perf_counter() - before
        assert publication.outcome is Outcome.PUBLISHED, publication.error
        seconds = time.perf_counter() - begin
        publication.join()
        times = publication.save.times()
        checkpoint = Checkpoint.open(publication.save.context.directory)
        for key in (next(iter(shard)), next(reversed(shard))):
            assert torch.equal(checkpoint.read_tensor(key), shard[key].cpu()), (
                f"{key} was not stored as it is"
            )
        shutil.rmtree(publication.save.context.directory)
        return {
            "held": fenced,
            "held_with_polls": polled,
            "staging": times["staging"],
            "durable": times["durable"],
            "published": seconds,
        }

    def kept(self, shard: Shard) -> Path:
        """One save, published and left where it is."""
        publication = self.start(shard)
        FENCE.wait("the benchmark")
        assert publication.wait() is Outcome.PUBLISHED, publication.error
        publication.join()
        return publication.save.context.directory

    def drop(self, publication: Publication) -> None:
        """Gives a save up and removes what it wrote."""
        publication.abandon("it was measured")
        publication.join()
        shutil.rmtree(publication.save.context.directory, ignore_errors=True)

    def close(self) -> None:
        self._saver.close()


class StreamWait:
    """Times from its entry to its exit as the current stream sees them."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __enter__(self) -> None:
        self._begin.record()

    def __exit__(self, *exception: object) -> None:
        self._end.record()

    def seconds(self) -> float:
        """Waits for the stream."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


@contextlib.contextmanager
def timed(parts: dict[str, float], part: str) -> Iterator[None]:
    """Adds the seconds in here to a part."""
    begin = time.perf_counter()
    yield
    parts[part] = parts.get(part, 0.0) + time.perf_counter() - begin


def await_copies(publication: Publication, watch: Callable[[], None] = lambda: None) -> float:
    """Looks until no source is read any more; seconds since the save began, by the engine."""
    deadline = time.monotonic() + _PATIENCE
    while not (staging := publication.save.times()["staging"]):
        publication.save.advance()
        _expect_copies(publication)
        assert time.monotonic() < deadline, "the copies do not end"
        watch()
        time.sleep(0.0005)
    publication.save.advance()  # the sources are dropped
    return staging


def _expect_copies(publication: Publication) -> None:
    """Fails if the save did; but a back end that discards fails it once the copies are done, as it should."""
    failure = publication.save.failure
    assert failure is None or publication.save.times()["staging"], failure


def rounds(until: float, most: int) -> Iterable[int]:
    """Numbers of repeats: as many as there is time for, by the longest so far, but at least one."""
    longest = 0.0
    for number in range(most):
        begin = time.monotonic()
        if number and begin + longest > until:
            return
        yield number
        longest = max(longest, time.monotonic() - begin)


def medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}


def pool_for(shard: Shard) -> int:
    """Staging memory in which every byte of a shard has a place, alignment and header included."""
    steps = ((tensor.nbytes, 4096 if tensor.nbytes >= MIB else 64) for tensor in shard.values())
    return _SEGMENT + sum(-(-size // step) * step for size, step in steps)


def host_room() -> int:
    """Host memory that may still be taken, by the system or by what is known of the machine ($MEMORY)."""
    known = float(os.environ.get(MEMORY, "0"))
    return max(free_bytes(), int(known * GIB) - _resident_bytes())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fitting(
    wanted: Iterable[int], device: Device | None, folder: Path | None = None, host_copies: float = 2.0
) -> tuple[list[int], list[str]]:
    """Those of these shard sizes for which there is room, and what was left out and why.

    If none fits, half of the least of them, and so on: less is measured rather than nothing.

    Args:
        device: that holds one shard; None: none does.
        folder: on a disk that is to hold one shard; None: none is written.
        host_copies: of the shard in host memory (pools, yardsticks, files on tmpfs).
    """
    rooms = {"host memory": host_room() * 0.8 / host_copies}
    if device is not None:
        rooms["device memory"] = device.free_bytes() * 0.8
    if folder is not None:
        rooms["disk"] = shutil.disk_usage(folder).free * 0.8
    scarce = min(rooms, key=rooms.__getitem__)
    sizes = sorted(wanted)
    fits = [size for size in sizes if size <= rooms[scarce]]
    left_out = [
        f"{size / GIB:g} GiB: the {scarce} has room for a shard of {rooms[scarce] / GIB:.2f} GiB"
        for size in sizes
        if size not in fits
    ]
    least = sizes[0]
    while not fits:
        least //= 2
        if least <= max(rooms[scarce], _LEAST):
            fits = [least]
    return fits, left_out


def tmpfs(folder: Path, size: int) -> Path | None:
    """A new folder in memory with room for so much, named after `folder`; None if there is none."""
    if not _TMPFS.is_dir() or min(shutil.disk_usage(_TMPFS).free, host_room()) < 1.25 * size:
        return None
    made = _TMPFS / folder.name
    made.mkdir(exist_ok=True)
    return made


def measure_pipeline(device: Device, folder: Path, small: bool, until: float, tell: Tell) -> None:
    """Whole saves until they are published, with the product's defaults and with a small pool."""
    sizes, left_out = fitting([16 * MIB] if small else [GIB, 4 * GIB], device, folder)
    shard = make_shard(sizes[-1], 20 if small else 500)
    total = bytes_of(shard)
    pools = {"default_pool": SMALL_POOL if small else 0, "small_pool": SMALL_POOL}
    savings = {name: Saving(device, folder, pool) for name, pool in pools.items()}
    tell(bytes=total, tensors=len(shard), left_out=left_out)
    for saving in savings.values():
        saving.make_pool()
        saving.copied(shard)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in savings}
    for number in rounds(until, 1 if small else 5):
        for name, saving in savings.items():
            samples[name].append(saving.published(shard))
            middle = medians(samples[name])
            tell(
                **{
                    name: {
                        "repeats": number + 1,
                        "held_ms": 1e3 * middle["held"],
                        "held_with_polls_ms": 1e3 * middle["held_with_polls"],
                        "staging_gb_per_s": total / middle["staging"] / 1e9,
                        "durable_gb_per_s": total / middle["durable"] / 1e9,
                        "published_seconds": middle["published"],
                    }
                }
            )
    for saving in savings.values():
        saving.close()
