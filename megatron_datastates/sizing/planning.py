"""From parameters and parallel sizes to bytes, files, memory and times of a save.

Every number that is an assumption or a measurement says so in `Plan.assumptions`, which the command prints.
"""

from __future__ import annotations

import dataclasses
import math

from megatron_datastates.config import GIB
from megatron_datastates.errors import OptionError
from megatron_datastates.sizing.arguments import Arguments
from megatron_datastates.sizing.model import Parameters, check_divisions, require_described, stages

# Of an asynchronous save that is not the first, and of each of its tensors, in Megatron's loop with prepared
# saves: `save_checkpoint`, fence, polls and finalize. On 2 CPU cores, 396 tensors held one rank for 4.0 ms,
# and 3,084 for 7.1 (benchmarks/results/training.json, "in turns"): 1.2 us a tensor. On H100s, 1,164 held it
# for 11.6 and 9.8 ms: at most 10 and those. The measured times that are quoted are those of README's table.
HELD_MS, HELD_MICROSECONDS = 10.0, 1.2
MEASURED_ON_GPU_MS = 10  # 1,164 tensors (gpu-h100-80gb-hbm3-2026-11-27-2.json)
MEASURED_ON_CPU_MS = 10  # 3,084 tensors, one rank on 2 cores (training-one-rank.json, "large, DP 1")
MEASURED_WITH_TWO_RANKS_MS = 15  # the same model (training-two-ranks.json, "large, DP 2")
_SMALLER_THAN_ADAM = ("muon", "dist_muon")  # momentum for matrices, Adam's moments for all else
_RANK_OBJECT_BYTES = 40 << 10  # random generators, rerun state, footer and header
_LAYER_OBJECT_BYTES = 5 << 10  # extra state of a layer
_COMMON_OBJECT_BYTES = 50 << 10  # arguments, scheduler
_FLOAT32 = 4
# With it, the distributed optimizer gathers all state of a shard on one rank, which stores it.
_GATHERS = "distrib-optim-fully-reshardable-mem-efficient"


@dataclasses.dataclass(frozen=True)
class Grid:
    """Parallel sizes. `data` is without context parallelism, as Megatron counts it."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def stage_ranks(self) -> int:
        return self.tensor * self.context * self.data

    @property
    def ranks(self) -> int:
        return self.stage_ranks * self.pipeline


@dataclasses.dataclass(frozen=True)
class Precision:
    """Bytes that are stored for a parameter, and how the optimizer state is distributed."""

    weight_bytes: int = 2
    optimizer_bytes: int = 12  # float32 parameter and two moments
    distributed: bool = True  # by --use-distributed-optimizer
    by_parameter: bool = False  # fully reshardable: without the copies that tensor-parallel ranks have
    spreads_weights: bool = True  # over data-parallel ranks; not by --no-ckpt-fully-parallel-save
    spreads_states: bool = True  # likewise; buckets always are


@dataclasses.dataclass(frozen=True)
class Stage:
    """Bytes of a pipeline stage, and of the rank that has most of them; and tensors."""

    weights: int
    rank_weights: int
    states: int
    rank_states: int
    tensors: int


@dataclasses.dataclass(frozen=True)
class Storage:
    """How fast the storage is, and what shares it: `per` is "rank", "node" or "all"."""

    bytes_per_second: float
    per: str = "node"
    ranks_per_node: int = 8
    is_given: bool = True  # False: the rate is an assumption


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a checkpoint of a run will be. Bytes are of all ranks unless a name says otherwise."""

    parameters: int
    parallelism: dict[str, int]
    ranks: int
    nodes: int
    weight_bytes: int
    optimizer_bytes: int
    object_bytes: int
    checkpoint_bytes: int
    largest_rank_bytes: int
    mean_rank_bytes: int
    largest_rank_tensors: int
    files: int
    staging_bytes_per_rank: int
    staging_bytes_per_node: int
    copy_seconds: float
    write_seconds: float
    held_ms: float
    assumptions: list[str]


def precision_of(arguments: Arguments) -> Precision:
    """Returns what Megatron stores for each parameter. Raises OptionError."""
    optimizer = arguments.text("optimizer", "adam")
    moments = {"adam": 2, "sgd": 1}.get(optimizer)
    if moments is None:
        known = "expected adam or sgd"
        if optimizer in _SMALLER_THAN_ADAM:
            known = "saves work with it; leave it out for an upper estimate, as Adam's state is not smaller"
        raise OptionError(f"--optimizer {optimizer}: `datastates plan` has no formula for its state: {known}")
    mixed = arguments.has("bf16") or arguments.has("fp16")
    distributed = arguments.has("use-distributed-optimizer")
    if distributed and optimizer == "sgd":
        raise OptionError(
            "--optimizer sgd: Megatron has no distributed optimizer for it; leave out "
            "--use-distributed-optimizer"
        )
    states = moments + (1 if mixed or distributed else 0)  # the float32 parameter itself
    if arguments.has("no-save-optim"):
        states = 0
    by_parameter = arguments.has("dist-ckpt-optim-fully-reshardable") or not distributed
    # The other name is that in files; as a flag it has no effect.
    spreads = not (
        arguments.has("no-ckpt-fully-parallel-save") or arguments.is_off("ckpt-fully-parallel-save")
    )
    is_gathered = arguments.has(_GATHERS) and distributed
    spreads_states = not by_parameter or (spreads and not is_gathered)
    return Precision(2 if mixed else 4, states * _FLOAT32, distributed, by_parameter, spreads, spreads_states)


