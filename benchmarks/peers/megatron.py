"""The contenders that save through Megatron's dist_checkpointing: ours and torch_dist's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megatron_datastates as ds
from benchmarks.peers.contenders import SYNCS_FILES, THREADS, TORCH, Contender, Facts
from benchmarks.peers.states import BUCKET, State
from benchmarks.worlds import install_stand_ins

_OURS_SYNCS = "syncs files and directories before it publishes"


def sharded_state(state: State) -> dict[str, Any]:
    """Returns the sharded state dict, as Megatron makes it: replicated parameters, parts of one bucket."""
    from megatron.core.dist_checkpointing import ShardedTensor

    whole = (state.model.elements,)
    model = {
        name: ShardedTensor.from_rank_offsets(name, parameter, replica_id=(0, 0, state.rank))
        for name, parameter in state.parameters.items()
    }
    optimizer = {
        piece.key: ShardedTensor(
            f"{BUCKET}.{piece.kind}",
            piece.tensor,
            piece.tensor.dtype,
            tuple(piece.tensor.shape),
            whole,
            (piece.start,),
            None,
        )
        for piece in state.pieces
    }
    return {"model": model, "optimizer": optimizer, "iteration": state.steps}


class Strategy(Contender):
    """A save strategy as Megatron's training loop makes it, and the queue of its requests."""

    def __init__(self, facts: Facts, inner: Any, queue: Any = None, async_strategy: str = "mcore") -> None:
        from megatron.core.dist_checkpointing.strategies import fully_parallel

        self.facts = facts
        self._strategy = fully_parallel.FullyParallelSaveStrategyWrapper(inner, do_cache_distribution=True)
        self._queue, self._async_strategy = queue, async_strategy
        self._is_first = True

    def prepare(self, state: State) -> Any:
        return sharded_state(state)

    def start(self, prepared: Any, directory: Path) -> None:
        from megatron.core import dist_checkpointing

        request = dist_checkpointing.save(
            prepared,
            str(directory),
            self._strategy,
            validate_access_integrity=self._is_first,  # as with --ckpt-assume-constant-structure
            async_sharded_save=self._queue is not None,
            async_strategy=self._async_strategy,
        )
        self._is_first = False
        if self._queue is not None:
            self._queue.schedule_async_request(request)

    def poll(self) -> bool:
        if self._queue is None:
            return True
        self._queue.maybe_finalize_async_calls(blocking=False)
        return not self._queue.get_num_unfinalized_calls()

    def load(self, state: State, directory: Path) -> None:
        from megatron.core import dist_checkpointing

        dist_checkpointing.load(sharded_state(state), str(directory))

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()


class Ours(Strategy):
    """This package, in a training loop: copies are lazy, and the fence precedes the optimizer's step."""

    def __init__(self, is_async: bool) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        from megatron_datastates.mcore.save.strategy import TrainingSaveStrategy

        settings = "lazy copies, default options" if is_async else "default options"
        super().__init__(
            Facts(settings, _OURS_SYNCS), TrainingSaveStrategy(), AsyncCallsQueue() if is_async else None
        )

    def fence(self) -> None:
        ds.fence()


class Cloned(Strategy):
    """A strategy whose worker process would read the trainer's own memory: it is given clones.

    Megatron copies tensors on a GPU itself; those on a CPU it passes to the worker in shared memory.
    """

    def prepare(self, state: State) -> Any:
        prepared = sharded_state(state)
        for tensor in (*prepared["model"].values(), *prepared["optimizer"].values()):
            tensor.data = tensor.data.detach().clone()
        return prepared


def _torch_dist(threads: int) -> Any:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    strategy = TorchDistSaveShardedStrategy(thread_count=threads, cached_metadata=True)
    strategy.use_cached_ckpt_structure = True
    return strategy


def _facts(more: str, threads: int) -> Facts:
    return Facts(f"{more}fully parallel, constant structure, {threads} writing threads", SYNCS_FILES)


def _sync() -> Contender:
    return Strategy(_facts("", THREADS), _torch_dist(THREADS))


def _fork() -> Contender:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    return Strategy(_facts("forks at every save, ", THREADS), _torch_dist(THREADS), AsyncCallsQueue())


def _persistent() -> Contender:
    from megatron.core.dist_checkpointing.strategies import async_utils

    async_utils.PersistentAsyncCaller.async_loop = staticmethod(run_worker)
    facts = _facts("persistent worker, tensors cloned before they are passed to it, ", THREADS)
    return Cloned(facts, _torch_dist(THREADS), async_utils.AsyncCallsQueue(persistent=True))


def run_worker(*arguments: Any, **options: Any) -> None:
    """Runs Megatron's loop of a persistent worker: in a new process, which has to have the stand-ins, too."""
    install_stand_ins()
    torch.set_num_threads(1)
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    PersistentAsyncCaller.async_loop(*arguments, **options)


def _nvrx() -> Contender:
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    name, modules = get_async_strategy("nvrx")
    if name != "nvrx":
        raise ImportError(f"Megatron uses {name} in its place")
    facts = _facts("nvidia-resiliency-ext's worker, tensors cloned, ", THREADS)
    return Cloned(facts, _torch_dist(THREADS), modules["AsyncCallsQueue"](persistent=True), "nvrx")


OURS = ("datastates", "datastates async")
CONTENDERS: dict[str, Callable[[], Contender]] = {
    OURS[0]: lambda: Ours(is_async=False),
    OURS[1]: lambda: Ours(is_async=True),
    "torch_dist": _sync,
    "torch_dist async, fork": _fork,
    "torch_dist async, worker": _persistent,
    "torch_dist async, nvrx": _nvrx,
    **TORCH,
}
