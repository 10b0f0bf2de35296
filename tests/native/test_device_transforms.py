"""Tensors on a device that are cast or compressed: what is read, and after what.

The fake driver stands below the native module, which has no part in this: torch itself copies what is
transformed. Here, tensors on a stand-in for a device are host tensors whose copies to the host are made when
their stream is synchronized, after the events that the code under test makes that stream wait for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.providers import transforms
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider
from megatron_datastates.providers.transforms import Cast, Compressed
from tests.unit.states import new_saver

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)
WRAPPED: dict[str, Callable[[Any], Any]] = {
    "compressed": Compressed,
    "cast": lambda inner: Cast(inner, torch.bfloat16),
    "both": lambda inner: Compressed(Cast(inner, torch.bfloat16)),
}


class Stream:
    """A stream: kernels that a test lets run, and copies, which wait for events.

    Args:
        reached: set by the first copy of any stream once it waits, or is over.
    """

    def __init__(self, reached: threading.Event) -> None:
        self.reached = reached
        self.kernels: list[Callable[[], object]] = []
        self.done = threading.Event()
        self.done.set()
        self.awaited: list[threading.Event] = []
        self.copies: list[Callable[[], object]] = []

    def launch(self, kernel: Callable[[], object]) -> None:
        self.done = threading.Event()
        self.kernels.append(kernel)

    def run(self) -> None:
        for kernel in self.kernels:
            kernel()
        self.done.set()

    def record_event(self) -> threading.Event:
        return self.done

    def wait_event(self, event: threading.Event) -> None:
        self.awaited.append(event)

    def synchronize(self) -> None:
        for event in self.awaited:
            self.reached.set()
            assert event.wait(30), "the event was never reached"
        while self.copies:
            self.copies.pop(0)()
        self.reached.set()


class OnDevice(torch.Tensor):
    """A host tensor that says it is on a device."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: DEVICE)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.Tensor.copy_:
            return super().__torch_function__(function, types, args, kwargs or {})
        target, source = args
        assert kwargs == {"non_blocking": True} and not isinstance(target, OnDevice)
        plain = source.as_subclass(torch.Tensor)
        torch.cuda.current_stream(DEVICE).copies.append(lambda: target.copy_(plain))
        return target


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Makes the stream of all threads that choose no other one: nothing is to be copied on it."""
    reached, chosen, empty = threading.Event(), threading.local(), torch.empty
    trainers = Stream(reached)

    def current_stream(device: torch.device) -> Stream:
        assert device == DEVICE
        return getattr(chosen, "stream", trainers)

    @contextlib.contextmanager
    def stream(one: Stream) -> Iterator[None]:
        chosen.stream = one
        yield
        del chosen.stream

    def make(device: torch.device) -> Stream:
        assert device == DEVICE
        return Stream(reached)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **rest: empty(*args, **rest))
    monkeypatch.setattr(transforms, "_READER", transforms._DeviceReader())
    return trainers


@pytest.fixture
def saver() -> Iterator[Saver]:
    made = new_saver()
    yield made
    made.close()


def values(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(700, 1001, generator=generator)  # of several frames, whose ends are within rows


def stored(tensor: torch.Tensor, how: str) -> torch.Tensor:
    return tensor if how == "compressed" else tensor.to(torch.bfloat16)


@pytest.mark.parametrize("how", list(WRAPPED))
def test_what_a_running_kernel_leaves_is_stored(
    trainers: Stream, saver: Saver, how: str, tmp_path: Path
) -> None:
    tensor, after = values(1).as_subclass(OnDevice), values(2)
    plain = tensor.as_subclass(torch.Tensor)
    trainers.launch(lambda: plain.copy_(after))
    provider = WRAPPED[how](TensorProvider({"w": tensor, "t": tensor.t()}, Mutability.AT_FENCE))
    publication = saver.start(tmp_path / "c", provider)
    assert trainers.reached.wait(30) and publication.save.failure is None
    trainers.run()
    FENCE.wait("a change")
    plain.zero_()  # after the fence nothing reads it
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    assert not trainers.copies and not trainers.awaited, "what the trainer launches would wait for them"
    checkpoint = ds.open(tmp_path / "c")
    assert torch.equal(checkpoint.read_tensor("w"), stored(after, how))
    assert torch.equal(checkpoint.read_tensor("t"), stored(after, how).t())


def test_what_may_change_at_once_is_read_before_the_call_returns(
    trainers: Stream, saver: Saver, tmp_path: Path
) -> None:
    tensor, before = values(1).as_subclass(OnDevice), values(1)
    publication = saver.start(tmp_path / "c", Compressed(TensorProvider({"w": tensor}, Mutability.NOW)))
    tensor.as_subclass(torch.Tensor).zero_()
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    assert torch.equal(ds.open(tmp_path / "c").read_tensor("w"), before)