def sizes_of(parts: list[Parameters], grid: Grid, precision: Precision) -> list[Stage]:
    """Returns the sizes of each pipeline stage."""
    width, state_width = precision.weight_bytes, precision.optimizer_bytes
    found = []
    for part in parts:
        # Of the first data-parallel rank, if all that its shard has is stored there.
        whole = (part.tensor_parallel + part.replicated) / grid.tensor
        whole += part.experts / (grid.expert * grid.expert_tensor)
        states = _states(part, grid, precision)
        rank_weights = part.stored / grid.stage_ranks if precision.spreads_weights else whole
        rank_states = states / grid.stage_ranks if precision.spreads_states else whole
        found.append(
            Stage(
                weights=part.stored * width,
                rank_weights=math.ceil(rank_weights * width),
                states=states * state_width,
                rank_states=math.ceil(rank_states * state_width),
                tensors=part.tensors,
            )
        )
    return found


def _states(part: Parameters, grid: Grid, precision: Precision) -> int:
    """Returns the parameters whose optimizer state a stage stores."""
    if precision.by_parameter:
        return part.stored
    # Each tensor-parallel rank has buckets of its own, which also hold what is replicated.
    return part.tensor_parallel + part.tied_copy + part.replicated * grid.tensor + part.experts


def _check(grid: Grid) -> None:
    if grid.stage_ranks % (grid.expert * grid.expert_tensor):
        raise OptionError(
            f"expert parallel {grid.expert} x {grid.expert_tensor}: expected a divisor of the "
            f"{grid.stage_ranks} ranks of a pipeline stage"
        )


def plan_arguments(arguments: Arguments, grid: Grid, storage: Storage, copy_rate: float) -> Plan:
    """Returns the plan of a model that Megatron's arguments describe. Raises OptionError."""
    arguments.require_formulas()
    require_described(arguments)
    precision = precision_of(arguments)
    _check(grid)
    parts = stages(arguments, grid.tensor, grid.pipeline)
    check_divisions(arguments, grid.tensor, grid.expert)
    notes = [
        "parameters: Megatron's formulas; the padding of buckets and the alignment of files are left out",
        _precision_note(precision),
    ]
    if precision.by_parameter and precision.distributed:
        notes.append("fully reshardable: Megatron gathers the optimizer state before the save returns")
    layers = arguments.number("num-layers")
    parameters = sum(part.stored for part in parts)
    sizes = sizes_of(parts, grid, precision)
    return _plan(parameters, sizes, layers, grid, precision, storage, copy_rate, notes)


def plan_parameters(
    parameters: int, grid: Grid, precision: Precision, storage: Storage, copy_rate: float
) -> Plan:
    """Returns the plan of a model of which only the number of parameters is known. Raises OptionError."""
    _check(grid)
    each = parameters / grid.pipeline
    layers = max(round((parameters / 12 / 128**2) ** (1 / 3)), 1)  # hidden size 128 times the layers
    notes = [
        "parameters: split evenly over all ranks; embeddings, and copies on tensor-parallel ranks, are "
        "left out",
        f"objects and tensors: as of a model with {layers} layers, a guess from --params",
        _precision_note(precision),
    ]
    stage = Stage(
        weights=round(each * precision.weight_bytes),
        rank_weights=math.ceil(each * precision.weight_bytes / grid.stage_ranks),
        states=round(each * precision.optimizer_bytes),
        rank_states=math.ceil(each * precision.optimizer_bytes / grid.stage_ranks),
        tensors=math.ceil(layers / grid.pipeline) * 12,
    )
    return _plan(parameters, [stage] * grid.pipeline, layers, grid, precision, storage, copy_rate, notes)


def _precision_note(precision: Precision) -> str:
    return (
        f"precision: {precision.weight_bytes} B of weights and {precision.optimizer_bytes} B of optimizer "
        "state for each parameter; a precision-aware optimizer is stored as float32, too"
    )


