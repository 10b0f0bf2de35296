"""The differences between releases of Megatron-Core, all in one table.

A Release lists the functions and classes of Megatron that are replaced, each with the function of ours that
wraps it, and the few other facts on which the rest of this package depends. The latest Release that is not
newer than the installed Megatron applies, so an unknown newer one works if its hook points have not moved.

Imports neither Megatron nor torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re

_DIST = "megatron.core.dist_checkpointing."
_TORCH = _DIST + "strategies.torch"
_PARALLEL = _DIST + "strategies.fully_parallel"
_COMMON = _DIST + "strategies.common"
_SERIALIZATION = _DIST + "serialization"
_OPTIMIZER = "megatron.core.optimizer."
_OPTIMIZERS = _OPTIMIZER + "optimizer"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_ARGUMENTS = "megatron.training.arguments"
_CHECKPOINTING = "megatron.training.checkpointing"
QUEUE = _DIST + "strategies.async_utils"  # Megatron's own, which it has announced to remove
NVRX_QUEUE = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"


@dataclasses.dataclass(frozen=True)
class Hook:
    """A hook point, `name` (a function, or Class.method) in `module`, and the function that wraps it."""

    module: str
    name: str
    wrapper: str  # a function in mcore: (original, *args, **kwargs) -> the result of the call
    need: str = ""  # its purpose, if other hook points serve it too: then one of them must exist
    rebind: bool = True  # also in modules that have imported it by name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


OPTIMIZER_MODULE = _OPTIMIZER + "distrib_optimizer"

# Always attached, so that every program can read our checkpoints, its parser accepts the format, and the
# environment switch has a hold.
_LOADING = (
    Hook(_DIST + "core", "maybe_load_config", "load.by_format.wrap_maybe_load_config"),
    Hook(_TORCH, "_get_filesystem_reader", "load.by_format.wrap_get_filesystem_reader"),
    Hook(_TORCH, "TorchDistLoadShardedStrategy.load", "load.by_format.wrap_torch_dist_load"),
    Hook(
        _TORCH,
        "TorchDistLoadShardedStrategy.remove_sharded_tensors",
        "load.by_format.wrap_remove_sharded_tensors",
    ),
    # A class of DCP's, which Megatron's own tools construct themselves.
    Hook(_TORCH, "FileSystemReader.read_metadata", "load.tools.wrap_dcp_read_metadata"),
    Hook(_TORCH, "FileSystemReader.read_data", "load.tools.wrap_dcp_read_data"),
    Hook(_SERIALIZATION, "load", "load.wrappers.wrap_load"),
    Hook(_SERIALIZATION, "load_plain_tensors", "load.by_format.wrap_load_plain_tensors"),
    Hook(_SERIALIZATION, "save", "switch.wrap_save"),
    Hook(
        _DIST + "validation",
        "validate_integrity_and_strict_load",
        "load.wrappers.wrap_validate_integrity_and_strict_load",
    ),
    Hook(_PARALLEL, "FullyParallelLoadStrategyWrapper.load", "load.wrappers.wrap_fully_parallel_load"),
    Hook(_PARALLEL, "exchange_by_distribution", "load.wrappers.wrap_exchange_by_distribution", rebind=False),
    Hook(_ARGUMENTS, "_add_checkpointing_args", "training.arguments.wrap_add_checkpointing_args"),
    Hook(_ARGUMENTS, "validate_args", "training.loop.wrap_validate_args"),
    Hook(_CHECKPOINTING, "read_metadata", "training.tracker_recovery.wrap_read_metadata"),
    Hook(_CHECKPOINTING, "load_checkpoint", "training.load.wrap_load_checkpoint"),
    Hook(_CHECKPOINTING, "save_checkpoint", "training.loop.wrap_save_checkpoint"),
    Hook(_CHECKPOINTING, "_load_base_checkpoint", "training.load.wrap_load_base_checkpoint"),
    Hook(_CHECKPOINTING, "_get_checkpoint_format", "training.load.wrap_get_checkpoint_format"),
    Hook(_SERIALIZATION, "load_content_metadata", "training.load.wrap_load_content_metadata"),
    Hook(
        OPTIMIZER_MODULE,
        "DistributedOptimizer.sharded_state_dict",
        "load.optimizer_request.wrap_sharded_state_dict",
    ),
    Hook(
        OPTIMIZER_MODULE,
        "DistributedOptimizer.load_parameter_state_from_dp_reshardable",
        "load.optimizer_request.wrap_load_parameter_state",
    ),
)
# Before 0.18, all ranks plan a DCP load together; since then each rank plans its own.
_PLAN_016 = Hook(_TORCH, "checkpoint.load_state_dict", "load.by_format.wrap_load_state_dict", rebind=False)
# Loads the common state: first a method of a strategy, then a function, then a function for an object
# in the checkpoint.
_COMMON_016 = Hook(_COMMON, "TorchCommonLoadStrategy.load_common", "load.by_format.wrap_load_common")
_COMMON_017 = Hook(_COMMON, "load_common", "load.by_format.wrap_load_common")
_COMMON_019 = Hook(_SERIALIZATION, "load_common_state_dict", "load.by_format.wrap_load_common")
_COMMON_OF_TOOLS = Hook(_COMMON, "load_common", "load.tools.wrap_load_common_of_tools")
_REGISTRY = Hook(
    _DIST + "strategies.base", "get_default_strategy", "load.by_format.wrap_get_default_strategy"
)

# Attached before the first save in our format.
_SAVING = (
    Hook(_PARALLEL, "FullyParallelSaveStrategyWrapper.__init__", "save.strategy.wrap_fully_parallel_init"),
    Hook(
        _PARALLEL,
        "FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
        "save.strategy.wrap_apply_saving_parallelization",
    ),
    Hook(_DIST + "core", "save_config", "save.strategy.wrap_save_config"),
    *(
        Hook(queue, f"AsyncCallsQueue.{name}", f"save.request.wrap_{name}", need=name)
        for name in ("schedule_async_request", "close")
        for queue in (QUEUE, NVRX_QUEUE)
    ),
    Hook(_OPTIMIZERS, "MixedPrecisionOptimizer.step", "fences.wrap_optimizer_step"),
    Hook(_OPTIMIZERS, "FP32Optimizer.step", "fences.wrap_optimizer_step"),
    Hook(_OPTIMIZERS, "ChainedOptimizer.step", "fences.wrap_optimizer_step"),
    Hook(_OPTIMIZERS, "MegatronOptimizer.offload_to_cpu", "fences.wrap_offload"),
    Hook(_OPTIMIZERS, "MegatronOptimizer.restore_from_cpu", "fences.wrap_offload"),
    Hook(
        OPTIMIZER_MODULE,
        "DistributedOptimizer.sharded_param_state_dp_reshardable",
        "save.preparing.wrap_sharded_param_state_dp_reshardable",
    ),
    Hook(_BUFFER, "_ParamAndGradBuffer.offload_to_cpu", "fences.wrap_offload"),
    Hook(_BUFFER, "_ParamAndGradBuffer.reload_from_cpu", "fences.wrap_offload"),
)
# Until 0.19, which does this before a save, parameters get their new values at the start of the next
# iteration.
_STAGING_016 = Hook(
    OPTIMIZER_MODULE, "DistributedOptimizer._copy_main_params_to_param_buffer", "fences.wrap_gather"
)
_LAYER_WISE = _OPTIMIZER + "layer_wise_optimizer"
_GATHER_016 = Hook(_LAYER_WISE, "LayerWiseDistributedOptimizer.allgather_params", "fences.wrap_gather")
_GATHER_018 = Hook(_LAYER_WISE, "LayerWiseDistributedOptimizer.step_with_ready_grads", "fences.wrap_gather")
_GRAPH = Hook(
    _OPTIMIZER + "optimizer_cuda_graph", "OptimizerCudaGraphWrapper.__call__", "fences.wrap_graph_replay"
)

# Attached to Megatron's own training loop when `--ckpt-format datastates` is given.
_TRAINING = (
    Hook(
        _CHECKPOINTING,
        "cleanup_old_non_persistent_checkpoint",
        "training.retention.wrap_cleanup_old_non_persistent_checkpoint",
    ),
    Hook(_CHECKPOINTING, "maybe_save_dataloader_state", "dataloader.wrap_maybe_save_dataloader_state"),
    Hook(_CHECKPOINTING, "generate_state_dict", "save.preparing.wrap_generate_state_dict"),
)
_STRATEGY_016 = Hook(
    _CHECKPOINTING, "get_default_save_sharded_strategy", "training.loop.wrap_save_strategy", rebind=False
)
_STRATEGY_017 = Hook(
    _CHECKPOINTING, "TorchDistSaveShardedStrategy", "training.loop.wrap_save_strategy", rebind=False
)
_DELETION_017 = Hook(
    _CHECKPOINTING, "_async_delete_checkpoint_impl", "training.retention.wrap_async_delete_checkpoint_impl"
)
_TRAINING_017 = (*_TRAINING, _STRATEGY_017, _DELETION_017)


@dataclasses.dataclass(frozen=True)
class Release:
    """The facts about a release and its successors, up to the next one in RELEASES."""

    first: tuple[int, int]
    loading: tuple[Hook, ...]
    saving: tuple[Hook, ...]
    training: tuple[Hook, ...]
    writes_common_file: bool  # whether Megatron writes common.pt itself, before it calls a strategy


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
        (*_LOADING, _COMMON_019, _COMMON_OF_TOOLS),
        (*_SAVING, _GATHER_018, _GRAPH),
        _TRAINING_017,
        writes_common_file=False,
    ),
)

# Functions of other packages that unmap device memory, which saves may be reading; by the module whose
# import makes them available.
_PAUSE = "TorchMemorySaver.pause"
MEMORY_SAVERS = {
    "torch_memory_saver": (
        Hook("torch_memory_saver.entrypoint", _PAUSE, "fences.wrap_unmap", need="pausing"),
        Hook("torch_memory_saver", _PAUSE, "fences.wrap_unmap", need="pausing"),  # until 0.0.8
    ),
    "vllm.device_allocator.cumem": (
        Hook("vllm.device_allocator.cumem", "CuMemAllocator.sleep", "fences.wrap_unmap"),
    ),
}

# Functions of Megatron-Bridge, attached when it is imported; by module. Its releases go their own way, so a
# missing one is reported, and Bridge then refuses our settings itself.
_BRIDGE = "megatron.bridge.training."
_BRIDGE_HOOKS = (
    Hook(_BRIDGE + "config", "CheckpointConfig.finalize", "bridge_settings.wrap_finalize"),
    Hook(_BRIDGE + "checkpointing", "save_checkpoint", "bridge_settings.wrap_save_checkpoint"),
    Hook(_BRIDGE + "checkpointing", "load_checkpoint", "bridge_settings.wrap_load_checkpoint"),
    Hook(
        _BRIDGE + "checkpointing",
        "create_checkpoint_manager",
        "bridge_settings.wrap_create_checkpoint_manager",
    ),
    Hook(_BRIDGE + "train", "train", "bridge_settings.wrap_train"),
)
BRIDGE = {
    module: tuple(hook for hook in _BRIDGE_HOOKS if hook.module == module)
    for module in (_BRIDGE + "config", _BRIDGE + "checkpointing", _BRIDGE + "train")
}

# Modules of Megatron's tools, which are scripts beside the package.
TOOLS = {
    "dist_checkpoint_io": (
        Hook("dist_checkpoint_io", "detect_checkpoint_format", "load.tools.wrap_detect_checkpoint_format"),
    ),
}


LAST_TESTED = (0, 19)  # of minor releases


def _minor(version: str) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def is_tested(version: str) -> bool:
    """Returns whether the tests run with this minor release."""
    found = _minor(version)
    return found is not None and RELEASES[0].first <= found <= LAST_TESTED


@functools.cache
def release_of(version: str) -> Release:
    """Returns the Release for a version such as `0.18.2` or `0.20.0rc0`; the first one for anything older."""
    found = _minor(version) or RELEASES[-1].first
    return max((r for r in RELEASES if r.first <= found), key=lambda r: r.first, default=RELEASES[0])


def installed_version() -> str:
    """Returns the version of the Megatron-Core that this process has imported, or would import."""
    return str(importlib.import_module("megatron.core.package_info").__version__)


def installed() -> Release:
    """Returns the Release for that version."""
    return release_of(installed_version())
