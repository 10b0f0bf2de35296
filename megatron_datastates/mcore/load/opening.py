"""Opening checkpoints for Megatron's functions: the last one is cached, and errors are also Megatron's."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from megatron_datastates.config import Options
from megatron_datastates.errors import FormatError, StorageError
from megatron_datastates.files import any_path, is_object
from megatron_datastates.format.directory import COMMON_FILE, COMMON_STATE_KEY
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.mcore.load import state
from megatron_datastates.pipeline.runs import runs

if TYPE_CHECKING:
    from megatron_datastates.pipeline.loading.load import Checkpoint

_opened: dict[object, Checkpoint] = {}  # the last one, since a load opens it several times


def forget() -> None:
    """Empties the cache, but for what an open load has opened: a later load opens its checkpoint again."""
    _opened.clear()


def open_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """Opens the checkpoint in `directory`: the same one throughout a load, whatever is published.

    Raises:
        LoadFailedError (and a CheckpointingException): it cannot be opened.
    """
    from megatron_datastates.mcore.errors import load_errors

    load, path, options = state.current(), any_path(directory).absolute(), state.current().options()
    first = load.checkpoints.get(path)
    was_open = True
    if first is not None and first[0] == options:
        checkpoint = first[1]
    else:
        checkpoint, was_open = _open(directory, options)
        if first is not None and checkpoint.manifest.save_id != first[1].manifest.save_id:
            with load_errors():
                raise StorageError(f"{directory} was replaced by another save while it was read: load again")
        load.checkpoints[path] = options, checkpoint
    if load.agreement is not None:
        load.agreement.opened = checkpoint.manifest.save_id, checkpoint.manifest.index.sha256
    if load.tracker is not None:
        load.tracker.follow(checkpoint, was_open=was_open)
    return checkpoint


def is_open(directory: str | os.PathLike[str]) -> bool:
    """Returns whether the open load has opened the directory: for it, that stays of our format."""
    return any_path(directory).absolute() in state.current().checkpoints


def is_ours(directory: str | os.PathLike[str]) -> bool:
    """Returns whether the directory is of our format."""
    return is_open(directory) or runs.is_ours(directory)


def _open(directory: str | os.PathLike[str], options: Options) -> tuple[Checkpoint, bool]:
    """Returns the checkpoint, and whether an earlier load has opened it."""
    from megatron_datastates.mcore.errors import load_errors
    from megatron_datastates.pipeline.loading.load import Checkpoint

    key = None
    path = any_path(directory).absolute() / MANIFEST_NAME
    if not is_object(path):  # the status of an object does not distinguish it from one of another save
        with contextlib.suppress(OSError):  # Checkpoint.open raises an error that says what is wrong
            manifest = path.stat()
            key = (os.fspath(directory), manifest.st_ino, manifest.st_mtime_ns, manifest.st_size, options)
    checkpoint = _opened.get(key) if key is not None else None
    if checkpoint is not None:
        return checkpoint, True
    with load_errors():
        checkpoint = Checkpoint.open(directory, options)
    _opened.clear()
    if key is not None:
        _opened[key] = checkpoint
    return checkpoint, False


def read_common_state(directory: str | os.PathLike[str]) -> Any:
    """Reads a checkpoint's common state. Needs no torch.distributed: Megatron reads arguments before it."""
    from megatron_datastates.mcore.errors import load_errors

    checkpoint = open_checkpoint(directory)
    with load_errors():
        if COMMON_STATE_KEY in checkpoint.index.objects:
            stored = checkpoint.read_object(COMMON_STATE_KEY)
            if not isinstance(stored, list) or len(stored) != 1:
                raise FormatError(
                    f"the object {COMMON_STATE_KEY!r} of {directory} is not a common state: "
                    "expected a list of one element"
                )
            return _dictionary(stored[0], f"the object {COMMON_STATE_KEY!r} of {directory}")
        return _dictionary(checkpoint.read_other_object(COMMON_FILE), f"{COMMON_FILE} of {directory}")


def _dictionary(stored: Any, what: str) -> dict[Any, Any]:
    if not isinstance(stored, dict):
        raise FormatError(f"{what} is not a common state: expected a dict, found {type(stored).__qualname__}")
    return stored
