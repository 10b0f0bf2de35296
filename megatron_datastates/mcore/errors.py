"""Errors raised through Megatron's functions: ours, and Megatron's CheckpointingException, too.

Programs that catch either go on working.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_datastates.errors import (
    DataStatesError,
    LoadFailedError,
    MismatchError,
    SaveFailedError,
    printable,
)


class MegatronSaveFailedError(SaveFailedError, CheckpointingException):  # type: ignore[misc]
    """See SaveFailedError."""


class MegatronLoadFailedError(LoadFailedError, CheckpointingException):  # type: ignore[misc]
    """See LoadFailedError."""


class LoadMismatch(MegatronLoadFailedError, MismatchError, CheckpointException):
    """A key that is not there, or a shape or dtype that does not fit: what torch_dist raises here, too."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
        self._failures = {}

    def __str__(self) -> str:
        return printable(Exception.__str__(self), keep="\n")


@contextlib.contextmanager
def load_errors() -> Iterator[None]:
    """Raises a MegatronLoadFailedError in place of an error that is ours alone, which is its cause."""
    try:
        yield
    except CheckpointingException:
        raise
    except DataStatesError as error:
        raise MegatronLoadFailedError(str(error)) from error
