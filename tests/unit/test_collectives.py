"""The collective calls of a save on a device's backend, with a device that is host memory and does all it is
asked for late: what is enqueued runs when an event is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_datastates.pipeline.publishing import collectives as module
from megatron_datastates.pipeline.publishing.collectives import Collectives

RANKS = 3


class LateDevice:
    """Stands in for CudaTransport and NCCL: every rank sends the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[int] = []  # bytes of tensors on the device
        self._queue: deque[Callable[[], Any]] = deque()
        self._cleared: list[int] = []  # addresses of what the next sum joins
        monkeypatch.setattr(dist, "all_reduce", lambda tensor: self._later(lambda: self._sum(tensor)))
        monkeypatch.setattr(Collectives, "_transport", lambda collectives: self)

    def empty(self, count: int) -> torch.Tensor:
        self.made.append(count)
        return self.pinned(count)

    def pinned(self, count: int) -> torch.Tensor:
        return torch.full((count,), 0xEE, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._later(lambda: target.copy_(source))

    def clear(self, target: torch.Tensor) -> None:
        self._cleared.append(target.data_ptr())
        self._later(target.zero_)

    def event(self) -> LateEvent:
        return LateEvent(self._queue)

    def _sum(self, tensor: torch.Tensor) -> None:
        if tensor.data_ptr() not in self._cleared:
            tensor.mul_(RANKS)
            return
        self._cleared.remove(tensor.data_ptr())  # each rank has its numbers in a place of their own
        mine, others = tensor.view(RANKS, -1)[0], tensor.view(RANKS, -1)[1:]  # this is rank 0
        others += mine

    def _later(self, work: Callable[[], Any]) -> None:
        self._queue.append(work)


class LateEvent:
    def __init__(self, queue: deque[Callable[[], Any]]) -> None:
        self._queue, self._over = queue, True

    def record(self) -> None:
        self._over = False
        self._queue.append(lambda: setattr(self, "_over", True))

    def is_over(self) -> bool:
        return self._over

    def synchronize(self) -> None:
        while not self._over:
            self._queue.popleft()()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    return LateDevice(monkeypatch)


@pytest.fixture
def collectives(device: LateDevice) -> Collectives:
    made = Collectives()
    made.distributed, made.size = True, RANKS
    return made


def test_sums_of_a_device_are_read_when_they_are_there(collectives: Collectives) -> None:
    for values in ([1, 0, 2], [0, 0, 0], [5, 6, 7]):
        assert collectives.start_sum(values).result() == [RANKS * value for value in values]


def test_sums_in_flight_at_the_same_time_do_not_share_memory(collectives: Collectives) -> None:
    asked = [collectives.start_sum([i, i + 1, 0]) for i in range(4)]
    assert [sum.result() for sum in asked] == [[RANKS * i, RANKS * (i + 1), 0] for i in range(4)]
    again = [collectives.start_sum([i, 7, i]) for i in range(9, 13)]
    for i, asked_sum in reversed(list(zip(range(9, 13), again, strict=True))):
        assert asked_sum.result() == [RANKS * i, RANKS * 7, RANKS * i]


def test_a_sum_may_be_read_again(collectives: Collectives) -> None:
    """A poll that failed after it is made once more. Memory is not lent twice for that."""
    first = collectives.start_sum([1, 2, 3])
    assert first.result() == first.result() == [RANKS, 2 * RANKS, 3 * RANKS]
    asked = [collectives.start_sum([i, i, i]) for i in range(3)]
    assert [sum.result() for sum in asked] == [[RANKS * i] * 3 for i in range(3)]
    assert first.result() == [RANKS, 2 * RANKS, 3 * RANKS]


def test_later_sums_allocate_nothing_on_the_device(device: LateDevice, collectives: Collectives) -> None:
    pending = collectives.start_sum([0, 0, 0])
    for i in range(50):  # one is asked for before the other was read: two in flight
        another = collectives.start_sum([i, 0, 0])
        pending.result()
        pending = another
    assert device.made == [12, 12]


def test_a_sum_that_nobody_reads_does_not_lend_its_memory(collectives: Collectives) -> None:
    collectives.start_sum([9, 9, 9])
    assert collectives.start_sum([1, 2, 3]).result() == [RANKS, 2 * RANKS, 3 * RANKS]


def test_later_gathers_allocate_nothing_on_the_device(device: LateDevice, collectives: Collectives) -> None:
    for i in range(5):
        for size in (16, 24):
            record = bytes([i]) * size
            assert collectives.start_gather(record).result() == record * RANKS
    assert device.made == [3 * 16, 3 * 24]


def test_records_of_any_length_are_joined_beside_sums_of_the_same_size(collectives: Collectives) -> None:
    for size in (0, 1, 2, 3, 4, 5, 11):
        record = bytes(range(0xF5, 0xF5 + size))
        values = [-1] * (RANKS * -(-size // 4))
        for _ in range(2):
            asked = collectives.start_gather(record), collectives.start_sum(values)
            assert asked[1].result() == [-RANKS] * len(values)
            assert asked[0].result() == record * RANKS


def test_gathers_in_flight_at_the_same_time_do_not_share_memory(collectives: Collectives) -> None:
    asked = [collectives.start_gather(bytes([i]) * 20) for i in range(3)]
    for i in (1, 0, 2, 1):
        assert asked[i].result() == bytes([i]) * 20 * RANKS


# -- rounds -----------------------------------------------------------------------------------------------


def test_rounds_on_a_device_are_enqueued_and_share_its_memory(
    device: LateDevice, collectives: Collectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROUND_BYTES", 16)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)  # the others add zeros
    data = bytes(range(20))
    arriving = collectives.gather_to_first(data, np.array([20, 5, 19]))
    assert device.made == [16] and collectives.calls == {"gather layouts": 3}
    assert not arriving.is_over()
    assert arriving.result() == [data, bytes(5), bytes(19)]
    assert arriving.is_over()


@pytest.mark.parametrize("round_bytes", [4, 8, 100, 1000])
@pytest.mark.parametrize("rank", range(RANKS))
def test_bytes_of_all_ranks_are_joined_in_rounds_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch, round_bytes: int, rank: int
) -> None:
    """Each rank adds its own bytes, zeros elsewhere, and the first one reads the sum."""
    data = [bytes(range(20)), b"", bytes(range(100, 107))]
    joined = b"".join(part + bytes(-len(part) % 4) for part in data)
    place = slice(20 * (rank > 0), 20 * (rank > 0) + len(data[rank]))
    own = bytearray(len(joined))
    own[place] = data[rank]
    rounds: list[bytes] = []

    def all_reduce(tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.int32  # not all of NCCL's algorithms sum bytes
        begin = sum(map(len, rounds))
        rounds.append(tensor.numpy().tobytes())
        tensor.copy_(torch.frombuffer(bytearray(joined[begin : begin + 4 * len(tensor)]), dtype=torch.int32))

    monkeypatch.setattr(module, "_ROUND_BYTES", round_bytes)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(Collectives, "_transport", lambda collectives: None)
    collectives = Collectives()
    collectives.distributed, collectives.rank, collectives.size = True, rank, RANKS
    found = collectives.gather_to_first(data[rank], np.array([len(part) for part in data])).result()
    assert found == (data if rank == 0 else [])
    assert b"".join(rounds) == own
    assert max(map(len, rounds)) == min(round_bytes, len(joined))
