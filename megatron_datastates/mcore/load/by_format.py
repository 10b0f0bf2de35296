"""Wrappers of Megatron's loading functions: they call ours for a directory in our format."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_datastates.engine.fence import FENCE
from megatron_datastates.files import DOCUMENT_BYTES, any_path, names_in, open_regular
from megatron_datastates.format.directory import BACKEND, METADATA_NAME, TORCH_DIST, TORCH_DIST_INDEX
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.mcore.load import state
from megatron_datastates.mcore.load.opening import is_open, is_ours, open_checkpoint, read_common_state
from megatron_datastates.pipeline.runs.runs import is_published, may_be_ours

# This module is imported in every Megatron process; the native module only once a directory in our format is
# loaded. So functions import the modules that need it.
logger = logging.getLogger(__name__)


def wrap_maybe_load_config(
    original: Callable[..., Any], checkpoint_dir: str, *args: Any, **kwargs: Any
) -> Any:
    """Wraps `maybe_load_config`."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException

    state.current().directory = checkpoint_dir
    if checkpoint_dir and is_open(checkpoint_dir):
        return CheckpointingConfig(BACKEND, 1)
    if checkpoint_dir and _cannot_be_read(checkpoint_dir) and is_published(checkpoint_dir):
        return CheckpointingConfig(BACKEND, 1)
    try:
        config = original(checkpoint_dir, *args, **kwargs)
        is_damaged = config is not None and not isinstance(config.sharded_backend, str)
        problem: Exception | None = TypeError("it has no name of a backend") if is_damaged else None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        config, problem, is_damaged = None, error, True
    # Without metadata.json, DCP's index may be of a later save than our manifest (Megatron-FSDP's).
    found = is_published if is_damaged else is_ours
    if (is_damaged or config is None) and checkpoint_dir and found(checkpoint_dir):
        return CheckpointingConfig(BACKEND, 1)
    if is_damaged and may_be_ours(checkpoint_dir):
        metadata = any_path(checkpoint_dir) / METADATA_NAME
        what = "cannot be read" if isinstance(problem, OSError) else "is damaged"
        raise CheckpointingException(
            f"{metadata} {what} ({type(problem).__name__}: {problem}), "
            f"and there is no {MANIFEST_NAME}: the save was not published; load another checkpoint"
        ) from problem
    if config is None and problem is not None:
        raise problem
    if config is not None:
        _require_known_backend(config.sharded_backend, checkpoint_dir)
    return config


def _require_known_backend(backend: str, directory: str) -> None:
    """Raises CheckpointingException where only metadata.json says that a checkpoint is not ours.

    Megatron would look for files of torch's there, and fail without naming one.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingException

    path = any_path(directory)
    is_another = backend not in (BACKEND, TORCH_DIST) and is_published(path)
    if is_another and TORCH_DIST_INDEX not in names_in(path):
        raise CheckpointingException(
            f"{path / METADATA_NAME} names the format {backend!r}, of which there is no file, and beside it "
            f"is {MANIFEST_NAME}: remove {METADATA_NAME} to load what that describes"
        )


def _cannot_be_read(directory: str | os.PathLike[str]) -> bool:
    """Returns whether metadata.json is a file that Megatron's read of it would hang on, such as a pipe."""
    try:
        open_regular(any_path(directory) / METADATA_NAME, DOCUMENT_BYTES).close()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def wrap_get_filesystem_reader(
    original: Callable[..., Any], checkpoint_dir: str | Path, *args: Any, **kwargs: Any
) -> Any:
    """Wraps `_get_filesystem_reader`."""
    if not is_ours(checkpoint_dir):
        return original(checkpoint_dir, *args, **kwargs)
    from megatron_datastates.mcore.load.reader import DataStatesReader

    load = state.current()
    states = load.restated.states if load.restated else None
    return DataStatesReader(open_checkpoint(checkpoint_dir), load.boxes, states)


def wrap_load_common(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps what loads the common state: a function, which releases name differently, or first a method."""
    directory = kwargs["checkpoint_dir"] if "checkpoint_dir" in kwargs else args[-1]
    stored = read_common_state(directory) if is_ours(directory) else original(*args, **kwargs)
    restated = state.current().restated
    return restated.common_state(stored) if restated else stored  # what a restated request has instead


def wrap_get_default_strategy(original: Callable[..., Any], action: Any, backend: str, version: int) -> Any:
    """Wraps `get_default_strategy`: torch_dist's load strategy also loads our format, with our reader."""
    is_load = action.value == "load_sharded" and backend == BACKEND
    return original(action, "torch_dist" if is_load else backend, version)


def wrap_torch_dist_load(
    original: Callable[..., Any],
    self: Any,
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wraps `TorchDistLoadShardedStrategy.load`; errors name the first key, shape or file that is wrong."""
    FENCE.wait("a load")  # the load overwrites memory that a save may still be reading
    if not is_ours(checkpoint_dir):
        return original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_datastates.mcore.errors import LoadMismatch, load_errors, ours_within
    from megatron_datastates.mcore.load.metadata import requested_boxes
    from megatron_datastates.mcore.load.mismatch import first_mismatch
    from megatron_datastates.mcore.load.restoring import restore_registered

    checkpoint, items = open_checkpoint(checkpoint_dir), list(nested_values(sharded_state_dict))
    boxes, restated = requested_boxes(items), state.current().restated
    with load_errors():
        with checkpoint.costs.timing("planning"):
            problem = first_mismatch(checkpoint, items, restated.states if restated else None)
            if problem is not None:
                raise LoadMismatch(f"{checkpoint_dir}: {problem}")
            checkpoint.index.preload(boxes)
        try:
            asked = (item.unique_key for item in items if isinstance(item, ShardedObject))
            with state.opened(boxes=boxes, objects=Counter(asked)):
                loaded = original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
        except CheckpointException as error:  # DCP wraps what its reader and planner raise
            ours = ours_within(error)
            if ours is None:
                raise
            raise ours from None
        self.cached_global_metadata = None  # only torch_dist's has what its saves reuse
        if state.current().restores_providers():  # a call not made by `dist_checkpointing.load`
            restore_registered(checkpoint)
        return loaded


def wrap_load_plain_tensors(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `load_plain_tensors`, which looks at a checkpoint: the state providers of the program stay."""
    with state.opened(restores_providers=lambda: False):
        return original(*args, **kwargs)


def wrap_load_state_dict(
    original: Callable[..., Any], state_dict: Any, storage_reader: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps DCP's `load_state_dict`: otherwise the load of one rank would wait for all ranks."""
    if getattr(storage_reader, "plans_alone", False):
        kwargs["no_dist"] = True
    return original(state_dict, storage_reader, *args, **kwargs)


def wrap_remove_sharded_tensors(
    original: Callable[..., Any], self: Any, checkpoint_dir: str, key_prefix: str
) -> Any:
    """Wraps `TorchDistLoadShardedStrategy.remove_sharded_tensors`."""
    if not is_ours(checkpoint_dir):
        return original(self, checkpoint_dir, key_prefix)
    from megatron_datastates.mcore.errors import load_errors
    from megatron_datastates.pipeline.upkeep.remove import remove_keys

    with load_errors():
        removed = remove_keys(checkpoint_dir, key_prefix)
    if not removed:
        logger.warning("no key in %s begins with %r: nothing was removed", checkpoint_dir, key_prefix)
    return None
