"""What a contender is, and the contenders of torch itself: DCP with each of its stagers, torch.save.

A save is cut into the parts that a trainer would see: `prepare` and `start` before the next forward, `fence`
before the next step, `poll` in later iterations. An asynchronous save may do nothing in some of them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.states import State

THREADS = 2  # of peers that write with several: the cores of the machines that this is run on


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the results say about a contender."""

    settings: str
    syncs: str  # who makes its files durable


class Contender:
    """A way to save and load a State; this one does nothing in every optional part."""

    facts: Facts

    def prepare(self, state: State) -> Any:
        """Returns what the save is given, made anew for each save as a trainer does."""
        raise NotImplementedError  # every contender has its own

    def start(self, prepared: Any, directory: Path) -> None:
        """Starts the save; of a synchronous one, all of it."""
        raise NotImplementedError  # every contender has its own

    def fence(self) -> None:
        """Waits until the state may be changed."""

    def poll(self) -> bool:
        """Does what a trainer does in each iteration; returns whether the save is complete on all ranks."""
        return True

    def load(self, state: State, directory: Path) -> None:
        """Loads into the state's own memory."""
        raise NotImplementedError  # every contender has its own

    def close(self) -> None:
        """Ends processes and threads."""


SYNCS_FILES = "syncs its files, not their directory"
NO_SYNC = "does not sync; the benchmark does, afterwards"


def plain_state(state: State) -> dict[str, Any]:
    """Returns tensors by name: all ranks have the same parameters, and names of their own for the rest."""
    tensors: dict[str, Any] = {f"model/{name}": p.data for name, p in state.parameters.items()}
    tensors |= {f"optimizer/{piece.key}": piece.tensor for piece in state.pieces}
    return tensors | {"iteration": torch.tensor(state.steps)}


class Dcp(Contender):
    """torch.distributed.checkpoint.save."""

    facts = Facts(f"thread_count={THREADS}, enable_plan_caching=True", SYNCS_FILES)

    def __init__(self) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        self._planner = DefaultSavePlanner(enable_plan_caching=True)

    def prepare(self, state: State) -> Any:
        return plain_state(state)

    def start(self, prepared: Any, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(prepared, storage_writer=self._writer(directory), planner=self._planner)

    def load(self, state: State, directory: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        load(plain_state(state), storage_reader=FileSystemReader(directory))

    def _writer(self, directory: Path) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(directory, thread_count=THREADS)


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save, with one of its stagers.

    A DefaultStager of torch 2.11 cannot stage twice (KeyError): with `is_new`, each save has its own.
    """

    def __init__(
        self, settings: str, stager: Callable[[], Any], is_new: bool = True, in_process: bool = False
    ) -> None:
        super().__init__()
        made = ", a new stager in each timed call" if is_new else ""
        self.facts = Facts(f"{settings}{made}, {Dcp.facts.settings}", SYNCS_FILES)
        self._make, self._is_new, self._in_process = stager, is_new, in_process
        self._stager = stager()
        self._group = dist.new_group(backend="gloo")  # its collectives run in a thread
        self._response: Any = None

    def start(self, prepared: Any, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        if self._is_new:
            self._stager.close()
            self._stager = self._make()
        kinds = AsyncCheckpointerType
        self._response = async_save(
            prepared,
            storage_writer=self._writer(directory),
            planner=self._planner,
            process_group=self._group,
            async_checkpointer_type=kinds.PROCESS if self._in_process else kinds.THREAD,
            async_stager=self._stager,
        )

    def fence(self) -> None:
        staged = getattr(self._response, "staging_completion", None)
        if staged is not None:
            staged.result()
        else:
            self._stager.synchronize_staging()

    def poll(self) -> bool:
        written = getattr(self._response, "upload_completion", self._response)
        if not written.done():
            return False
        written.result()
        self._response = None
        return True

    def close(self) -> None:
        self._stager.close()


def dcp_thread() -> Contender:
    """Returns async_save with copies made by a thread into new memory."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=True,
        use_non_blocking_copy=False,
    )
    return DcpAsync("thread, DefaultStager, use_async_staging=True", lambda: DefaultStager(options))


def dcp_blocking() -> Contender:
    """Returns async_save with copies made before it returns, into memory that it keeps."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    settings = "thread, BlockingAsyncStager, cache_staged_state_dict=True"
    return DcpAsync(settings, lambda: BlockingAsyncStager(cache_staged_state_dict=True), is_new=False)


def dcp_process() -> Contender:
    """Returns async_save in a process of its own, through shared memory."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=True,
        use_async_staging=True,
        use_non_blocking_copy=False,
    )
    settings = "process, DefaultStager, use_shared_memory=True, use_async_staging=True"
    return DcpAsync(settings, lambda: DefaultStager(options), in_process=True)


