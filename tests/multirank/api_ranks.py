"""Ranks of test_api.py."""

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.optimizer.optimizer import FP32Optimizer
from saving_rank import (
    MCORE_QUEUE,
    assert_loads,
    failure_of,
    full_tensor,
    join,
    make_directory,
    report,
    save,
    state,
    wait_for,
)

from megatron_datastates.config import Options
from megatron_datastates.engine.tail import TailWriter
from megatron_datastates.errors import OptionError
from megatron_datastates.mcore import DataStatesSaveStrategy, enable, fence, fences
from megatron_datastates.mcore.save.mutability import proof_in_training_loop
from megatron_datastates.mcore.save.strategy import TrainingSaveStrategy
from megatron_datastates.pipeline.saver_pool import saver_for
from megatron_datastates.providers.base import Mutability

# Copies begin at the first poll or fence, and take about 0.6 s.
SLOW = Options(copy_limit=2_000_000, lazy_delay=3600.0)


def save_and_load(directory: str, mode: str, wrapped: bool, folder: str) -> None:
    join()
    strategy = DataStatesSaveStrategy()
    save(Path(directory), state(3), FullyParallelSaveStrategyWrapper(strategy) if wrapped else strategy, mode)
    assert_loads(Path(directory), 3)
    report(folder, files=sorted(os.listdir(directory)))


def load(directory: str, value: int, shards: int, folder: str) -> None:
    join()
    assert_loads(Path(directory), value, shards=shards)
    plain = dist_checkpointing.load_plain_tensors(directory)
    assert torch.equal(plain["weight"], full_tensor(value, shards))
    report(folder)


def save_and_load_with_another_default_device(directory: str, folder: str) -> None:
    """On one rank: Megatron's own calls on gloo would get tensors of that device."""
    join()
    make_directory(Path(directory))
    weight, scaler = torch.arange(8.0), [torch.tensor(2.0)]

    def states(tensor: torch.Tensor, value: object) -> dict[str, object]:
        sharded = ShardedTensor.from_rank_offsets("weight", tensor)
        return {"weight": sharded, "scaler": ShardedObject("scaler", value, (1,), (0,))}

    saved, wanted = states(weight, scaler), states(torch.zeros(8), None)
    torch.set_default_device("meta")  # for which a GPU may stand
    try:
        dist_checkpointing.save(saved, directory, DataStatesSaveStrategy())
        found = dist_checkpointing.load(wanted, directory)
    finally:
        torch.set_default_device(None)
    assert torch.equal(found["weight"], weight) and found["scaler"] == scaler
    report(folder)


def mutate_at_once(directory: str, folder: str) -> None:
    """Changes a tensor as soon as the save returns, without the promise not to."""
    join()
    make_directory(Path(directory))
    options = Options(copy_limit=20_000_000)
    sharded = state(5)
    source = sharded["weight"].data
    request = dist_checkpointing.save(
        sharded, directory, DataStatesSaveStrategy(options=options), async_sharded_save=True
    )
    source.fill_(-7)
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    assert_loads(Path(directory), 5)
    report(folder)


def step_during_slow_copy(directory: str, folder: str) -> None:
    """Steps while a promised tensor is being copied: the step waits for the copy, not for the write."""
    join()
    make_directory(Path(directory))
    has_stepped, close = threading.Event(), TailWriter.close

    def close_later(tail: TailWriter) -> int:
        has_stepped.wait(60)  # nothing is written to the end before
        return close(tail)

    TailWriter.close = close_later  # type: ignore[method-assign]
    sharded = state(5)
    parameter = torch.nn.Parameter(sharded["weight"].data)
    parameter.grad = torch.ones_like(parameter)
    sharded["weight"].data = parameter
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    request = dist_checkpointing.save(
        sharded,
        directory,
        DataStatesSaveStrategy(assume_immutable=True, options=SLOW),
        async_sharded_save=True,
    )
    job = request.async_fn.publication.save
    copied_at_return = job.times()["staging"] > 0
    optimizer.step()
    written_at_step = job.times()["writing"] > 0
    has_stepped.set()
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    assert_loads(Path(directory), 5)
    assert not torch.equal(parameter, state(5)["weight"].data), "the step has changed the parameter"
    report(
        folder,
        copied_at_return=copied_at_return,
        written_at_step=written_at_step,
        copied_at_step=job.times()["staging"] > 0,
        fence=job.fence_seconds,
    )


