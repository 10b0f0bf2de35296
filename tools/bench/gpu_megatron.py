"""Megatron's own torch_dist and this package on one state, through `dist_checkpointing.save`.

What a trainer is held counts the same for all: the call of save, scheduling the request, the first poll, the
fence before the next step (ours only; with what the stream waits), and every later poll, with what Megatron
runs to finalize. Every other round a `torch.cuda.synchronize()`, as Megatron's timers do it, follows the save
and counts too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_device import CONNECTIONS, IS_FAKE, Device, bytes_of, make_shard
from gpu_held import Work
from gpu_saves import StreamWait, Tell, fitting, medians, rounds, timed

from megatron_datastates.config import GIB, MIB

_PATIENCE = 120.0  # seconds
_FIRST = 45.0  # seconds; a first save starts a process that imports Megatron
_STEP = 0.02  # seconds from poll to poll, as of a trainer with short steps
_PARTS = ("returned", "synchronize", "fence", "stream_wait", "polls")


@dataclasses.dataclass
class Way:
    """One way to save: a strategy as Megatron's training loop makes it, and the queue of its requests."""

    name: str
    strategy: Any
    queue: Any = None  # None: a synchronous save
    async_strategy: str = "mcore"
    fence: Callable[[], None] = lambda: None
    has_worker: bool = False  # a process that lives from save to save
    saves: int = 0

    def save(
        self,
        state: Callable[[], dict[str, Any]],
        directory: Path,
        work: Callable[[], None],
        synchronize: bool = True,
    ) -> dict[str, float]:
        """One save; seconds of its parts. `work` stands for the next forward and backward."""
        directory.mkdir()
        sharded = state()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        parts = {"synchronize": 0.0, "polls": 0.0}
        with timed(parts, "returned"):
            self._start(sharded, directory)
        if synchronize:
            with timed(parts, "synchronize"):
                torch.cuda.synchronize()
        finished = time.perf_counter() - begin
        stream = StreamWait()
        if self.queue is not None:
            with timed(parts, "polls"):
                self.queue.maybe_finalize_async_calls(blocking=False)
            work()
        with stream, timed(parts, "fence"):
            self.fence()
        if self.queue is not None:
            self._poll(parts)
            finished = time.perf_counter() - begin
        parts["stream_wait"] = max(stream.seconds() - parts["fence"], 0.0)
        self.saves += 1
        return parts | {"held": sum(parts.values()), "finalized": finished}

    def _start(self, sharded: dict[str, Any], directory: Path) -> None:
        from megatron.core import dist_checkpointing

        request = dist_checkpointing.save(
            sharded,
            str(directory),
            self.strategy,
            validate_access_integrity=self.saves == 0,  # as with --ckpt-assume-constant-structure
            async_sharded_save=self.queue is not None,
            async_strategy=self.async_strategy,
        )
        if self.queue is not None:
            self.queue.schedule_async_request(request)

    def _poll(self, parts: dict[str, float]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while self.queue.get_num_unfinalized_calls():
            assert time.monotonic() < deadline, f"{self.name}: the save does not end"
            time.sleep(_STEP)
            with timed(parts, "polls"):
                self.queue.maybe_finalize_async_calls(blocking=False)


def measure_megatron(device: Device, folder: Path, small: bool, until: float, tell: Tell) -> None:
    """All ways in turn, round by round. The first save of each, before that, shows what memory it takes.

    What ways share (helper processes, our pool) counts for the first that has it.
    """
    warnings.filterwarnings("ignore")
    try:
        import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401
    except ImportError as error:
        tell(status=f"left out: megatron-core does not import here ({error})")
        return
    _join_world(folder)
    # In host memory at once: our two pools, what Megatron's ways copy, and what page cache they fill.
    sizes, less = fitting([8 * MIB] if small else [GIB, 2 * GIB], device, folder, host_copies=6.0)
    count = 30 if small else 600
    state = {key: _parameter(tensor) for key, tensor in make_shard(sizes[-1], count).items()}

    def sharded() -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in state.items()} | {
            "iteration": 1
        }

    total = bytes_of(state)
    ways, left_out = _ways(device)
    tell(bytes=total, tensors=count, tensors_left_to_the_fence=_lazy(state), sizes_left_out=less)
    tell(connections=CONNECTIONS, left_out=left_out)
    work = Work(0.02 if small else 0.25)
    ready: list[Way] = []
    memory: dict[str, dict[str, float]] = {}
    for way in ways:
        directory = folder / way.name  # its own: a save that was abandoned may go on
        with MemoryWatch(device) as watch:
            first = _first_save(way, sharded, directory, work)
        if isinstance(first, dict):
            memory[way.name] = watch.growth() | {"first_save_held_ms": 1e3 * first["held"]}
            ready.append(way)
        else:
            left_out[way.name] = first
        shutil.rmtree(directory, ignore_errors=True)
        tell(left_out=left_out)
    modes: list[dict[str, list[dict[str, float]]]] = [{way.name: [] for way in ready} for _ in range(2)]
    for number in rounds(until, 2 if small else 8):
        synchronize = number % 2 == 0
        samples = modes[number % 2]
        for way in ready:
            samples[way.name].append(way.save(sharded, folder / way.name, work, synchronize))
            shutil.rmtree(folder / way.name)
        if synchronize:
            tell(
                ways={name: _summary(samples[name], total) | memory[name] for name in samples},
                ratios=_ratios(samples),
            )
        else:
            tell(without_synchronize={name: _summary(samples[name], total) for name in samples})
        tell(repeats=number + 1)
    tell(complete=True)  # what comes now may hang, and no longer matters
    for way in ready:
        if way.queue is not None:
            way.queue.close()
    torch.distributed.destroy_process_group()


