"""Megatron's functions that load: what of ours answers instead where a directory is of our format."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_datastates.engine.fence import FENCE
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.directory import BACKEND, METADATA_NAME
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.mcore.load import state
from megatron_datastates.mcore.load.opening import open_checkpoint, read_common_state
from megatron_datastates.pipeline.runs import is_ours, is_published, may_be_ours

# The native module is not loaded before a directory of ours is: this module is, in every Megatron process. So
# functions import what needs it.
logger = logging.getLogger(__name__)


def config_from_manifest(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `maybe_load_config`."""

    def maybe_load_config(checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException

        state.current().directory = checkpoint_dir
        try:
            config = original(checkpoint_dir, *args, **kwargs)
            is_damaged = config is not None and not isinstance(config.sharded_backend, str)
            problem: Exception | None = TypeError("it names no backend") if is_damaged else None
        except (ValueError, TypeError, AttributeError) as error:  # cut short by a crash, or damaged otherwise
            config, problem, is_damaged = None, error, True
        if (is_damaged or config is None) and checkpoint_dir and is_published(checkpoint_dir):
            return CheckpointingConfig(BACKEND, 1)
        if is_damaged and may_be_ours(checkpoint_dir):
            raise CheckpointingException(
                f"{Path(checkpoint_dir, METADATA_NAME)} is damaged ({type(problem).__name__}: {problem}), "
                f"and there is no {MANIFEST_NAME}: a save there was not published; load another checkpoint"
            ) from problem
        if config is None and problem is not None:
            raise problem
        return config

    return maybe_load_config


def reader_by_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `_get_filesystem_reader`."""

    def _get_filesystem_reader(checkpoint_dir: str | Path, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(checkpoint_dir):
            return original(checkpoint_dir, *args, **kwargs)
        from megatron_datastates.mcore.load.reader import DataStatesReader

        return DataStatesReader(open_checkpoint(checkpoint_dir), state.current().boxes)

    return _get_filesystem_reader


def common_state_by_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the function that loads the common state, whatever its name is."""

    def load_common(checkpoint_dir: str | Path, *args: Any, **kwargs: Any) -> Any:
        if is_ours(checkpoint_dir):
            return read_common_state(checkpoint_dir)
        return original(checkpoint_dir, *args, **kwargs)

    return load_common


def common_state_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """For a strategy's method that does it."""

    def load_common(self: Any, checkpoint_dir: str | Path) -> Any:
        if is_ours(checkpoint_dir):
            return read_common_state(checkpoint_dir)
        return original(self, checkpoint_dir)

    return load_common


def strategy_from_registry(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `get_default_strategy`: torch_dist's load strategy loads ours too, with our reader."""

    def get_default_strategy(action: Any, backend: str, version: int) -> Any:
        is_load = action.value == "load_sharded" and backend == BACKEND
        return original(action, "torch_dist" if is_load else backend, version)

    return get_default_strategy


def load_by_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `TorchDistLoadShardedStrategy.load`: the first wrong key, shape or file is named."""

    def load(self: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        FENCE.wait("a load")  # it is about to overwrite what a save may still be reading
        if not is_ours(checkpoint_dir):
            return original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from torch.distributed.checkpoint.api import CheckpointException

        from megatron_datastates.mcore.errors import LoadMismatch, load_errors
        from megatron_datastates.mcore.load.metadata import requested_boxes
        from megatron_datastates.mcore.load.mismatch import first_mismatch

        checkpoint, items = open_checkpoint(checkpoint_dir), list(nested_values(sharded_state_dict))
        boxes = requested_boxes(items)
        with load_errors():
            with checkpoint.costs.timing("planning"):
                problem = first_mismatch(checkpoint, items)
                if problem is not None:
                    raise LoadMismatch(f"{checkpoint_dir}: {problem}")
                checkpoint.index.preload(boxes)
            try:
                with state.opened(boxes=boxes):
                    return original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
            except CheckpointException as error:  # DCP's, around what its reader and planner raise
                causes = (cause for cause, _ in error.failures.values())
                ours = next((cause for cause in causes if isinstance(cause, DataStatesError)), None)
                if ours is None:
                    raise
                raise ours from None

    return load


def planned_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """For DCP's `load_state_dict`: without it all ranks would take part in the load of any of them."""

    def load_state_dict(state_dict: Any, storage_reader: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(storage_reader, "plans_alone", False):
            kwargs["no_dist"] = True
        return original(state_dict, storage_reader, *args, **kwargs)

    return load_state_dict


def removal_by_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `TorchDistLoadShardedStrategy.remove_sharded_tensors`."""

    def remove_sharded_tensors(self: Any, checkpoint_dir: str, key_prefix: str) -> Any:
        if not is_ours(checkpoint_dir):
            return original(self, checkpoint_dir, key_prefix)
        from megatron_datastates.mcore.errors import load_errors
        from megatron_datastates.pipeline.remove import remove_keys

        with load_errors():
            removed = remove_keys(checkpoint_dir, key_prefix)
        if not removed:
            logger.warning("no key in %s begins with %r: nothing was removed", checkpoint_dir, key_prefix)
        return None

    return remove_sharded_tensors
