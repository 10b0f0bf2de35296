"""Errors raised through Megatron's functions: each is one of ours and Megatron's CheckpointingException.

Programs that catch either continue to work.
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
    """A SaveFailedError that is also a CheckpointingException.

    Attributes:
        is_agreed: whether all ranks raise it, with the same text.
    """

    is_agreed = True


class MegatronLoadFailedError(LoadFailedError, CheckpointingException):  # type: ignore[misc]
    """A LoadFailedError that is also a CheckpointingException.

    Attributes:
        older: iteration of an undamaged checkpoint that can be loaded instead, as found by all ranks.
    """

    older: int | None = None


class LoadMismatch(MegatronLoadFailedError, MismatchError, CheckpointException):
    """A missing key, or a shape or dtype that does not match; also DCP's CheckpointException."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
        self._failures = {}

    def __str__(self) -> str:
        return printable(Exception.__str__(self), keep="\n")


def ours_within(error: CheckpointException) -> DataStatesError | None:
    """Returns the first error of ours among those of all ranks that DCP's error wraps, if there is one."""
    return next((one for one, _ in error.failures.values() if isinstance(one, DataStatesError)), None)


@contextlib.contextmanager
def load_errors() -> Iterator[None]:
    """Raises MegatronLoadFailedError from any error that is ours but not Megatron's."""
    try:
        yield
    except CheckpointingException:
        raise
    except DataStatesError as error:
        raise MegatronLoadFailedError(str(error)) from error
