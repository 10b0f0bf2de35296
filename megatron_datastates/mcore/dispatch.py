"""Reading: which format a directory has, and our reader for ours.

A directory is ours if its metadata.json says so. It also is if it has our manifest and nobody else's index:
then a save was published and the process died before Megatron wrote metadata.json. It is complete.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_datastates.config import Options
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.errors import DataStatesError, FormatError
from megatron_datastates.files import DOCUMENT_BYTES, read_regular
from megatron_datastates.format.values import MANIFEST_NAME, METADATA_NAME, is_own_file_name
from megatron_datastates.pipeline.runs import BACKEND, stored_backend

# The native module is not loaded before a directory of ours is: this module is, in every Megatron process.
if TYPE_CHECKING:
    from megatron_datastates.mcore.metadata import Boxes
    from megatron_datastates.pipeline.load import Checkpoint

logger = logging.getLogger(__name__)
COMMON_STATE_KEY = "common_state/shard_0_1"
COMMON_STATE_FILE = "common.pt"  # of Megatron before 0.19; beside a common_state object it is a left-over
_TORCH_DIST_INDEX = ".metadata"
# What a checkpoint of torch_dist consists of: not part of one that is published over it.
FILES_OF_TORCH_DIST = ("*.distcp", _TORCH_DIST_INDEX, COMMON_STATE_FILE)
_opened: dict[object, Checkpoint] = {}  # the last one: a load opens it several times
# What the open load has opened, by path: another run may publish there before the load has read all of it.
_READING: ContextVar[dict[Path, tuple[Options, Checkpoint]] | None] = ContextVar(
    "checkpoints of the open load", default=None
)
# Where the options of a load come from; Megatron's training loop has arguments, too.
OPTIONS: ContextVar[Callable[[], Options]] = ContextVar("load options", default=Options.from_environment)
LOOKED_AT: ContextVar[str | None] = ContextVar("what maybe_load_config was last asked for", default=None)
_requested: ContextVar[Boxes | None] = ContextVar("boxes that a load wants", default=None)


def is_ours(directory: str | os.PathLike[str]) -> bool:
    """Whether the directory was saved in our format; it stays so for a load that has opened it."""
    reading = _READING.get()
    if reading is not None and Path(directory).absolute() in reading:
        return True
    try:
        config = json.loads(read_regular(Path(directory) / METADATA_NAME, DOCUMENT_BYTES))
    except (OSError, ValueError):
        config = None
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    if backend not in (None, "torch_dist"):
        return bool(backend == BACKEND)
    return has_manifest(directory) and not (Path(directory) / _TORCH_DIST_INDEX).exists()


def may_be_ours(directory: str | os.PathLike[str]) -> bool:
    """The same, also if the files that say so are damaged or missing, on this rank perhaps alone."""
    if is_ours(directory):
        return True
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    return _TORCH_DIST_INDEX not in names and any(map(is_own_file_name, names))


def has_manifest(directory: str | os.PathLike[str]) -> bool:
    """Whether a save of ours was published there; False where that cannot be looked at."""
    try:
        return (Path(directory) / MANIFEST_NAME).is_file()
    except OSError:
        return False


def is_complete(directory: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint is all there: published by us, or with the file that other formats write last."""
    return has_manifest(directory) or stored_backend(directory) not in (None, BACKEND)


def open_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in `directory`; errors are Megatron's CheckpointingException."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from megatron_datastates.pipeline.load import Checkpoint

    path, options, reading = Path(directory).absolute(), OPTIONS.get()(), _READING.get()
    first = reading.get(path) if reading is not None else None
    if first is not None and first[0] == options:
        return first[1]
    try:
        manifest = (path / MANIFEST_NAME).stat()
        key = (os.fspath(directory), manifest.st_ino, manifest.st_mtime_ns, manifest.st_size, options)
    except OSError:
        key = None  # Checkpoint.open says what is wrong
    checkpoint = _opened.get(key) if key is not None else None
    if checkpoint is None:
        try:
            checkpoint = Checkpoint.open(directory, options)
        except DataStatesError as error:
            raise CheckpointingException(str(error)) from error
        _opened.clear()
        _opened[key] = checkpoint
    if first is not None and checkpoint.manifest != first[1].manifest:
        raise CheckpointingException(f"{directory} was saved anew while it was read: load again")
    if reading is not None:
        reading.setdefault(path, (options, checkpoint))
    return checkpoint


@contextlib.contextmanager
def reading_one(directory: str | os.PathLike[str]) -> Iterator[Callable[[], bytes | None]]:
    """Around one load: all of it reads the checkpoint that it opens first, or fails.

    Yields what returns that checkpoint's manifest, None while there is none.
    """
    reading: dict[Path, tuple[Options, Checkpoint]] = {}
    path = Path(directory).absolute()
    token = _READING.set(reading)
    try:
        yield lambda: reading[path][1].manifest.encode() if path in reading else None
    finally:
        _READING.reset(token)


