"""What differs between releases of Megatron-Core: all of it, and nothing else.

A Release names the functions and classes of Megatron that are replaced, each by what one of our functions
makes of it, and the few facts that the rest of this package asks for. The last release that is not newer
than the installed one is taken, so an unknown newer one works if its hook points are where they were.

Imports neither Megatron nor torch: the import hook reads this in every process that imports torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import re

_DIST = "megatron.core.dist_checkpointing."
_OPTIMIZER = "megatron.core.optimizer."
_CHECKPOINTING = "megatron.training.checkpointing"
_QUEUE = _DIST + "strategies.async_utils"  # Megatron's own, announced to go
_NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"


@dataclasses.dataclass(frozen=True)
class Hook:
    """One hook point: `name` (a function, or Class.method) in `module`."""

    module: str
    name: str
    maker: str  # a function of mcore, as room.module.function: what is there -> what shall be there
    need: str = ""  # what it is for, if other hook points serve that, too: then one of them must be there
    rebind: bool = True  # also where other modules have imported it by its name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


# Always attached, so that every program reads our checkpoints and its parser knows the format.
_LOADING = (
    Hook(_DIST + "core", "maybe_load_config", "load.by_format.config_from_manifest"),
    Hook(_DIST + "strategies.torch", "_get_filesystem_reader", "load.by_format.reader_by_format"),
    Hook(_DIST + "strategies.torch", "TorchDistLoadShardedStrategy.load", "load.by_format.load_by_format"),
    Hook(
        _DIST + "strategies.torch",
        "TorchDistLoadShardedStrategy.remove_sharded_tensors",
        "load.by_format.removal_by_format",
    ),
    Hook(_DIST + "serialization", "load", "load.agreement.agreed"),
    Hook(_DIST + "validation", "validate_integrity_and_strict_load", "load.agreement.begun_alike"),
    Hook(
        _DIST + "strategies.fully_parallel",
        "FullyParallelLoadStrategyWrapper.load",
        "load.agreement.agreed_in_parallel",
    ),
    Hook(
        _DIST + "strategies.fully_parallel",
        "exchange_by_distribution",
        "load.agreement.settled_before",
        rebind=False,
    ),
    Hook("megatron.training.arguments", "_add_checkpointing_args", "training.arguments.with_our_options"),
    Hook("megatron.training.arguments", "validate_args", "training.loop.wrap_validate_args"),
    Hook(_CHECKPOINTING, "read_metadata", "training.tracker.with_fallback"),
    Hook(_CHECKPOINTING, "load_checkpoint", "load.training_load.guarded"),
    Hook(_CHECKPOINTING, "save_checkpoint", "training.loop.wrap_save_checkpoint"),
    Hook(_CHECKPOINTING, "_load_base_checkpoint", "load.training_load.begun_alike"),
)
# Where ranks would plan a load of DCP's together: from 0.18 on each does so alone.
_PLAN_016 = Hook(
    _DIST + "strategies.torch", "checkpoint.load_state_dict", "load.by_format.planned_alone", rebind=False
)
# The common state: a method of a strategy, then a function, then an object inside the checkpoint.
_COMMON_016 = Hook(
    _DIST + "strategies.common", "TorchCommonLoadStrategy.load_common", "load.by_format.common_state_method"
)
_COMMON_017 = Hook(_DIST + "strategies.common", "load_common", "load.by_format.common_state_by_format")
_COMMON_019 = Hook(_DIST + "serialization", "load_common_state_dict", "load.by_format.common_state_by_format")
_REGISTRY = Hook(_DIST + "strategies.base", "get_default_strategy", "load.by_format.strategy_from_registry")

# Attached when somebody is going to save in our format.
_SAVING = (
    Hook(
        _DIST + "strategies.fully_parallel",
        "FullyParallelSaveStrategyWrapper.__init__",
        "save.strategy.kept_backend",
    ),
    Hook(
        _DIST + "strategies.fully_parallel",
        "FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
        "save.strategy.checked_once",
    ),
    Hook(_DIST + "core", "save_config", "save.strategy.wrap_save_config"),
    Hook(_QUEUE, "AsyncCallsQueue.schedule_async_request", "save.request.recognized", need="queue"),
    Hook(_NVRX, "AsyncCallsQueue.schedule_async_request", "save.request.recognized", need="queue"),
    Hook(_QUEUE, "AsyncCallsQueue.close", "save.request.closed", need="end of a queue"),
    Hook(_NVRX, "AsyncCallsQueue.close", "save.request.closed", need="end of a queue"),
    Hook(_OPTIMIZER + "optimizer", "MixedPrecisionOptimizer.step", "fences.witnessed"),
    Hook(_OPTIMIZER + "optimizer", "FP32Optimizer.step", "fences.witnessed"),
    Hook(_OPTIMIZER + "optimizer", "ChainedOptimizer.step", "fences.witnessed"),
    Hook(_OPTIMIZER + "optimizer", "MegatronOptimizer.offload_to_cpu", "fences.before_offload"),
    Hook(_OPTIMIZER + "optimizer", "MegatronOptimizer.restore_from_cpu", "fences.before_offload"),
    Hook(
        _OPTIMIZER + "distrib_optimizer",
        "DistributedOptimizer.sharded_param_state_dp_reshardable",
        "save.buckets.described",
    ),
    Hook(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBuffer.offload_to_cpu",
        "fences.before_offload",
    ),
    Hook(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBuffer.reload_from_cpu",
        "fences.before_offload",
    ),
)
# Parameters get their new values at the start of the next iteration only; 0.19 brings that before a save.
_STAGING_016 = Hook(
    _OPTIMIZER + "distrib_optimizer",
    "DistributedOptimizer._copy_main_params_to_param_buffer",
    "fences.before_gather",
)
_LAYER_WISE = _OPTIMIZER + "layer_wise_optimizer"
_GATHER_016 = Hook(_LAYER_WISE, "LayerWiseDistributedOptimizer.allgather_params", "fences.before_gather")
_GATHER_018 = Hook(_LAYER_WISE, "LayerWiseDistributedOptimizer.step_with_ready_grads", "fences.before_gather")
_GRAPH = Hook(
    _OPTIMIZER + "optimizer_cuda_graph", "OptimizerCudaGraphWrapper.__call__", "fences.before_graph_replay"
)

# Attached to Megatron's own training loop, when `--ckpt-format datastates` was given.
_TRAINING = (
    Hook(_CHECKPOINTING, "cleanup_old_non_persistent_checkpoint", "training.retention.careful_cleanup"),
)
_STRATEGY_016 = Hook(
    _CHECKPOINTING, "get_default_save_sharded_strategy", "training.loop.our_strategy", rebind=False
)
_STRATEGY_017 = Hook(
    _CHECKPOINTING, "TorchDistSaveShardedStrategy", "training.loop.our_strategy", rebind=False
)
_DELETION_017 = Hook(_CHECKPOINTING, "_async_delete_checkpoint_impl", "training.retention.careful_deletion")
_TRAINING_017 = (*_TRAINING, _STRATEGY_017, _DELETION_017)


@dataclasses.dataclass(frozen=True)
class Release:
    """A release, and those after it up to the next one in RELEASES."""

    first: tuple[int, int]
    loading: tuple[Hook, ...]
    saving: tuple[Hook, ...]
    training: tuple[Hook, ...]
    writes_common_file: bool  # Megatron writes common.pt itself, before it calls a strategy


RELEASES = (
    Release(
        (0, 16),
        (*_LOADING, _PLAN_016, _COMMON_016, _REGISTRY),
        (*_SAVING, _GATHER_016, _STAGING_016),
        (*_TRAINING, _STRATEGY_016),
        writes_common_file=True,
    ),
    Release(
        (0, 17),
        (*_LOADING, _PLAN_016, _COMMON_017),
        (*_SAVING, _GATHER_016, _STAGING_016, _GRAPH),
        _TRAINING_017,
        writes_common_file=True,
    ),
    Release(
        (0, 18),
        (*_LOADING, _COMMON_017),
        (*_SAVING, _GATHER_018, _STAGING_016, _GRAPH),
        _TRAINING_017,
        writes_common_file=True,
    ),
    Release(
        (0, 19),
        (*_LOADING, _COMMON_019),
        (*_SAVING, _GATHER_018, _GRAPH),
        _TRAINING_017,
        writes_common_file=False,
    ),
)
LOADING_MODULES = frozenset(hook.module for release in RELEASES for hook in release.loading)

# Of other packages: what unmaps device memory that saves may read. By the module whose import brings them.
_PAUSE = "TorchMemorySaver.pause"
MEMORY_SAVERS = {
    "torch_memory_saver": (
        Hook("torch_memory_saver.entrypoint", _PAUSE, "fences.before_unmapping", need="pausing"),
        Hook("torch_memory_saver", _PAUSE, "fences.before_unmapping", need="pausing"),  # until 0.0.8
    ),
    "vllm.device_allocator.cumem": (
        Hook("vllm.device_allocator.cumem", "CuMemAllocator.sleep", "fences.before_unmapping"),
    ),
}
WATCHED_MODULES = LOADING_MODULES | MEMORY_SAVERS.keys()


def release_of(version: str) -> Release:
    """The Release for a version such as `0.18.2` or `0.20.0rc0`; the first one for anything older."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else RELEASES[-1].first
    return max((r for r in RELEASES if r.first <= found), key=lambda r: r.first, default=RELEASES[0])


def installed_version() -> str:
    """Of the Megatron-Core that this process has imported, or would import."""
    return str(importlib.import_module("megatron.core.package_info").__version__)


def installed() -> Release:
    """The Release that this process has imported, or would import."""
    return release_of(installed_version())
