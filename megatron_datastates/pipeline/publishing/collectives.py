"""The collective calls of saves and loads, all on the trainer's thread and on the world's own backend.

No process group is made: one over the whole world costs sockets on every rank. Sums and records are requested
at one poll and read at the next, so that a poll waits only for ranks that are a whole poll late, and for the
device only until it reaches the place of the previous poll.

On a device, everything is enqueued on the trainer's current stream: collectives of ours between two of
Megatron's keep the one order that all ranks share. On a stream of our own they could overtake Megatron's on
some ranks only, and NCCL deadlocks where communicators are used in different orders.
"""

from __future__ import annotations

import functools
import os
import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

_ROUND_BYTES = 16 << 20
NOTHING = -1 << 63  # in place of both terms of a rank without a digest (`terms_of`)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PendingResult(Protocol[T_co]):
    """A collective call that was started; nobody has to read it."""

    def result(self) -> T_co:
        """Waits for the other ranks to start it, too; on a device, until the stream reaches that place."""
        ...


class PollableResult(PendingResult[T_co], Protocol[T_co]):
    """One that another thread may read, once.

    The trainer's thread checks whether it is over, and then reading it makes no call of the device: torch
    captures CUDA graphs in global mode, in which another thread that queries an event breaks the capture.
    """

    def is_over(self) -> bool:
        """Returns whether `result` would return at once."""
        ...