def saves_between_steps(root: str, folder: str) -> None:
    """Steps before any save, then starts two lazy saves, evaluates, and steps again."""
    join()
    # The second save shares the first one's threads and slots.
    strategy = DataStatesSaveStrategy(assume_immutable=True, options=SLOW)
    value = state(5)["weight"].data
    parameter = torch.nn.Parameter(value.clone() + 1)
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.step()
    queue, jobs = AsyncCallsQueue(), []
    for name in ("first", "second"):
        make_directory(Path(root, name))
        sharded = state(5)
        sharded["weight"].data = parameter
        request = dist_checkpointing.save(
            sharded, str(Path(root, name)), strategy, async_sharded_save=True, **MCORE_QUEUE
        )
        jobs.append(request.async_fn.publication.save)
        queue.schedule_async_request(request)
    under_way = [job.times()["staging"] == 0 for job in jobs]
    with torch.no_grad():
        parameter.sum().item()
    queue.maybe_finalize_async_calls(blocking=False)
    optimizer.step()
    optimizer.step()
    queue.maybe_finalize_async_calls(blocking=True)
    for name in ("first", "second"):
        assert_loads(Path(root, name), 5)
    assert torch.equal(parameter.data, value - 2)
    report(folder, under_way=under_way, fences=[job.fence_seconds for job in jobs])


def torn_without_fence(directory: str, tripwire: bool, folder: str) -> None:
    """Breaks the promise without a fence: without the tripwire, new bytes get into the checkpoint."""
    join()
    make_directory(Path(directory))
    sharded = state(5)
    source = sharded["weight"].data
    options = dataclasses.replace(SLOW, tripwire=tripwire)
    strategy = DataStatesSaveStrategy(assume_immutable=True, options=options)
    request = dist_checkpointing.save(sharded, directory, strategy, async_sharded_save=True)
    source.fill_(-7)
    error = failure_of(request.execute_sync)
    torn = error is None and bool((dist_checkpointing.load(state(-1), directory)["weight"] == -7).any())
    report(folder, error=error, torn=torn, published=Path(directory, "datastates.manifest").exists())


class StepWithoutHook(FP32Optimizer):
    """One of Megatron's optimizers without an inner torch optimizer: its step fires no hook."""

    def __init__(self, tensor: torch.Tensor, skip: bool, linger: Callable[[], None]) -> None:
        self.tensor, self.skip, self.linger = tensor, skip, linger
        self.config = SimpleNamespace(timers=None, clip_grad=0.0, log_num_zeros_in_grad=False)

    def prepare_grads(self) -> bool:
        return self.skip

    def step_with_ready_grads(self) -> bool:
        self.tensor.data.fill_(-7)
        self.linger()
        return True


def step_without_fence(directory: str, skip: bool, outlast_copy: bool, folder: str) -> None:
    join()
    sharded = state(5)
    strategy = DataStatesSaveStrategy(
        assume_immutable=True, options=Options(copy_limit=2_000_000, tripwire=False)
    )
    make_directory(Path(directory))
    request = dist_checkpointing.save(sharded, directory, strategy, async_sharded_save=True)
    job = request.async_fn.publication.save

    def linger() -> None:
        while outlast_copy and not job.times()["staging"]:
            time.sleep(0.01)

    StepWithoutHook(sharded["weight"].data, skip, linger).step()
    sharded["weight"].data.fill_(-8)  # as clip_qk does after the step, even a skipped one
    error = failure_of(request.execute_sync)
    if error is None:
        assert_loads(Path(directory), 5)
    report(folder, error=error, published=Path(directory, "datastates.manifest").exists())


def two_saves_at_once(directories: list[str], folder: str) -> None:
    """Starts a second save before the first is published; both become whole."""
    join()
    options = Options(write_limit=2_000_000, staging_memory=8 << 20)
    queue = AsyncCallsQueue()
    for value, directory in enumerate(directories):
        make_directory(Path(directory))
        strategy = DataStatesSaveStrategy(options=options)
        queue.schedule_async_request(
            dist_checkpointing.save(state(value), directory, strategy, async_sharded_save=True)
        )
    waiting = queue.get_num_unfinalized_calls()
    queue.close()
    for value, directory in enumerate(directories):
        assert_loads(Path(directory), value)
    report(folder, waiting=waiting)