def config_from_manifest(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `maybe_load_config`."""

    def maybe_load_config(checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        LOOKED_AT.set(checkpoint_dir)
        try:
            config = original(checkpoint_dir, *args, **kwargs)
        except (ValueError, TypeError, AttributeError):  # cut short by a crash, or damaged otherwise
            if not has_manifest(checkpoint_dir):
                raise
            config = None
        if config is None and checkpoint_dir and has_manifest(checkpoint_dir):
            from megatron.core.dist_checkpointing.core import CheckpointingConfig

            return CheckpointingConfig(BACKEND, 1)
        return config

    return maybe_load_config


def reader_by_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `_get_filesystem_reader`."""

    def _get_filesystem_reader(checkpoint_dir: str | Path, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(checkpoint_dir):
            return original(checkpoint_dir, *args, **kwargs)
        from megatron_datastates.mcore.reader import DataStatesReader

        return DataStatesReader(open_checkpoint(checkpoint_dir), _requested.get())

    return _get_filesystem_reader


def read_common_state(directory: str | os.PathLike[str]) -> Any:
    """The common state of a directory of ours. Needs no torch.distributed: Megatron reads arguments early."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    checkpoint = open_checkpoint(directory)
    try:
        if COMMON_STATE_KEY in checkpoint.index.objects:
            stored = checkpoint.read_object(COMMON_STATE_KEY)
            if not isinstance(stored, list) or len(stored) != 1:
                raise FormatError(f"the object {COMMON_STATE_KEY!r} of {directory} is no common state")
            return stored[0]
        return checkpoint.read_other_object(COMMON_STATE_FILE)
    except DataStatesError as error:
        raise CheckpointingException(str(error)) from error


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
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from torch.distributed.checkpoint.api import CheckpointException

        from megatron_datastates.mcore.metadata import requested_boxes
        from megatron_datastates.mcore.mismatch import LoadMismatch

        checkpoint, items = open_checkpoint(checkpoint_dir), list(nested_values(sharded_state_dict))
        boxes = requested_boxes(items)
        token = _requested.set(boxes)
        try:
            problem = first_mismatch(checkpoint, items)
            if problem is not None:
                raise LoadMismatch(f"{checkpoint_dir}: {problem}")
            checkpoint.index.preload(boxes)
            return original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                if isinstance(cause, DataStatesError):
                    raise CheckpointingException(str(cause)) from cause
            raise
        except DataStatesError as error:
            raise CheckpointingException(str(error)) from error
        finally:
            _requested.reset(token)

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
        from megatron.core.dist_checkpointing.core import CheckpointingException

        from megatron_datastates.pipeline.remove import remove_keys

        try:
            removed = remove_keys(checkpoint_dir, key_prefix)
        except DataStatesError as error:
            raise CheckpointingException(str(error)) from error
        if not removed:
            logger.warning("no key in %s begins with %r: nothing was removed", checkpoint_dir, key_prefix)
        return None

    return remove_sharded_tensors


def first_mismatch(checkpoint: Checkpoint, requested: Iterable[Any]) -> str | None:
    """What is asked for and not there, or does not fit; None if all is well."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    for item in requested:
        if isinstance(item, ShardedObject) and item.unique_key not in checkpoint.index.objects:
            return f"there is no object {item.unique_key!r} in this checkpoint"
        if isinstance(item, ShardedTensor):
            problem = _tensor_mismatch(checkpoint, item)
            if problem is not None:
                return problem
    return None


def _tensor_mismatch(checkpoint: Checkpoint, item: Any) -> str | None:
    if item.key not in checkpoint.index.tensors:
        return f"there is no tensor {item.key!r} in this checkpoint{_similar(item.key, checkpoint)}"
    dtype, shape = checkpoint.index.describe(item.key)
    if not item.allow_shape_mismatch and shape != tuple(item.global_shape):
        return (
            f"tensor {item.key!r} has global shape {shape} in this checkpoint, "
            f"and {tuple(item.global_shape)} in the model"
        )
    if not _converts(dtype, item.dtype):
        wanted = str(item.dtype).removeprefix("torch.")
        return f"tensor {item.key!r} is {dtype} in this checkpoint, and {wanted} in the model"
    return None


def _converts(stored: str, wanted: Any) -> bool:
    """Whether values keep their kind: conversions are torch_dist's, but floats do not become integers."""
    import torch

    from megatron_datastates.pipeline.load import torch_dtype

    return torch.can_cast(torch_dtype(stored), wanted)


def _similar(key: str, checkpoint: Checkpoint) -> str:
    tail = key.rsplit(".", 2)[-2:]
    close = [name for name in checkpoint.index.tensors if name.rsplit(".", 2)[-2:] == tail][:2]
    return f" (it has {' and '.join(map(repr, close))})" if close else ""
