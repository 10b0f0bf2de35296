"""The ways to save through `dist_checkpointing.save` that are compared: ours, and Megatron's torch_dist."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.saves import StreamTimer, timed

PARTS = ("returned", "synchronize", "fence", "stream_wait", "polls")
_PATIENCE_SECONDS = 120.0
_FIRST_SECONDS = 45.0  # of a first save, which may start a process that imports Megatron
_POLL_SECONDS = 0.02  # between polls, as of a trainer with short steps


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
        """Saves once; returns the seconds of its parts. `work` stands for the next forward and backward."""
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
        stream = StreamTimer()
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

    def try_save(
        self, state: Callable[[], Any], directory: Path, work: Callable[[], None]
    ) -> dict[str, float] | str:
        """Saves once; returns the seconds of its parts, or why this way does not work here.

        Megatron waits forever for a worker process that has died (where CUDA's IPC does not work, say). Where
        there is one, the save runs in a thread that can be abandoned.
        """
        results: list[dict[str, float] | str] = []

        def save() -> None:
            try:
                results.append(self.save(state, directory, work))
            except Exception as error:
                results.append(f"{type(error).__name__}: {error}")

        if not self.has_worker:
            save()
            return results[0]
        thread = threading.Thread(target=save, daemon=True)
        thread.start()
        thread.join(_FIRST_SECONDS)
        return results[0] if results else f"its first save did not end within {_FIRST_SECONDS:g} s"

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
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self.queue.get_num_unfinalized_calls():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: the save did not end within {_PATIENCE_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
            with timed(parts, "polls"):
                self.queue.maybe_finalize_async_calls(blocking=False)


def all_ways(device: Device) -> tuple[list[Way], dict[str, str]]:
    """Returns every way that there is on this machine, and why others are left out."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from megatron_datastates.engine.fence import FENCE
    from megatron_datastates.mcore.save import strategy

    def before_step() -> None:
        FENCE.wait("the benchmark's step")

    def theirs(threads: int) -> Any:
        stock = TorchDistSaveShardedStrategy(thread_count=threads, cached_metadata=True)
        return FullyParallelSaveStrategyWrapper(stock, do_cache_distribution=True)

    def ours() -> Any:
        inner = strategy.TrainingSaveStrategy(options=device.options())
        return FullyParallelSaveStrategyWrapper(inner, do_cache_distribution=True)

    ways = [
        Way("datastates", ours(), AsyncCallsQueue(), fence=before_step),
        Way("torch_dist_async_persistent", theirs(2), AsyncCallsQueue(persistent=True), has_worker=True),
        Way("torch_dist_async_fork", theirs(2), AsyncCallsQueue()),
        Way("datastates_sync", ours()),
        Way("torch_dist_sync", theirs(2)),
    ]
    try:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue as NvrxQueue
    except ImportError as error:
        return ways, {"torch_dist_async_nvrx": f"nvidia-resiliency-ext is not there ({error})"}
    queue = NvrxQueue(persistent=True)
    ways.insert(1, Way("torch_dist_async_nvrx", theirs(2), queue, async_strategy="nvrx", has_worker=True))
    return ways, {}