def sync_save_between_polls(root: str, folder: str) -> None:
    """Publishes a save while an earlier one of the same, new layout is being polled."""
    join()
    strategy = DataStatesSaveStrategy()
    make_directory(Path(root, "first"))
    request = dist_checkpointing.save(
        state(1), str(Path(root, "first")), strategy, async_sharded_save=True, **MCORE_QUEUE
    )
    publication = request.async_fn.publication
    while not publication.save.is_durable:
        time.sleep(0.01)
    dist.barrier()
    publication.poll()
    save(Path(root, "second"), state(2), strategy, "sync")
    request.execute_sync()
    assert_loads(Path(root, "first"), 1)
    assert_loads(Path(root, "second"), 2)
    report(folder)


def fresh_bytes(root: str, folder: str) -> None:
    """Saves several times with one layout, moving, freeing and reallocating tensors in between."""
    join()
    strategy = DataStatesSaveStrategy(assume_immutable=True)
    addresses = set()
    for value in range(4):
        spoiled = torch.full((6 * 50_000,), -3.0)  # takes the memory of the previous state
        sharded = state(value)
        addresses.add(sharded["weight"].data.data_ptr())
        save(Path(root, str(value)), sharded, strategy, "async" if value % 2 else "sync")
        fence()
        del sharded, spoiled
    for value in range(4):
        assert_loads(Path(root, str(value)), value)
    layouts = len(saver_for(strategy.options).session.plans)
    report(folder, layouts=layouts, addresses=len(addresses))


def count_collectives(root: str, folder: str) -> None:
    join()
    strategy = DataStatesSaveStrategy()
    groups_before = len(dist.distributed_c10d._world.pg_map)
    per_save = []
    for value in range(3):
        calls = saver_for(strategy.options).session.collectives.calls
        before = dict(calls)
        save(Path(root, str(value)), state(value), strategy, "sync")
        per_save.append({kind: calls[kind] - before.get(kind, 0) for kind in calls})
    report(folder, per_save=per_save, groups=len(dist.distributed_c10d._world.pg_map) - groups_before)


def starting_makes_no_collective(root: str, folder: str) -> None:
    """Starts a save on one rank, after the run's first, while its peer makes no call."""
    rank, _ = join()
    strategy = DataStatesSaveStrategy()
    save(Path(root, "first"), state(0), strategy, "sync")
    started = Path(root, "rank 0 has started")
    if rank == 1:
        wait_for(started)
    # Megatron's own entry point gathers; the strategy itself must not.
    request = strategy.async_save(
        {k: v for k, v in state(1).items() if k != "iteration"}, Path(root, "second")
    )
    started.touch()
    request.execute_sync()
    report(folder, threads=[t.name for t in threading.enumerate() if not t.daemon])


def abandoned_at_exit(directory: str, folder: str) -> None:
    """Ends the program while a save is in flight."""
    join()
    make_directory(Path(directory))
    strategy = DataStatesSaveStrategy(options=Options(write_limit=300_000))
    dist_checkpointing.save(state(1), directory, strategy, async_sharded_save=True)
    report(folder)


def fork_in_mid_save(directory: str, folder: str) -> None:
    join()
    make_directory(Path(directory))
    strategy = DataStatesSaveStrategy(assume_immutable=True, options=Options(copy_limit=2_000_000))
    request = dist_checkpointing.save(state(9), directory, strategy, async_sharded_save=True)
    while not _open_files_below(directory):  # ended by the job's time limit
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        fence()  # the save is the parent's: nothing to wait for
        os._exit(bool(_open_files_below(directory)))
    _, status = os.waitpid(child, 0)
    request.execute_sync()
    assert_loads(Path(directory), 9)
    report(folder, child=os.waitstatus_to_exitcode(status))


def _open_files_below(directory: str) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself is gone
            found.append(str(link.readlink()))
    return [name for name in found if name.startswith(directory)]


