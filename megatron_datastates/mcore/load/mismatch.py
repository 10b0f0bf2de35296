"""The error of a load that asks for what the checkpoint does not hold."""

from __future__ import annotations

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException


class LoadMismatch(CheckpointingException, CheckpointException):  # type: ignore[misc]
    """A key that is not there, or a shape or dtype that does not fit.

    Both what Megatron raises for checkpoints that make no sense and what torch_dist raises here, so programs
    that catch either go on working.
    """

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
        self._failures = {}

    def __str__(self) -> str:
        return Exception.__str__(self)
