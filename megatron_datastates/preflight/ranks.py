"""The ranks that try a run's storage together."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import torch

from megatron_datastates.pipeline.near.places import kernel_id


class Ranks:
    """The ranks of a job of torchrun, or this process alone."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
            torch.cuda.set_device(local)
            self.device = torch.device("cuda", local)
        if self.size > 1:
            # As Megatron does; without a GPU, the default of torch.
            torch.distributed.init_process_group("nccl" if self.device.type == "cuda" else None)
        found = self.gathered((socket.gethostname(), kernel_id()))
        self.nodes = [str(name) for name, _ in found]  # for people: all may have one name, as `localhost`
        self.node_count = len({kernel for _, kernel in found})

    def gathered(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value)
        return found

    def largest(self, value: float) -> float:
        """Returns the largest value of all ranks."""
        return float(max(self.gathered(value)))

    def close(self) -> None:
        """Waits for the other ranks, and leaves them.

        torchrun ends all ranks as soon as one has ended with an exit code of 1: none may before rank 0 has
        printed, and removed what was written.
        """
        if self.size > 1:
            with contextlib.suppress(RuntimeError):  # another rank has ended: here, all is done
                self.gathered(None)
            torch.distributed.destroy_process_group()