def switch_on(root: str, folder: str) -> None:
    """Saves with the environment switch and each kind of strategy, and with other values of the variable."""
    import megatron.core.dist_checkpointing.strategies.torch as home

    join()
    stock, messages = home.TorchDistSaveShardedStrategy(), Messages()
    wrapped = FullyParallelSaveStrategyWrapper(home.TorchDistSaveShardedStrategy(), None, True)
    own = DataStatesSaveStrategy(options=Options(copy_threads=1))
    strategies = {"none": None, "stock": stock, "again": stock, "wrapped": wrapped, "own": own}
    backends, errors = {}, {}
    for value in ("0", "perhaps", "1"):
        os.environ["MEGATRON_DATASTATES_ENABLE"] = value
        for number, (name, strategy) in enumerate(strategies.items() if value == "1" else [("none", None)]):
            directory = Path(root, f"{value}-{name}")
            make_directory(directory)
            errors[directory.name] = None
            try:
                dist_checkpointing.save(state(number), str(directory), strategy)
            except OptionError as error:
                errors[directory.name] = str(error)
            if errors[directory.name] is None:
                assert_loads(directory, number)
                found = json.loads((directory / "metadata.json").read_text())
                backends[directory.name] = found["sharded_backend"]
    later = [type(one).__name__ for one in (wrapped.base_strategy, home.TorchDistSaveShardedStrategy())]
    save(Path(root, "async"), state(9), None, "async")
    assert_loads(Path(root, "async"), 9)
    said = [text for text in messages.texts if "is replaced in" in text]
    report(folder, backends=backends, errors=errors, later=later, said=said)


class Messages(logging.Handler):
    """Keeps what our package logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logger = logging.getLogger("megatron_datastates")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def enable_twice(root: str, folder: str) -> None:
    """Enables twice; the name in Megatron's module, and where it was imported before, makes our strategy."""
    import megatron.core.dist_checkpointing.serialization as holder
    import megatron.core.dist_checkpointing.strategies.torch as home

    join()
    stock = FullyParallelSaveStrategyWrapper(home.TorchDistSaveShardedStrategy("torch_dist", 1), None, True)
    lazy, kept = [], []
    for number, chosen in enumerate((True, False)):
        enable(lazy=chosen)
        strategy = home.TorchDistSaveShardedStrategy("torch_dist", 1)
        lazy.append(strategy.options.lazy)
        kept.append(strategy)
        save(Path(root, str(number)), state(number), strategy, "async")
        assert_loads(Path(root, str(number)), number)
    lazy.append(kept[0].is_lazy())
    save(Path(root, "before"), state(5), stock, "sync")
    before = json.loads(Path(root, "before", "metadata.json").read_text())["sharded_backend"]
    try:
        error = ""
        enable(no_such_option=1)
    except Exception as failure:
        error = type(failure).__name__
    name = "TorchDistSaveShardedStrategy"
    names = [vars(module).get(name, home.TorchDistSaveShardedStrategy).__name__ for module in (home, holder)]
    # A strategy object keeps its own options: here, everything may change when save returns.
    sharded, own = state(7), DataStatesSaveStrategy(options=Options(copy_threads=1))
    sharded["weight"].data = torch.nn.Parameter(sharded["weight"].data)
    make_directory(Path(root, "own"))
    request = dist_checkpointing.save(
        sharded, str(Path(root, "own")), own, async_sharded_save=True, **MCORE_QUEUE
    )
    job = request.async_fn.publication.save
    request.execute_sync()
    report(
        folder,
        lazy=lazy,
        before=before,
        stock=names,
        error=error,
        own_lazy=job.plan.lazy_bytes,
        own_eager=job.plan.eager_bytes,
    )


def dtensors_have_stepped(root: str, folder: str) -> None:
    """Steps parameters like FSDP2's, which are wrappers without memory of their own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    _, ranks = join()
    mesh = init_device_mesh("cpu", (ranks,))
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    with torch.no_grad():
        own = parameter.to_local()
    model = torch.nn.ParameterList([parameter])
    classify, unknown = proof_in_training_loop([model]), proof_in_training_loop()
    proved = [classify(own), classify(own.chunk(2)[1]), classify(own.clone()), unknown(own)]
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.step()
    local = parameter.to_local()
    known = fences.stepped_storages()
    save(Path(root, "after"), state(3), TrainingSaveStrategy(), "sync")
    assert_loads(Path(root, "after"), 3)
    report(
        folder,
        known=local.untyped_storage().data_ptr() in known,
        lazy=[mutability is Mutability.AT_FENCE for mutability in proved],
    )
