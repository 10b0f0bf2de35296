"""Ranks of the tests in this folder: saves that fail, die, or are damaged afterwards."""

import ctypes
import fractions
import os
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from saving_rank import (
    MCORE_QUEUE,
    assert_loads,
    clear_faults,
    failure_of,
    join,
    make_directory,
    names_left,
    report,
    save,
    set_faults,
    state,
)

from megatron_datastates import fence
from megatron_datastates.config import Options
from megatron_datastates.mcore import DataStatesSaveStrategy
from megatron_datastates.mcore.save import request as request_module
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider


class Unpicklable:
    def __reduce__(self) -> str | tuple[object, ...]:
        raise RuntimeError("this object cannot be pickled")


def fail_then_recover(root: str, mode: str, plan: str, failing_rank: int, folder: str) -> None:
    """Saves once, fails on one rank, and saves again into the directory of the failed save."""
    join()
    good, bad = Path(root, "good"), Path(root, "bad")
    save(good, state(1), DataStatesSaveStrategy(), mode)
    set_faults(plan, failing_rank)
    faulty = DataStatesSaveStrategy()
    clear_faults()
    error = failure_of(lambda: save(bad, state(2), faulty, mode))
    torch.distributed.barrier()
    left = names_left(bad)
    assert_loads(good, 1)
    save(bad, state(3), DataStatesSaveStrategy(), mode)
    assert_loads(bad, 3)
    report(folder, error=error, left=left, after=sorted(os.listdir(bad)))


def save_to_directories_of_their_own(root: str, mode: str, folder: str) -> None:
    """Saves as on nodes where --save is a local disk."""
    rank, _ = join()
    own = Path(root, f"node{rank}")
    own.mkdir()
    strategy = DataStatesSaveStrategy()
    error = failure_of(lambda: save(own, state(1), strategy, mode))
    report(folder, error=error, left=[name for name in names_left(own) if not name.startswith("index-")])


def tear_on_one_rank(root: str, failing_rank: int, folder: str) -> None:
    """Breaks the promise on one rank: changes a tensor while it is being copied, without a fence."""
    rank, _ = join()
    bad = Path(root, "bad")
    make_directory(bad)
    sharded = state(2)
    slow = DataStatesSaveStrategy(assume_immutable=True, options=Options(lazy_delay=3600.0))
    request = dist_checkpointing.save(sharded, str(bad), slow, async_sharded_save=True, **MCORE_QUEUE)
    if rank == failing_rank:
        ctypes.memset(sharded["weight"].data.data_ptr(), 7, sharded["weight"].data.nbytes)
    error = failure_of(request.execute_sync)
    torch.distributed.barrier()
    left = names_left(bad)
    save(bad, state(3), slow, "async")
    assert_loads(bad, 3)
    report(folder, error=error, left=left, after=sorted(os.listdir(bad)))


class Unprovable(DataStatesSaveStrategy):
    """A strategy that, on one rank, fails to classify its tensors as lazy or eager."""

    def classifier(self) -> Any:
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("this tensor cannot be classified")
        return super().classifier()


def fail_while_classifying(root: str, folder: str) -> None:
    join()
    bad = Path(root, "bad")
    error = failure_of(lambda: save(bad, state(1), Unprovable(), "async"))
    report(folder, error=error, left=names_left(bad))


def fail_with_finalize_functions_taken_over(root: str, folder: str) -> None:
    """Calls the finalize functions later, as Megatron's main branch does, after a failed save."""
    join()
    bad = Path(root, "bad")
    make_directory(bad)
    set_faults("sync:1:EIO", 1)
    faulty = DataStatesSaveStrategy(options=Options.from_environment({"on_failure": "warn"}))
    clear_faults()
    request = dist_checkpointing.save(state(2), str(bad), faulty, async_sharded_save=True, **MCORE_QUEUE)
    called: list[int] = []
    request.finalize_fns.append(lambda: called.append(1))
    moved = list(request.finalize_fns)
    request.finalize_fns.clear()
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    for function in moved:
        function()
    report(folder, moved=len(moved), called=called, left=names_left(bad))


def save_behind_one_that_hangs(root: str, on_failure: str, folder: str) -> None:
    """Goes on saving while the first save's write hangs on rank 1, whose staging memory it keeps."""
    rank, ranks = join()
    set_faults("write:0:stall=5000", 1)
    chosen = {
        "on_failure": on_failure,
        "fence_deadline": 0.3,
        "staging_memory": 8 << 20,
        "slot_size": 1 << 20,
    }
    strategy = DataStatesSaveStrategy(assume_immutable=True, options=Options.from_environment(chosen))
    clear_faults()
    warned: list[str] = []
    request_module.warn_of_failure = lambda publication: warned.append(str(publication.error))
    queue, error, saves = AsyncCallsQueue(), None, 0
    while error is None and saves < 4:
        directory = Path(root, f"iter_{saves:07d}")
        make_directory(directory)
        sharded, large = state(saves), torch.ones(5 << 20, dtype=torch.uint8)
        sharded["large"] = ShardedTensor.from_rank_offsets("large", large, (0, rank, ranks))
        request = dist_checkpointing.save(
            sharded, str(directory), strategy, async_sharded_save=True, **MCORE_QUEUE
        )
        queue.schedule_async_request(request)
        saves += 1
        fence()  # as before an optimizer's step
        for _ in range(3):  # iterations
            error = error or failure_of(lambda: queue.maybe_finalize_async_calls(blocking=False))
    report(folder, error=error, saves=saves, warned=warned)


