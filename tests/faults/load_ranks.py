"""Ranks that load damaged checkpoints, or checkpoints that one of them cannot read."""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_ranks import Malicious, plain
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from saving_rank import (
    assert_loads,
    clear_faults,
    failure_of,
    join,
    report,
    save,
    set_faults,
    state,
    wait_for,
)
from torch.distributed.checkpoint.api import CheckpointException

from megatron_datastates.config import Options
from megatron_datastates.mcore import DataStatesSaveStrategy

STRICT, VERIFIED = {"strict": "raise_unexpected"}, {"verify_integrity": True}
KINDS = ("all_gather_object", "all_reduce", "barrier", "broadcast")
counts: Counter[str] = Counter()


def count_collectives() -> None:
    """Counts later collective calls in `counts`."""

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return function(*args, **kwargs)

        return call

    for kind in KINDS:
        setattr(dist, kind, counted(kind, getattr(dist, kind)))


class LateFaults(TorchDistLoadShardedStrategy):
    """Sets the fault plan only when shards are loaded: the common state is read without faults."""

    def load(self, *args: Any, **kwargs: Any) -> Any:
        if "LATE_FAULTS" in os.environ:
            os.environ["MEGATRON_DATASTATES_FAULTS"] = os.environ.pop("LATE_FAULTS")
        return super().load(*args, **kwargs)


def strategy(how: str) -> Any:
    base = LateFaults()
    return FullyParallelLoadStrategyWrapper(base) if how == "parallel" else base


def load(directory: str, how: str, odd: str = "") -> dict[str, Any]:
    """Returns how a load of the state fails on this rank.

    `how`: what is checked, if anything, a value of `strict`, if other than the default, and the strategy.
    `odd`: on the odd rank, "key" asks also for a missing tensor, and "merge" fails after all was read.
    """
    wanted = state(-1)
    if odd == "key":
        wanted["more"] = plain("other.weight", torch.zeros(3))
    elif odd == "merge":
        weight = wanted["weight"]
        wanted["weight"] = ShardedTensorFactory("weight", weight.data, lambda *_: [weight], not_merged)
    kind, _, name = how.rpartition(" ")
    kind, _, strictness = kind.partition(" ")
    options: dict[str, Any] = {"": {}, "strict": STRICT, "verified": VERIFIED}[kind]
    if strictness:
        options = {**options, "strict": strictness}
    try:
        dist_checkpointing.load(wanted, directory, strategy(name), **options)
    except CheckpointingException as error:
        return {
            "error": str(error),
            "is torch's": isinstance(error, CheckpointException),
            "cause": type(error.__cause__).__name__,
        }
    return {"error": None}


def not_merged(parts: Any) -> Any:
    raise RuntimeError("not to be merged")


def fail_together(
    directory: str, good: str, hows: list[str], plan: str, odd_rank: int, views: str, folder: str
) -> None:
    """Loads that fail, one after the other, and then one that succeeds: the ranks are still in step.

    With `views`, each rank resolves the (relative) directory from its own folder.
    """
    rank, _ = join()
    if views:
        os.chdir(Path(views, str(rank)))
    failures = {}
    for how in hows:
        odd = {"": "key", "merge": "merge"}.get(plan, "") if rank == odd_rank else ""
        if plan.startswith("late ") and rank == odd_rank:
            os.environ["LATE_FAULTS"] = plan.removeprefix("late ")
        elif plan and plan != "merge":
            set_faults(plan, odd_rank)
        failures[how] = load(directory, how, odd)
        clear_faults()
        dist.barrier()
    assert_loads(Path(good), 1)
    report(folder, failures=failures)


def count_of_good_load(directory: str, how: str, validated: bool, folder: str) -> None:
    join()
    wanted = state(-1)
    chosen = strategy(how)
    count_collectives()
    dist_checkpointing.load(wanted, directory, chosen, validate_access_integrity=validated)
    report(folder, counts=counts)


