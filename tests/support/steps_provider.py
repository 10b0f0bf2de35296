"""A user's state provider for Megatron's loop: counts steps, in a table, an object and a stream.

The environment variable STEPS_FAIL_ON_RANK_<n> makes its `entries` or its `restore` fail on that rank.
"""

import os
import sys
from collections.abc import Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_datastates.providers import (
    Entry,
    Mutability,
    ObjectSource,
    Place,
    StateReader,
    StreamSource,
    TensorSource,
)

STEPS = 32  # more than any test takes


class Steps:
    """The number of each step, in this rank's row of a table that all ranks share; the steps' log."""

    name = "steps"

    def __init__(self) -> None:
        self.rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.row = torch.zeros(1, STEPS, dtype=torch.int64)
        self.place = Place((ranks, STEPS), (self.rank, 0), (1, STEPS))
        self.count = 0
        self.log = b""
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.row[0, self.count] = 100 * (self.rank + 1) + self.count
        self.count += 1
        self.log += b"%d;" % self.count

    def _fail(self, where: str) -> None:
        if os.environ.get(f"STEPS_FAIL_ON_RANK_{self.rank}") == where:
            raise RuntimeError(f"{where} does not work today")

    def entries(self) -> Iterator[Entry]:
        yield TensorSource("table", self.row, Mutability.NOW, self.place)
        self._fail("entries")
        yield ObjectSource(f"rank{self.rank}.count", {"count": self.count})
        yield StreamSource.from_buffers(f"rank{self.rank}.log", [self.log], Mutability.NEVER)

    def restore(self, reader: StateReader) -> None:
        self._fail("restore")
        reader.read_into({"table": TensorSource("table", self.row, place=self.place)})
        self.count = reader.read_object(f"rank{self.rank}.count")["count"]
        self.log = b"".join(map(bytes, reader.open_stream(f"rank{self.rank}.log")))


def main(arguments: list[str], folder: str) -> None:
    """Pretrains, with the folder INSTALLED of the environment on Python's path: see test_providers.py."""
    import tiny_rank

    sys.path += filter(None, [os.environ.get("INSTALLED")])
    tiny_rank.main(arguments, folder)
