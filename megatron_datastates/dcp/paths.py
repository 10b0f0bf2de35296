"""Where DCP wants a checkpoint to be: its `checkpoint_id` as a directory."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_datastates.errors import DataStatesError
from megatron_datastates.files import absolute, is_object, path_of


def directory_of(checkpoint_id: str | os.PathLike[str]) -> Path:
    """Returns the directory that a checkpoint id names. Raises DataStatesError for a URL, also in a Path."""
    if "://" in os.fspath(checkpoint_id) or is_object(checkpoint_id):
        raise DataStatesError(
            f"{checkpoint_id} is a URL: expected a directory on a POSIX file system; only Megatron's "
            "training loop saves to object stores"
        )
    return absolute(path_of(checkpoint_id))
