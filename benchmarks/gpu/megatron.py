"""Compares Megatron's own torch_dist and this package on one state, through `dist_checkpointing.save`.

The time that a trainer is held is counted alike for all: the call of save, scheduling the request, the first
poll, the fence before the next step (ours only, with what the stream waits), and every later poll, with what
Megatron runs to finalize. In every other round a `torch.cuda.synchronize()` follows the save and counts too,
as Megatron's timers make it.
"""

from __future__ import annotations

import shutil
import statistics
import time
import warnings
from typing import Any

import torch

from benchmarks.gpu.context import Part
from benchmarks.gpu.device import make_shard
from benchmarks.gpu.environment import CONNECTIONS_LIMIT, IS_FAKE
from benchmarks.gpu.held import Work
from benchmarks.gpu.memory import MemoryWatch, fitting
from benchmarks.gpu.ways import PARTS, Way, all_ways
from benchmarks.rounds import medians
from benchmarks.states import bytes_of
from megatron_datastates.config import GIB, MIB
from megatron_datastates.providers.tensors import is_frozen

_LEAST_SECONDS = 15.0  # for rounds

Samples = dict[str, list[dict[str, float]]]  # by way: the parts of each save
State = dict[str, torch.nn.Parameter]


def measure_megatron(part: Part) -> None:
    """Reports held time, rates and memory of all ways, in turns.

    Each way's first save shows what memory it takes. What ways share (helper processes, our pool) counts for
    the first that has it.
    """
    warnings.filterwarnings("ignore")
    try:
        import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401
    except ImportError as error:
        part.report(status=f"left out: megatron-core does not import here ({error})")
        return
    _join_world(part)
    # In host memory at once: our two pools, what Megatron's ways copy, and the page cache that they fill.
    wanted = [8 * MIB] if part.is_small else [GIB, 2 * GIB]
    sizes, sizes_left_out = fitting(wanted, part.device, part.folder, host_copies=6.0)
    shard = make_shard(sizes[-1], 30 if part.is_small else 600)
    state = {key: _parameter(tensor) for key, tensor in shard.items()}
    part.report(bytes=bytes_of(state), tensors=len(state), tensors_left_to_the_fence=_count_lazy(state))
    part.report(connections=CONNECTIONS_LIMIT, sizes_left_out=sizes_left_out)
    work = Work(0.02 if part.is_small else 0.25)
    ready, first_saves = _first_saves(part, state, work)
    _measure_rounds(part, state, work, ready, first_saves)
    part.report(complete=True)  # what follows may hang, and no longer matters
    for way in ready:
        if way.queue is not None:
            way.queue.close()
    torch.distributed.destroy_process_group()


def _first_saves(part: Part, state: State, work: Work) -> tuple[list[Way], dict[str, dict[str, float]]]:
    """Saves once in every way; returns those that work here, and the memory that each took."""
    ways, left_out = all_ways(part.device)
    part.report(left_out=left_out)
    ready: list[Way] = []
    taken: dict[str, dict[str, float]] = {}
    for way in ways:
        if time.monotonic() > part.deadline - _LEAST_SECONDS:
            left_out[way.name] = "no time was left"
            continue
        directory = part.folder / way.name  # its own: a save that was abandoned may go on
        with MemoryWatch(part.device) as watch:
            first = way.try_save(lambda: _sharded(state), directory, work)
        if isinstance(first, dict):
            taken[way.name] = watch.growth() | {"first_save_held_ms": 1e3 * first["held"]}
            ready.append(way)
        else:
            left_out[way.name] = first
        shutil.rmtree(directory, ignore_errors=True)
        part.report(left_out=left_out, first_saves=taken)
    return ready, taken


def _measure_rounds(
    part: Part, state: State, work: Work, ways: list[Way], first_saves: dict[str, dict[str, float]]
) -> None:
    total = bytes_of(state)
    with_synchronize: Samples = {way.name: [] for way in ways}
    without: Samples = {way.name: [] for way in ways}
    for number in part.rounds(2 if part.is_small else 8):
        synchronize = number % 2 == 0
        samples = with_synchronize if synchronize else without
        for way in ways:
            directory = part.folder / way.name
            samples[way.name].append(way.save(lambda: _sharded(state), directory, work, synchronize))
            shutil.rmtree(directory)
        summaries = {name: _summary(found, total) for name, found in samples.items()}
        if synchronize:
            named = {name: summary | first_saves[name] for name, summary in summaries.items()}
            part.report(ways=named, ratios=_ratios(samples))
        else:
            part.report(without_synchronize=summaries)
        part.report(repeats=number + 1)


def _sharded(state: State) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    sharded = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in state.items()}
    return sharded | {"iteration": 1}


def _parameter(memory: torch.Tensor) -> torch.nn.Parameter:
    """Returns a parameter in given memory, as in Megatron's buffers: it is immutable until the next step.

    It is one that is trained: frozen ones are expected to stay as they are, and go to a file of their own.
    """
    values = memory.view(torch.bfloat16)
    parameter = torch.nn.Parameter(torch.empty(0, dtype=values.dtype, device="cuda"))
    parameter.data = values
    return parameter


def _count_lazy(state: State) -> int:
    from megatron_datastates.mcore.save import mutability
    from megatron_datastates.providers.base import Mutability

    classify = mutability.proof_in_training_loop()
    trained = [parameter for parameter in state.values() if not is_frozen(parameter)]
    return sum(classify(parameter) is Mutability.AT_FENCE for parameter in trained)


def _summary(samples: list[dict[str, float]], total: int) -> dict[str, float]:
    middle = medians(samples)
    return {
        "held_ms": 1e3 * middle["held"],
        **{f"{name}_ms": 1e3 * middle[name] for name in PARTS},
        "finalized_seconds": middle["finalized"],
        "gb_per_s": total / middle["finalized"] / 1e9,
    }


def _ratios(samples: Samples) -> dict[str, dict[str, float]]:
    """Returns how many times longer than ours each of Megatron's ways held the trainer, and took in all."""
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


def _join_world(part: Part) -> None:
    torch.distributed.init_process_group(
        "gloo" if IS_FAKE else "nccl", init_method=f"file://{part.folder}/world", rank=0, world_size=1
    )