def load_another_checkpoint_in_each_group(root: str, how: str, failing_rank: int, folder: str) -> None:
    """Two process groups load at the same time, each from a directory of its own.

    A rank may fail before parts are exchanged.
    """
    rank, _ = join()
    for value in (0, 1):
        sharded = {"number": plain("number", torch.full((5,), float(value)))}
        sharded["number"].replica_id = rank
        save(Path(root, str(value)), sharded, DataStatesSaveStrategy(), "sync")
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, wanted = groups[rank // 2], plain("number", torch.zeros(5))
    wanted.replica_id = rank % 2
    base = LateFaults()
    chosen = FullyParallelLoadStrategyWrapper(base, group) if "parallel" in how else base
    options: dict[str, Any] = {"verify_integrity": True} if "verified" in how else {}
    if "late" not in how:
        set_faults("read:1:EIO", failing_rank)
    elif rank == failing_rank:
        os.environ["LATE_FAULTS"] = "read:1:EIO"
    loaded: dict[str, Any] = {}
    error = failure_of(
        lambda: loaded.update(
            dist_checkpointing.load(
                {"number": wanted}, str(Path(root, str(rank // 2))), chosen, process_group=group, **options
            )
        )
    )
    report(folder, found=int(loaded["number"].sum()) // 5 if loaded else None, error=error)


def read_alone(good: str, damaged: str, folder: str) -> None:
    """Reads on one rank, while the other makes no call until that is done."""
    rank, ranks = join()
    done = Path(folder, "done")
    if rank != 0:
        wait_for(done)
        report(folder)
        return
    count_collectives()
    everything = dist_checkpointing.load_plain_tensors(good)
    assert everything["weight"].shape[0] == ranks * 6
    assert dist_checkpointing.load_common_state_dict(good)["iteration"] == 1
    loaded = dist_checkpointing.load(state(-1), good, validate_access_integrity=False)
    assert loaded["iteration"] == 1
    TorchDistLoadShardedStrategy().load({"same": state(-1)["same"]}, Path(good))
    errors = [
        failure_of(lambda: dist_checkpointing.load_plain_tensors(damaged)),
        failure_of(lambda: dist_checkpointing.load(state(-1), damaged, validate_access_integrity=False)),
    ]
    seen = dict(counts)
    done.touch()
    report(folder, errors=errors, counts=seen)


def save_and_load_malicious(directory: str, marker: str, hows: list[str], folder: str) -> None:
    join()
    sharded = state(1)
    sharded["object"].data = Malicious(marker)
    trusting = DataStatesSaveStrategy(options=Options(trust_objects=True))  # as an attacker's own program
    save(Path(directory), sharded, trusting, "sync")
    failures = {how: load(directory, how) for how in hows}
    report(folder, failures=failures, ran=Path(marker).is_dir())


class SavedMeanwhile(TorchDistLoadShardedStrategy):
    """Another save is published there when the common state was read, and no tensor yet."""

    def load(self, sharded: Any, directory: Any, *args: Any, **kwargs: Any) -> Any:
        save(Path(directory), state(2), DataStatesSaveStrategy(), "sync")
        return super().load(sharded, directory, *args, **kwargs)


def load_while_another_save_is_published(root: str, folder: str) -> None:
    join()
    directory, found = Path(root, "saved"), {}
    save(directory, state(1), DataStatesSaveStrategy(), "sync")
    error = failure_of(
        lambda: found.update(dist_checkpointing.load(state(-1), str(directory), SavedMeanwhile()))
    )
    assert_loads(directory, 2)
    report(folder, error=error, found=sorted(found))


class RemovedMeanwhile(TorchDistLoadShardedStrategy):
    """The checkpoint is removed when the common state was read, and no tensor yet."""

    def load(self, sharded: Any, directory: Any, *args: Any, **kwargs: Any) -> Any:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory)
        dist.barrier()
        return super().load(sharded, directory, *args, **kwargs)


def load_while_it_is_removed(root: str, folder: str) -> None:
    join()
    directory = Path(root, "saved")
    save(directory, state(1), DataStatesSaveStrategy(), "sync")
    error = failure_of(lambda: dist_checkpointing.load(state(-1), str(directory), RemovedMeanwhile()))
    report(folder, error=error)


def load_another_checkpoint_on_each_rank(root: str, folder: str) -> None:
    """Loads as if one rank had opened a directory before a save was published there, and one after."""
    rank, _ = join()
    for value in (0, 1):
        save(Path(root, f"saved{value}"), state(value), DataStatesSaveStrategy(), "sync")
    error = failure_of(lambda: dist_checkpointing.load(state(-1), str(Path(root, f"saved{rank}"))))
    report(folder, error=error)