class Collectives:
    """What a save needs of torch.distributed; works alone where that is not initialized.

    Counts its calls by kind in `calls`. Memory for a device is kept, so that later saves allocate none, but
    for `gather_to_first`, which only new layouts need, and `send_from_first`, of saves in near tiers.
    """

    def __init__(self) -> None:
        self._world = _world()
        self.distributed = self._world is not None and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1
        self.calls: dict[str, int] = {}
        self._idle: dict[int, list[_Memory]] = {}  # by bytes

    def is_current(self) -> bool:
        """Returns whether torch.distributed's world is still the one that this was made in."""
        return _world() is self._world

    def _count(self, kind: str) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1

    @staticmethod
    def _device(group: dist.ProcessGroup | None = None) -> torch.device:
        # The backend's name is "undefined" after `init_process_group()` without one.
        group = _world() if group is None else group
        types = getattr(group, "_device_types", ())  # a private property of torch's
        if torch.device("cpu") in types or "gloo" in str(dist.get_backend(group)):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def _transport(cls) -> HostTransport | None:
        """Returns what moves data to and from the backend's device; None for one that uses host memory."""
        device = cls._device()
        return None if device.type == "cpu" else CudaTransport(device)

    def start_sum(self, values: Sequence[int]) -> PendingResult[list[int]]:
        """Starts to sum small whole numbers over all ranks."""
        if not self.distributed:
            return _Known(list(values))
        self._count("sum")
        own = torch.tensor(values, dtype=torch.int32, device="cpu")
        return self._start(own, 0, own.numel(), lambda sums: sums.tolist())

    def start_gather(self, record: bytes) -> PendingResult[bytes]:
        """Starts to gather the records of all ranks, in the order of ranks; all have the same length.

        A sum, too, of numbers in different places: NCCL sums along trees, and gathers around a ring. By
        arithmetic (nobody has measured it), a ring of 16,384 ranks would keep the trainer's stream for tens
        of milliseconds in each save. With NCCL_ALGO=Ring a sum takes twice the steps of a gather.
        """
        if not self.distributed:
            return _Known(record)
        self._count("gather")
        # Whole numbers: not all of NCCL's algorithms sum bytes.
        own = _tensor_of(record + bytes(-len(record) % 4)).view(torch.int32)

        def decode(found: torch.Tensor) -> bytes:
            return found.view(torch.uint8).numpy().reshape(self.size, -1)[:, : len(record)].tobytes()

        return self._start(own, self.rank * own.numel(), self.size * own.numel(), decode)

    def _start(
        self, own: torch.Tensor, at: int, count: int, decode: Callable[[torch.Tensor], T]
    ) -> PendingResult[T]:
        """Starts to sum `count` numbers over the ranks: `own` from number `at` on, and 0 elsewhere."""
        transport = self._transport()
        mine = slice(at, at + own.numel())
        if transport is None:
            summed = own.new_zeros(count)
            summed[mine] = own
            return _OnHost(dist.all_reduce(summed, async_op=True), summed, decode)
        idle = self._idle.setdefault(count * own.itemsize, [])
        memory = idle.pop() if idle else _Memory(transport, count * own.itemsize)
        on_host, on_device = memory.on_host.view(own.dtype), memory.on_device.view(own.dtype)
        if own.numel() < count:
            transport.clear(memory.on_device)
        on_host[mine] = own
        transport.copy(on_device[mine], on_host[mine])
        dist.all_reduce(on_device)
        transport.copy(on_host, on_device)
        memory.done.record()
        return _OnDevice(memory, lambda: decode(on_host), idle)

    def share_from_first(self, value: int) -> int:
        """Returns rank 0's 63-bit number on every rank."""
        if not self.distributed:
            return value
        self._count("broadcast")
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device())
        dist.broadcast(tensor, 0)
        return int(tensor.item())

    def share_and_compare(self, value: int, digest: bytes) -> tuple[int, bool]:
        """Returns rank 0's 63-bit number, and whether all ranks' digests are equal; waits for all ranks."""
        if not self.distributed:
            return value, True
        self._count("share and compare")
        shared, least, most = max_now([value if self.rank == 0 else 0, *terms_of(digest)])
        return shared, are_equal(least, most)

    def gather_values(self, value: T) -> list[T]:
        """Returns the values of all ranks, in their order. Pickles them; waits for all ranks.

        They take no more memory than they have together: in torch's all_gather_object each takes as much as
        the largest, on the device.
        """
        if not self.distributed:
            return [value]
        data = zlib.compress(pickle.dumps(value), 1)  # mostly names of files, which resemble each other
        sizes = np.frombuffer(self.start_gather(len(data).to_bytes(8, "little")).result(), "<u8")
        shared = self._join(data, sizes.astype(np.int64), "gather values", reads=True).result()
        return [pickle.loads(zlib.decompress(each)) for each in shared]

    def gather_to_first(self, data: bytes, sizes: npt.NDArray[np.int64]) -> PollableResult[list[bytes]]:
        """Starts to gather every rank's bytes, of lengths that all ranks know, on rank 0; others get nothing.

        By sums, as `start_gather`: for torch's gather, NCCL opens a connection from rank 0 to every other
        rank, with buffers for each.
        """
        if not self.distributed:
            return _Known([data])
        return self._join(data, sizes, "gather layouts", reads=self.rank == 0)

    def _join(
        self, data: bytes, sizes: npt.NDArray[np.int64], kind: str, *, reads: bool
    ) -> PollableResult[list[bytes]]:
        """Starts to bring every rank's bytes together, on the ranks that read them.

        In rounds of _ROUND_BYTES, which use the same memory on a device, one after the other on its stream;
        host memory holds what is read. A backend that works on host memory waits for the other ranks in each
        round.
        """
        transport = self._transport() or HostTransport()
        ends = np.cumsum(_whole_numbers(sizes)).tolist()
        total, step = ends[-1], _ROUND_BYTES // 4
        padded = _tensor_of(data + bytes(-len(data) % 4))
        sent = transport.pinned(len(padded)).copy_(padded).view(torch.int32)
        begin, joined = ends[self.rank] - len(sent), transport.empty(4 * min(step, total)).view(torch.int32)
        rounds: list[torch.Tensor] = []
        for at in range(0, total, step):
            self._count(kind)
            mine = sent[max(at - begin, 0) : max(at + step - begin, 0)]
            first, summed = min(max(begin - at, 0), step), joined[: total - at]
            transport.clear(summed)
            transport.copy(summed[first : first + len(mine)], mine)
            dist.all_reduce(summed)
            if reads:
                rounds.append(transport.pinned(4 * len(summed)))
                transport.copy(rounds[-1].view(torch.int32), summed)
        done = transport.event()
        done.record()
        return _Arriving(done, functools.partial(_cut, rounds, sizes if reads else sizes[:0]))

    def send_from_first(self, data: bytes, size: int) -> PollableResult[bytes]:
        """Starts to send rank 0's `data`, of `size` bytes, to all ranks; only rank 0 passes it.

        In rounds of _ROUND_BYTES, as what is joined.
        """
        if not self.distributed:
            return _Known(data)
        transport = self._transport() or HostTransport()
        moved, held = transport.empty(min(size, _ROUND_BYTES)), transport.pinned(size)
        if self.rank == 0:
            held.copy_(_tensor_of(data))
        for at in range(0, size, len(moved)):
            self._count("send small files")
            piece = held[at : at + len(moved)]
            if self.rank == 0:
                transport.copy(moved[: len(piece)], piece)
            dist.broadcast(moved, 0)
            if self.rank != 0:
                transport.copy(piece, moved[: len(piece)])
        done = transport.event()
        done.record()
        return _Arriving(done, lambda: held.numpy().tobytes())


