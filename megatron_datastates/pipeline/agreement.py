"""The collective calls of a save, all on the trainer's thread and on the world's own backend.

No process group is made: one over the whole world costs sockets on every rank. Sums are asked for at one
poll and read at the next, so that a poll waits only for ranks that are a whole poll behind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class PendingSum(Protocol):
    """A sum over ranks that has been asked for."""

    def result(self) -> list[int]: ...


class Collectives:
    """What a save needs of torch.distributed; works alone where that is not initialized.

    Counts its calls by kind in `calls`.
    """

    def __init__(self) -> None:
        self._world = _world()
        self.distributed = self._world is not None and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1
        self.calls: dict[str, int] = {}

    def is_current(self) -> bool:
        """Whether torch.distributed's world is still the one that this was made in."""
        return _world() is self._world

    def _count(self, kind: str) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1

    def _tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device())

    @staticmethod
    def _device() -> torch.device:
        if "gloo" in str(dist.get_backend()):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def start_sum(self, values: Sequence[int]) -> PendingSum:
        """Asks for the sums of small whole numbers over all ranks."""
        if not self.distributed:
            return _Known(list(values))
        self._count("sum")
        tensor = self._tensor(values, torch.int32)
        if tensor.device.type == "cpu":
            return _HostSum(tensor, dist.all_reduce(tensor, async_op=True))
        dist.all_reduce(tensor)
        return _DeviceSum(tensor)

    def share_from_first(self, value: int) -> int:
        """Rank 0's 63-bit number, on every rank."""
        if not self.distributed:
            return value
        self._count("broadcast")
        tensor = self._tensor([value], torch.int64)
        dist.broadcast(tensor, 0)
        return int(tensor.item())

    def gather_all(self, record: bytes) -> list[bytes]:
        """Every rank's record, in the order of ranks; all have the same length."""
        if not self.distributed:
            return [record]
        self._count("gather")
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(self._device())
        everyone = torch.empty(self.size * len(record), dtype=torch.uint8, device=mine.device)
        dist.all_gather_into_tensor(everyone, mine)
        joined = everyone.cpu().numpy().tobytes()
        return [joined[i * len(record) : (i + 1) * len(record)] for i in range(self.size)]

    def gather_to_first(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Every rank's bytes on rank 0, of the lengths that all ranks know; nothing elsewhere."""
        if not self.distributed:
            return [data]
        self._count("gather layouts")
        longest = max(sizes)
        mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(self._device())
        parts = [torch.empty_like(mine) for _ in sizes] if self.rank == 0 else None
        dist.gather(mine, parts, dst=0)
        if parts is None:
            return []
        return [part.cpu().numpy().tobytes()[:size] for part, size in zip(parts, sizes, strict=True)]


_worlds_of_parents: list[object] = []


def _world() -> object:
    """The world of this process. A forked child of a rank has none: its parent's is not its own."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if any(world is other for other in _worlds_of_parents) else world


os.register_at_fork(after_in_child=lambda: _worlds_of_parents.append(_world()))


class _Known:
    def __init__(self, values: list[int]) -> None:
        self._values = values

    def result(self) -> list[int]:
        return self._values


class _HostSum:
    def __init__(self, tensor: torch.Tensor, work: dist.Work | None) -> None:
        self._tensor, self._work = tensor, work

    def result(self) -> list[int]:
        if self._work is not None:
            self._work.wait()
        return [int(value) for value in self._tensor.tolist()]


class _DeviceSum:
    """Read through pinned memory and an event, so that the device is never synchronized."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def result(self) -> list[int]:
        self._copied.synchronize()
        return [int(value) for value in self._host.tolist()]