def _plan(
    parameters: int,
    sizes: list[Stage],
    layers: int,
    grid: Grid,
    precision: Precision,
    storage: Storage,
    copy_rate: float,
    notes: list[str],
) -> Plan:
    ranks = grid.ranks
    objects = ranks * _RANK_OBJECT_BYTES + layers * _LAYER_OBJECT_BYTES + _COMMON_OBJECT_BYTES
    weights, states = sum(stage.weights for stage in sizes), sum(stage.states for stage in sizes)
    total = weights + states + objects
    largest = max(sizes, key=lambda stage: stage.rank_weights + stage.rank_states)
    rank_bytes = math.ceil(largest.rank_weights + largest.rank_states + objects / ranks)
    nodes = math.ceil(ranks / storage.ranks_per_node)
    on_node = min(storage.ranks_per_node, ranks)
    node_bytes = math.ceil(
        largest.rank_weights * _storing(on_node, grid, precision.spreads_weights)
        + largest.rank_states * _storing(on_node, grid, precision.spreads_states)
        + objects / ranks * on_node
    )
    shared = {"rank": rank_bytes, "node": node_bytes, "all": total}[storage.per]
    rank_tensors = _rank_tensors(largest, grid, precision)
    staging = max(math.ceil(rank_bytes / GIB), 1) * GIB
    notes += [
        _spread_note(precision),
        f"objects: {_RANK_OBJECT_BYTES >> 10} KiB a rank, {_LAYER_OBJECT_BYTES >> 10} KiB a layer and "
        f"{_COMMON_OBJECT_BYTES >> 10} KiB, as in checkpoints of recipes/pretrain_tiny.py",
        f"held: {HELD_MS:g} ms and {HELD_MICROSECONDS:g} us a tensor, by an asynchronous save in Megatron's "
        f"loop, fence, polls and finalize included; measured were {MEASURED_ON_GPU_MS} ms on an H100 (one "
        f"rank, 1,164 tensors), and on 2 CPU cores {MEASURED_ON_CPU_MS} ms with one rank (3,084 tensors) and "
        f"{MEASURED_WITH_TWO_RANKS_MS} ms with two. First saves take longer, and so do those that cannot "
        "reuse what the last one prepared, or whose copies outlast the backward pass; `datastates report` "
        "shows it",
        f"copies: {copy_rate / 1e9:g} GB/s a rank (--copy-rate), an assumption",
        f"disk: {storage.bytes_per_second / 1e9:g} GB/s for {_owner(storage)}, "
        f"{'as given' if storage.is_given else 'an assumption (--rate)'}; measure it with fio",
    ]
    return Plan(
        parameters=parameters,
        parallelism=dataclasses.asdict(grid),
        ranks=ranks,
        nodes=nodes,
        weight_bytes=weights,
        optimizer_bytes=states,
        object_bytes=objects,
        checkpoint_bytes=total,
        largest_rank_bytes=rank_bytes,
        mean_rank_bytes=total // ranks,
        largest_rank_tensors=rank_tensors,
        files=ranks + 3,  # index, manifest, metadata.json
        staging_bytes_per_rank=staging,
        staging_bytes_per_node=staging * on_node,
        copy_seconds=rank_bytes / copy_rate,
        write_seconds=shared / storage.bytes_per_second,
        held_ms=HELD_MS + HELD_MICROSECONDS * rank_tensors / 1000,
        assumptions=notes,
    )


def _rank_tensors(stage: Stage, grid: Grid, precision: Precision) -> int:
    """Returns the tensors of a rank: parts of the buckets of optimizer state, and all or some weights."""
    replicas = grid.data * grid.context
    weights = stage.tensors / replicas if precision.spreads_weights else stage.tensors
    states = stage.tensors / replicas if precision.spreads_states else stage.tensors
    return math.ceil(weights + 3 * states)


def _spread_note(precision: Precision) -> str:
    first = "ranks of a stage: the first data-parallel one stores"
    if not precision.spreads_weights:
        what = "weights" if precision.spreads_states else "weights and optimizer state"
        return f"{first} {what} (--no-ckpt-fully-parallel-save)"
    spread = (
        "ranks of a stage: Megatron spreads weights over data-parallel ranks (--ckpt-fully-parallel-save, "
        "its default), evenly"
    )
    states = "" if precision.spreads_states else f"; the first one stores optimizer state (--{_GATHERS})"
    return spread + states


def _storing(on_node: int, grid: Grid, is_spread: bool) -> int:
    """Returns how many ranks of a node store weights, or optimizer state, at most."""
    if is_spread:
        return on_node
    of_stage = max(grid.tensor, grid.expert * grid.expert_tensor)
    return min(on_node, of_stage * math.ceil(on_node / grid.stage_ranks))


def _owner(storage: Storage) -> str:
    of_node = f"{storage.ranks_per_node} rank{'s' if storage.ranks_per_node > 1 else ''}"
    return {"rank": "each rank", "node": f"each node of {of_node}", "all": "all ranks"}[storage.per]
