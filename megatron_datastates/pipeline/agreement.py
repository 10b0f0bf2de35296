"""The collective calls of saves and loads, all on the trainer's thread and on the world's own backend.

No process group is made: one over the whole world costs sockets on every rank. Sums are asked for at one
poll and read at the next, so that a poll waits only for ranks that are a whole poll behind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

_ROUND_BYTES = 64 << 20
_LEAST_ROUND_BYTES = 4096


class PendingSum(Protocol):
    """A sum over ranks that has been asked for."""

    def result(self) -> list[int]: ...


class Collectives:
    """What a save needs of torch.distributed; works alone where that is not initialized.

    Counts its calls by kind in `calls`. Memory on a device is kept, so that later saves allocate none there,
    but for `gather_to_first`, which only new layouts need.
    """

    def __init__(self) -> None:
        self._world = _world()
        self.distributed = self._world is not None and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1
        self.calls: dict[str, int] = {}
        self._idle_sums: dict[int, list[_SumMemory]] = {}  # by count of numbers
        self._room: dict[tuple[str, int], torch.Tensor] = {}

    def is_current(self) -> bool:
        """Whether torch.distributed's world is still the one that this was made in."""
        return _world() is self._world

    def _count(self, kind: str) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1

    @staticmethod
    def _device(group: dist.ProcessGroup | None = None) -> torch.device:
        if "gloo" in str(dist.get_backend(group)):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def start_sum(self, values: Sequence[int]) -> PendingSum:
        """Asks for the sums of small whole numbers over all ranks."""
        if not self.distributed:
            return _Known(list(values))
        self._count("sum")
        device = self._device()
        if device.type == "cpu":
            tensor = torch.tensor(values, dtype=torch.int32)
            return _HostSum(tensor, dist.all_reduce(tensor, async_op=True))
        idle = self._idle_sums.setdefault(len(values), [])
        return _DeviceSum(values, idle.pop() if idle else _SumMemory(len(values), device), idle)

    def share_from_first(self, value: int) -> int:
        """Rank 0's 63-bit number, on every rank."""
        if not self.distributed:
            return value
        self._count("broadcast")
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device())
        dist.broadcast(tensor, 0)
        return int(tensor.item())

    def gather_all(self, record: bytes) -> list[bytes]:
        """Every rank's record, in the order of ranks; all have the same length."""
        if not self.distributed:
            return [record]
        self._count("gather")
        mine = self._kept("mine", len(record))
        mine.copy_(torch.frombuffer(bytearray(record), dtype=torch.uint8))
        everyone = self._kept("everyone", self.size * len(record))
        dist.all_gather_into_tensor(everyone, mine)
        joined = everyone.cpu().numpy().tobytes()
        return [joined[i * len(record) : (i + 1) * len(record)] for i in range(self.size)]

    def _kept(self, name: str, size: int) -> torch.Tensor:
        if (name, size) not in self._room:
            self._room[name, size] = torch.empty(size, dtype=torch.uint8, device=self._device())
        return self._room[name, size]

    def gather_to_first(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Every rank's bytes on rank 0, of the lengths that all ranks know; nothing elsewhere.

        In rounds, since all ranks' pieces of one are as long: they take _ROUND_BYTES there, or of more ranks
        than make that up, _LEAST_ROUND_BYTES each.
        """
        if not self.distributed:
            return [data]
        longest, device = max(sizes), self._device()
        each = min(longest, max(_ROUND_BYTES // self.size, _LEAST_ROUND_BYTES))
        mine = torch.empty(each, dtype=torch.uint8, device=device)
        rows = self.size if self.rank == 0 else 0
        everyone = torch.empty((rows, each), dtype=torch.uint8, device=device)
        found = [bytearray() for _ in range(rows)]
        for at in range(0, longest, each):
            self._count("gather layouts")
            piece = data[at : at + each]
            if piece:
                mine[: len(piece)].copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
            dist.gather(mine, list(everyone.unbind(0)) if rows else None, dst=0)
            for held, size, row in zip(found, sizes, everyone.cpu().numpy(), strict=False):
                held += row[: max(size - at, 0)].data
        found.reverse()  # each goes as its copy comes: all together may be a GiB
        return [bytes(found.pop()) for _ in range(rows)]


def ranks_of(group: dist.ProcessGroup | None = None) -> list[int]:
    """The global ranks of a group, by default of the world; rank 0 alone where there is none."""
    return dist.get_process_group_ranks(group) if _world() is not None else [0]


def sum_now(value: int, group: dist.ProcessGroup | None = None) -> int:
    """The sum of a small whole number over the ranks of a group; waits for all of them."""
    tensor = torch.tensor([value], dtype=torch.int32, device=Collectives._device(group))
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in the order of the group's ranks. They are pickled: for what has failed only."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


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


class _SumMemory:
    """Of one sum at a time, from its asking until its result was read."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.host = torch.empty(count, dtype=torch.int32, pin_memory=True)
        self.device = torch.empty(count, dtype=torch.int32, device=device)
        self.done = torch.cuda.Event()


class _DeviceSum:
    """Goes there and back through page-locked memory and an event, so that the device is never synchronized.

    Nothing else may have `memory` while the device is at it: it joins `idle` once the event is over. A sum
    that nobody reads drops it.
    """

    def __init__(self, values: Sequence[int], memory: _SumMemory, idle: list[_SumMemory]) -> None:
        self._memory, self._idle = memory, idle
        self._values: list[int] | None = None
        memory.host.copy_(torch.tensor(values, dtype=torch.int32))
        memory.device.copy_(memory.host, non_blocking=True)
        dist.all_reduce(memory.device)
        memory.host.copy_(memory.device, non_blocking=True)
        memory.done.record()

    def result(self) -> list[int]:
        if self._values is None:  # memory is given back once, however often this is asked
            self._memory.done.synchronize()
            self._values = [int(value) for value in self._memory.host.tolist()]
            self._idle.append(self._memory)
        return self._values
