"""A stand-in for a device and its backend, in each of several real ranks, which runs everything late.

    device = LateDevice()  # collective; from here on Collectives work on it

A thread runs what is enqueued, in order, with gloo underneath. Work that a poll enqueues begins only after
that poll has returned. A copy to host memory leaves garbage there until a later event was seen to be reached.
Anything that would synchronize the device fails: reading a tensor on it, and waiting for an event in the poll
that recorded it. So does querying an event on a thread other than the trainer's while saves are polled: torch
captures CUDA graphs in global mode, in which such a query breaks a capture.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publishing.collectives import Collectives

GARBAGE = 0xEE
HARMLESS = {"view", "unbind", "numel", "__getitem__", "__len__", "__get__"}


class OnDevice(torch.Tensor):
    """A tensor that can be sliced and measured but not read: everything else must be enqueued."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        assert name in HARMLESS, f"{name} of a tensor on the device synchronizes it"
        return super().__torch_function__(function, types, args, kwargs)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as an ordinary tensor, for the device's own thread."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class LateDevice:
    """See the module; also what `Collectives._transport` returns, once one was made."""

    def __init__(self) -> None:
        self.made: list[int] = []  # bytes of each allocation on it
        self.hangs = False
        self._group = dist.new_group(backend="gloo")
        self._changed = threading.Condition()
        # Work, each with the number of the poll that enqueued it.
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self.arriving: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # copies to the host, done and not yet seen
        self.polls, self._polling = 0, False
        self.error: BaseException | None = None
        self._redirect()
        threading.Thread(target=self._run, daemon=True).start()

    def _redirect(self) -> None:
        Collectives._transport = classmethod(lambda cls: self)  # type: ignore[assignment,method-assign]
        dist.all_reduce = self._enqueued(dist.all_reduce)
        poll = Publication.poll

        def polled(publication: Publication) -> Outcome:
            self._switch(polling=True)
            try:
                return poll(publication)
            finally:
                self._switch(polling=False)

        Publication.poll = polled  # type: ignore[method-assign]

    def _switch(self, polling: bool) -> None:
        with self._changed:
            self.polls += polling
            self._polling = polling
            self._changed.notify_all()

    def _enqueued(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *others: Any, **how: Any) -> Any:
            if not isinstance(tensor, OnDevice):
                return collective(tensor, *others, **how)
            inside = [[plain(t) for t in other] if isinstance(other, list) else other for other in others]
            inside = [plain(other) if isinstance(other, OnDevice) else other for other in inside]
            return self.enqueue(lambda: collective(plain(tensor), *inside, **how, group=self._group))

        return call

    # -- the transport ----------------------------------------------------------------------------------

    def empty(self, count: int) -> torch.Tensor:
        self.made.append(count)
        return torch.full((count,), GARBAGE, dtype=torch.uint8).as_subclass(OnDevice)

    def pinned(self, count: int) -> torch.Tensor:
        return torch.full((count,), GARBAGE, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert isinstance(target, OnDevice) != isinstance(source, OnDevice)

        def to_host() -> None:
            self.arriving.append((target, plain(source).clone()))
            target.fill_(GARBAGE)

        there = isinstance(target, OnDevice)
        self.enqueue((lambda: plain(target).copy_(source)) if there else to_host)

    def clear(self, target: torch.Tensor) -> None:
        self.enqueue(lambda: plain(target).zero_())

    def event(self) -> "LateEvent":
        return LateEvent(self)

    # -- the device -------------------------------------------------------------------------------------

    def enqueue(self, work: Callable[[], Any]) -> None:
        with self._changed:
            self._queue.append((self.polls, work))
            self._changed.notify_all()

    def _may_begin(self) -> bool:
        return (
            bool(self._queue) and not self.hangs and not (self._polling and self._queue[0][0] == self.polls)
        )

    def _run(self) -> None:
        while self.error is None:
            with self._changed:
                self._changed.wait_for(self._may_begin)
                work = self._queue.popleft()[1]
            try:
                work()
            except BaseException as error:
                self.error = error


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device, self._poll, self._recorded = device, -1, False
        self._over = threading.Event()
        self._seen: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def record(self) -> None:
        self._poll, self._over = self._device.polls, threading.Event()
        over = self._over

        def reach() -> None:
            self._seen, self._device.arriving = self._device.arriving, []
            over.set()

        self._device.enqueue(reach)

    def synchronize(self) -> None:
        in_its_poll = self._device._polling and self._poll == self._device.polls
        assert not in_its_poll, "a poll waits for what it enqueued itself"
        while not self.is_over():
            assert self._device.error is None, self._device.error

    def is_over(self) -> bool:
        on_trainer = threading.current_thread() is threading.main_thread()
        assert on_trainer or self._device.hangs, "a graph that the trainer captures is broken"
        over = self._over.wait(0.01)
        if over:
            seen, self._seen = self._seen, ()
            for target, data in seen:
                target.copy_(data)
        return over
