"""Checkpoints of ours as Megatron's functions open them: one at a time, whose errors are Megatron's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_datastates.errors import FormatError
from megatron_datastates.format.directory import COMMON_FILE, COMMON_STATE_KEY
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.mcore.load import state

if TYPE_CHECKING:
    from megatron_datastates.pipeline.load import Checkpoint

_opened: dict[object, Checkpoint] = {}  # the last one: a load opens it several times


def forget() -> None:
    """Opens what was opened last anew the next time."""
    _opened.clear()


def open_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in `directory`; errors are LoadFailedError, and Megatron's."""
    from megatron_datastates.mcore.errors import load_errors
    from megatron_datastates.pipeline.load import Checkpoint

    options = state.current().options()
    try:
        manifest = (Path(directory).absolute() / MANIFEST_NAME).stat()
        key = (os.fspath(directory), manifest.st_ino, manifest.st_mtime_ns, manifest.st_size, options)
    except OSError:
        key = None  # Checkpoint.open says what is wrong
    checkpoint = _opened.get(key) if key is not None else None
    was_open = checkpoint is not None
    if checkpoint is None:
        with load_errors():
            checkpoint = Checkpoint.open(directory, options)
        _opened.clear()
        _opened[key] = checkpoint
    if (tracker := state.current().tracker) is not None:
        tracker.follow(checkpoint, was_open=was_open)
    return checkpoint


def read_common_state(directory: str | os.PathLike[str]) -> Any:
    """The common state of a directory of ours. Needs no torch.distributed: Megatron reads arguments early."""
    from megatron_datastates.mcore.errors import load_errors

    checkpoint = open_checkpoint(directory)
    with load_errors():
        if COMMON_STATE_KEY in checkpoint.index.objects:
            stored = checkpoint.read_object(COMMON_STATE_KEY)
            if not isinstance(stored, list) or len(stored) != 1:
                raise FormatError(f"the object {COMMON_STATE_KEY!r} of {directory} is no common state")
            return stored[0]
        return checkpoint.read_other_object(COMMON_FILE)