def ranks_of(group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the global ranks of a group, by default of the world; rank 0 alone where there is none."""
    world = _world()  # torch before 2.7 does not take None for it
    return dist.get_process_group_ranks(group or world) if world is not None else [0]


def sum_now(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the sums of whole numbers over the ranks of a group; waits for all of them."""
    return _reduce_now(values, group, dist.ReduceOp.SUM)


def max_now(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the greatest of each of some whole numbers over the ranks of a group; waits for all of them."""
    return _reduce_now(values, group, dist.ReduceOp.MAX)


def _reduce_now(values: Sequence[int], group: dist.ProcessGroup | None, operation: Any) -> list[int]:
    tensor = torch.tensor(values, dtype=torch.int64, device=Collectives._device(group))
    dist.all_reduce(tensor, operation, group)
    return [int(value) for value in tensor.tolist()]


def terms_of(digest: bytes) -> list[int]:
    """Returns two numbers whose maxima over all ranks show whether all have the same digest (`are_equal`)."""
    number = int.from_bytes(digest[:8], "little") >> 1  # of 63 bits
    return [-number, number]


def are_equal(least: int, most: int) -> bool:
    """Returns whether the digests of all ranks that have one are equal.

    Args:
        least: the greatest of their numbers' negatives.
        most: the greatest of their numbers; NOTHING if no rank has a digest.
    """
    return most in (-least, NOTHING)


def gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's value, in the order of the group's ranks. Pickles them, as `gather_values`."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


_worlds_of_parents: list[object] = []


def _world() -> dist.ProcessGroup | None:
    """Returns the world of this process. A forked child of a rank has none: its parent's is not its own."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if any(world is other for other in _worlds_of_parents) else world


os.register_at_fork(after_in_child=lambda: _worlds_of_parents.append(_world()))


def _tensor_of(data: bytes) -> torch.Tensor:
    held = bytearray(data)  # which torch may write into, unlike bytes
    return (
        torch.frombuffer(held, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _whole_numbers(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns how many numbers of 32 bits hold so many bytes. Not all of NCCL's algorithms sum bytes."""
    return -(-sizes // 4)


class Event:
    """A place on the stream of a device; on the host, which has none, it is over at once."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def is_over(self) -> bool:
        return True


class HostTransport:
    """Where tensors lie that the world's backend works on, and the way to there and back.

    Here both are host memory, and all is done at once that a device does later.
    """

    def empty(self, count: int) -> torch.Tensor:
        """Allocates bytes on the device."""
        return torch.empty(count, dtype=torch.uint8, device="cpu")

    def pinned(self, count: int) -> torch.Tensor:
        """Allocates bytes of host memory that the device can copy from and to."""
        return self.empty(count)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueues a copy between the two."""
        target.copy_(source, non_blocking=True)

    def clear(self, target: torch.Tensor) -> None:
        """Enqueues setting memory on the device to zero."""
        target.zero_()

    def event(self) -> Event:
        return Event()


class CudaTransport(HostTransport):
    """Enqueues on the current stream, and never synchronizes it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)

    def pinned(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)

    def event(self) -> Event:
        return _CudaEvent(self._device)


class _CudaEvent(Event):
    """Sets the device before it looks: a thread that never did would open a context on the first one."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event()

    def record(self) -> None:
        self._event.record()

    def synchronize(self) -> None:
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def is_over(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())


class _Known(Generic[T]):
    def __init__(self, value: T) -> None:
        self._value = value

    def is_over(self) -> bool:
        return True

    def result(self) -> T:
        return self._value


class _OnHost(Generic[T]):
    def __init__(
        self, work: dist.Work | None, received: torch.Tensor, decode: Callable[[torch.Tensor], T]
    ) -> None:
        self._work, self._received, self._decode = work, received, decode

    def result(self) -> T:
        if self._work is not None:
            self._work.wait()
        return self._decode(self._received)


class _Memory:
    """Serves one collective call at a time, from its start until its result was read."""

    def __init__(self, transport: HostTransport, count: int) -> None:
        self.on_host, self.on_device = transport.pinned(count), transport.empty(count)
        self.done = transport.event()


class _OnDevice(Generic[T]):
    """Goes there and back through page-locked memory and an event, so that the device is never synchronized.

    Nothing else may use `memory` while the device does: it joins `idle` once the event is over, or is freed
    if the result is never read.
    """

    def __init__(self, memory: _Memory, decode: Callable[[], T], idle: list[_Memory]) -> None:
        self._memory, self._decode, self._idle = memory, decode, idle
        self._found: list[T] = []

    def result(self) -> T:
        if not self._found:  # memory is returned once, however often this is called
            self._memory.done.synchronize()
            self._found.append(self._decode())
            self._idle.append(self._memory)
        return self._found[0]


class _Arriving(Generic[T]):
    """What is in page-locked memory once an event is over. To be read once, on any thread."""

    def __init__(self, done: Event, read: Callable[[], T]) -> None:
        self._done, self._read, self._is_over = done, read, False

    def is_over(self) -> bool:
        self._is_over = self._is_over or self._done.is_over()
        return self._is_over

    def result(self) -> T:
        if not self._is_over:
            self._done.synchronize()
        return self._read()


def _cut(rounds: list[torch.Tensor], sizes: npt.NDArray[np.int64]) -> list[bytes]:
    """Returns the bytes of all ranks, which lie one after the other in rounds; empties that list."""
    found, held = [], bytearray()
    for size, count in zip(sizes.tolist(), _whole_numbers(sizes).tolist(), strict=True):
        padded = 4 * count
        while len(held) < padded:  # each goes as its copy comes: all together may be a GiB
            held += rounds.pop(0).numpy().data
        found.append(bytes(held[:size]))
        del held[:padded]
    return found