class TorchSave(Contender):
    """torch.save: rank 0 writes the parameters, each rank its optimizer state."""

    facts = Facts("one file a rank, and one of parameters; loads with mmap=True", NO_SYNC)

    def prepare(self, state: State) -> Any:
        parts = {f"optimizer-{state.rank}.pt": {piece.key: piece.tensor for piece in state.pieces}}
        if state.rank == 0:
            parts["model.pt"] = {name: p.data for name, p in state.parameters.items()}
        return parts

    def start(self, prepared: Any, directory: Path) -> None:
        for name, part in prepared.items():
            torch.save(part, directory / name)
        dist.barrier()

    def load(self, state: State, directory: Path) -> None:
        targets = {"model.pt": {name: p.data for name, p in state.parameters.items()}}
        targets[f"optimizer-{state.rank}.pt"] = {piece.key: piece.tensor for piece in state.pieces}
        for name, tensors in targets.items():
            stored = torch.load(directory / name, mmap=True, weights_only=True)
            for key, tensor in tensors.items():
                tensor.copy_(stored[key])


class Snapshot(Contender):
    """torchsnapshot: Snapshot.take, or Snapshot.async_take."""

    def __init__(self, is_async: bool) -> None:
        self._library: Any = importlib.import_module("torchsnapshot")
        self._is_async, self._pending = is_async, None
        call = "async_take" if is_async else "take"
        self.facts = Facts(f"{call}, parameters replicated, 16 concurrent writes (its default)", NO_SYNC)

    def prepare(self, state: State) -> Any:
        tensors = plain_state(state)
        model = {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
        optimizer = {name: tensor for name, tensor in tensors.items() if name not in model}
        return {"model": self._library.StateDict(**model), "rest": self._library.StateDict(**optimizer)}

    def start(self, prepared: Any, directory: Path) -> None:
        if self._is_async:
            self._pending = self._library.Snapshot.async_take(
                str(directory), prepared, replicated=["model/**"]
            )
        else:
            self._library.Snapshot.take(str(directory), prepared, replicated=["model/**"])

    def poll(self) -> bool:
        if self._pending is None:
            return True
        if not self._pending.done():
            return False
        self._pending.wait()
        self._pending = None
        return True

    def load(self, state: State, directory: Path) -> None:
        targets = self.prepare(state)
        self._library.Snapshot(str(directory)).restore(targets)
        for name, tensor in plain_state(state).items():
            stored = targets["model" if name.startswith("model/") else "rest"][name]
            if stored.data_ptr() != tensor.data_ptr():
                tensor.copy_(stored)


TORCH: dict[str, Callable[[], Contender]] = {
    "DCP save": Dcp,
    "DCP async, thread": dcp_thread,
    "DCP async, blocking stager": dcp_blocking,
    "DCP async, process": dcp_process,
    "torchsnapshot": lambda: Snapshot(is_async=False),
    "torchsnapshot async": lambda: Snapshot(is_async=True),
    "torch.save": TorchSave,
}