BAD_OBJECTS = {"unpicklable": Unpicklable(), "untrusted": fractions.Fraction(1, 3)}


def fail_with_a_bad_object(root: str, kind: str, failing_rank: int, folder: str) -> None:
    """Saves an object that, on one rank, cannot be pickled, or that no load would accept."""
    rank, ranks = join()
    directory = Path(root, "bad")
    sharded = state(1)
    payload = BAD_OBJECTS[kind] if rank == failing_rank else "fine"
    sharded["own"] = ShardedObject("own", payload, (ranks,), (rank,))
    error = failure_of(lambda: save(directory, sharded, DataStatesSaveStrategy(), "async"))
    report(folder, error=error, left=names_left(directory))


def save_with_a_hole(root: str, folder: str) -> None:
    """Saves a state of which one rank has left out its shard of a tensor."""
    rank, _ = join()
    sharded = state(1)
    if rank == 1:
        del sharded["weight"]
    strategy = DataStatesSaveStrategy()
    request = strategy.async_save({k: v for k, v in sharded.items() if k != "iteration"}, Path(root, "bad"))
    report(folder, error=failure_of(request.execute_sync))


def die(root: str, plan: str, dying_rank: int, resave: bool, folder: str) -> None:
    """Saves, then is killed on one rank in a second save: into another directory, or the same (`resave`)."""
    join()
    save(Path(root, "first"), state(1), DataStatesSaveStrategy(), "sync")
    set_faults(plan, dying_rank)
    save(Path(root, "first" if resave else "second"), state(2), DataStatesSaveStrategy(), "async")
    report(folder)


def loads_after_death(root: str, resave: bool, folder: str) -> None:
    """Loads what was published before the kill, and saves again into the directory of the killed save."""
    join()
    second = Path(root, "first" if resave else "second")
    state_of_first = load_value(Path(root, "first"))
    assert_loads(Path(root, "first"), state_of_first)
    refused = failure_of(lambda: dist_checkpointing.load(state(-1), str(second)))
    save(second, state(3), DataStatesSaveStrategy(), "async")
    assert_loads(second, 3)
    report(folder, first=state_of_first, refused=refused, after=sorted(os.listdir(second)))


def load_value(directory: Path) -> int:
    value: int = dist_checkpointing.load_common_state_dict(str(directory))["iteration"]
    return value


def save_only(directory: str, value: int, folder: str) -> None:
    join()
    save(Path(directory), state(value), DataStatesSaveStrategy(), "sync")
    report(folder)


def errors_of_loads(directory: str, folder: str) -> None:
    """Reports the errors of loads of the whole state, and of requests that do not match it."""
    join()
    changed = {
        "whole": lambda sharded: None,
        "key": lambda sharded: sharded.update(other=plain("other.weight", torch.zeros(3))),
        "shape": lambda sharded: sharded.update(same=plain("same", torch.zeros(34, dtype=torch.bfloat16))),
        "dtype": lambda sharded: sharded.update(same=plain("same", torch.zeros(33, dtype=torch.int32))),
        "object": lambda sharded: sharded.update(more=ShardedObject("more", None, (1,), (0,))),
    }
    errors = {}
    for name, change in changed.items():
        sharded = state(-1)
        change(sharded)
        errors[name] = failure_of(
            lambda wanted=sharded: dist_checkpointing.load(wanted, directory, validate_access_integrity=False)
        )
    report(folder, errors=errors)


def plain(key: str, tensor: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor)


class Malicious:
    """Makes a directory when it is unpickled without an allow list."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.marker,)


def save_malicious(directory: str, marker: str, folder: str) -> None:
    join()
    sharded = state(1)
    sharded["object"].data = Malicious(marker)
    trusting = DataStatesSaveStrategy(options=Options(trust_objects=True))
    save(Path(directory), sharded, trusting, "sync")
    error = failure_of(lambda: dist_checkpointing.load(state(-1), directory))
    report(folder, error=error, ran=Path(marker).is_dir())


def save_in_children(root: str, folder: str) -> None:
    """Forks a child in mid-save on each rank; the child saves, too."""
    rank, _ = join()
    first, own = Path(root, "first"), Path(root, f"child{rank}")
    slow = DataStatesSaveStrategy(options=Options.from_environment({"write_limit": 2_000_000}))
    make_directory(first)
    request = dist_checkpointing.save(state(1), str(first), slow, async_sharded_save=True, **MCORE_QUEUE)
    child = os.fork()
    if child == 0:
        os._exit(save_alone(own))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    request.execute_sync()
    for function in request.finalize_fns:
        function()
    assert_loads(first, 1)
    report(folder, child=code, files=len(list(own.glob("data-*"))))


def save_alone(directory: Path) -> int:
    """Saves without peers; returns an exit code, 0 if the save was published."""
    saver = Saver(Options(), SaveSession())
    publication = saver.start(directory, TensorProvider({"w": torch.ones(1000)}, Mutability.AT_FENCE))
    published = publication.wait() is Outcome.PUBLISHED
    saver.close()
    return 0 if published and saver.session.collectives.size == 1 else 1