def _first_save(
    way: Way, state: Callable[[], Any], directory: Path, work: Callable[[], None]
) -> dict[str, float] | str:
    """The save, or why this way is left out: one that does not work here must not lose the others.

    Megatron waits for ever for a worker process that died (where CUDA's IPC does not work, say). Where there
    is one, the save runs in a thread that can be abandoned.
    """
    told: list[dict[str, float] | str] = []

    def save() -> None:
        try:
            told.append(way.save(state, directory, work))
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")

    if not way.has_worker:
        save()
        return told[0]
    thread = threading.Thread(target=save, daemon=True)
    thread.start()
    thread.join(_FIRST)
    return told[0] if told else f"its first save did not end within {_FIRST:g} s"


def _parameter(memory: torch.Tensor) -> torch.nn.Parameter:
    """As Megatron lays parameters into its buffers; being one proves it immutable until the next step."""
    parameter = torch.nn.Parameter(torch.empty(0, dtype=memory.dtype, device="cuda"), requires_grad=False)
    parameter.data = memory
    return parameter


def _lazy(state: dict[str, torch.nn.Parameter]) -> int:
    from megatron_datastates.mcore.save import mapping
    from megatron_datastates.providers.base import Mutability

    classify = mapping.proof_in_training_loop()
    return sum(classify(parameter) is Mutability.AT_FENCE for parameter in state.values())


def _summary(samples: list[dict[str, float]], total: int) -> dict[str, float]:
    middle = medians(samples)
    return {
        "held_ms": 1e3 * middle["held"],
        **{f"{part}_ms": 1e3 * middle[part] for part in _PARTS},
        "finalized_seconds": middle["finalized"],
        "gb_per_s": total / middle["finalized"] / 1e9,
    }


def _ratios(samples: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """How many times longer than ours each of Megatron's ways held the trainer, and took."""
    ours = samples.get("datastates")
    if ours is None:
        return {}
    return {
        name: {
            part: statistics.median(a[part] / b[part] for a, b in zip(theirs, ours, strict=True))
            for part in ("held", "finalized")
        }
        for name, theirs in samples.items()
        if name.startswith("torch_dist")
    }


def _join_world(folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo" if IS_FAKE else "nccl", init_method=f"file://{folder}/world", rank=0, world_size=1
    )


def _ways(device: Device) -> tuple[list[Way], dict[str, str]]:
    """Every way that there is, and why others are not."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from megatron_datastates.mcore.save import strategy

    def theirs(threads: int = 1) -> Any:
        stock = TorchDistSaveShardedStrategy(thread_count=threads, cached_metadata=True)
        return FullyParallelSaveStrategyWrapper(stock, do_cache_distribution=True)

    def ours() -> tuple[Any, Any]:
        inner = strategy.TrainingSaveStrategy(options=device.options())
        return FullyParallelSaveStrategyWrapper(inner, do_cache_distribution=True), inner

    (wrapped, inner), (wrapped_sync, _) = ours(), ours()
    ways = [
        Way("datastates", wrapped, AsyncCallsQueue(), fence=inner.fence),
        Way("datastates_sync", wrapped_sync),
        Way("torch_dist_sync", theirs()),
        Way("torch_dist_sync_2_threads", theirs(2)),
        Way("torch_dist_async_fork", theirs(), AsyncCallsQueue()),
        Way("torch_dist_async_persistent", theirs(), AsyncCallsQueue(persistent=True), has_worker=True),
    ]
    try:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue as NvrxQueue
    except ImportError as error:
        return ways, {"torch_dist_async_nvrx": f"nvidia-resiliency-ext is not there ({error})"}
    queue = NvrxQueue(persistent=True)
    ways.append(Way("torch_dist_async_nvrx", theirs(), queue, async_strategy="nvrx", has_worker=True))
    return ways, {}


class MemoryWatch:
    """The most host and device memory that is taken while this is entered, beyond what was taken before.

    Host memory twice: what the system counts (page-locked memory included, clean page cache not), and the
    proportional share (PSS) of this process and of its children.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._most: dict[str, int] = {}

    def __enter__(self) -> MemoryWatch:
        with contextlib.suppress(AttributeError, RuntimeError):
            torch._C._host_emptyCache()  # page-locked memory that torch keeps of another way
        self._before = self._look()
        self._most = dict(self._before)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def growth(self) -> dict[str, float]:
        return {f"{name}_gib": (self._most[name] - self._before[name]) / GIB for name in self._most}

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            now = self._look()
            self._most = {name: max(self._most[name], now[name]) for name in now}

    def _look(self) -> dict[str, int]:
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        kib = {name: int(facts[name].split()[0]) for name in ("MemTotal", "MemAvailable")}
        return {
            "host_of_system": (kib["MemTotal"] - kib["MemAvailable"]) << 10,
            "host_of_processes": sum(map(_share, _tree(os.getpid()))),
            "device": -self._device.free_bytes(),
        }


def _tree(process: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield process
    with contextlib.suppress(OSError):  # it has ended
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from _tree(int(child))


def _share(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):  # it has ended, or this kernel has no such file
        return 0
