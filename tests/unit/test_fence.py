"""The fence: what waits for saves, in which order, and what a late change does to them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.engine.fence import FENCE, Fence
from megatron_datastates.mcore import fences
from megatron_datastates.mcore.save.mutability import proof_in_training_loop
from megatron_datastates.providers.base import Mutability


class Save:
    """Notes what a fence asks of a save that reads one storage."""

    def __init__(self, storage: int = 1) -> None:
        self.storage, self.asked = storage, list[str]()

    def fence(self, reason: str) -> None:
        self.asked.append("fence")

    def mark_torn(self, reason: str) -> None:
        self.asked.append("torn")

    def reads(self, storage: int) -> bool:
        return storage == self.storage

    def await_copies(self) -> None:
        self.asked.append("copies")


@pytest.fixture
def fence(monkeypatch: pytest.MonkeyPatch) -> Fence:
    """Returns the process's fence, without saves of other tests."""
    fences.install()
    monkeypatch.setattr(FENCE, "_standing", [])
    monkeypatch.setattr(FENCE, "readers", [])
    return FENCE


def reading(fence: Fence, storage: int = 1) -> Save:
    save = Save(storage)
    fence.add(save)
    fence.add_reader(save)
    return save


def test_only_what_reads_a_storage_is_waited_for_before_it_is_freed(fence: Fence) -> None:
    one, other = reading(fence, 1), reading(fence, 2)
    fence.wait_until_unread(2)
    assert (one.asked, other.asked) == ([], ["copies"])
    fence.wait_until_unread()
    assert (one.asked, other.asked) == (["copies"], ["copies"] * 2)


def test_an_explicit_fence_waits_until_memory_may_be_freed(fence: Fence) -> None:
    save = reading(fence)
    ds.fence()
    assert save.asked == ["fence", "copies"] and not fence.has_saves


def test_what_has_changed_before_a_fence_fails_every_save(fence: Fence) -> None:
    saves = [reading(fence), reading(fence)]
    fence.witness_mutation("a step without a fence")
    assert [save.asked for save in saves] == [["torn"]] * 2 and not fence.has_saves


def test_a_forked_child_waits_for_no_save_of_its_parent(fence: Fence) -> None:
    save = reading(fence)
    child = os.fork()
    if child == 0:
        os._exit(int(fence.has_saves or bool(fence.readers)))
    assert os.waitpid(child, 0)[1] == 0 and fence.has_saves and save.asked == []


@pytest.mark.parametrize(
    "free",
    [
        lambda storage: storage.resize_(0),
        lambda storage: storage._share_fd_cpu_(),
        lambda storage: storage._share_filename_cpu_(),
    ],
    ids=["resize", "descriptor", "file name"],
)
def test_memory_is_freed_once_no_save_reads_it(fence: Fence, free: Any) -> None:
    storage = torch.zeros(1000).untyped_storage()
    save, other = reading(fence, storage._cdata), reading(fence, 0)
    before = fence.frees or 0
    free(storage)
    assert save.asked == ["copies"] and other.asked == [] and fence.frees == before + 1


def test_memory_is_unmapped_once_no_save_reads_any(fence: Fence) -> None:
    save, seen = reading(fence), list[Any]()
    before = fence.frees or 0
    fences.wrap_unmap(lambda: seen.extend(save.asked))
    assert seen == ["copies"] and fence.frees == before + 1


def test_a_step_changes_nothing_before_the_fence(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    save, seen = reading(fence), list[float]()
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    monkeypatch.setattr(save, "fence", lambda reason: seen.append(float(weight)))
    torch.optim.SGD([weight], lr=0.5).step()
    assert seen == [1.0] and float(weight) == 0.5 and not fence.has_saves


@pytest.mark.parametrize(("is_stub", "has_stepped"), [(False, True), (False, False), (True, True)])
def test_a_step_without_its_optimizers_fence_fails_the_saves(
    fence: Fence, is_stub: bool, has_stepped: bool
) -> None:
    class Optimizer:
        is_stub_optimizer = is_stub

    save = reading(fence)
    fences.wrap_optimizer_step(lambda self: (has_stepped, None, None), Optimizer())
    assert save.asked == ["torn" if has_stepped and not is_stub else "fence"]


def test_only_parameters_and_memory_of_optimizers_that_have_stepped_wait_for_the_fence(fence: Fence) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(4)
    optimizer.step()
    momentum, main = optimizer.state[weight]["momentum_buffer"], torch.ones(4)
    other = torch.optim.SGD([main], lr=0.1)
    main.grad = torch.ones(4)
    freed, buffer = torch.ones(4), torch.ones(4)
    freed.untyped_storage().resize_(0)
    optimizer.state[weight]["freed"] = torch.ones(4)
    optimizer.state[weight]["freed"].untyped_storage().resize_(0)
    classify = proof_in_training_loop()
    lazy = Mutability.AT_FENCE
    assert [classify(one) for one in (weight, weight[1:], momentum)] == [lazy] * 3
    assert [classify(one) for one in (main, buffer, freed)] == [Mutability.NOW] * 3
    other.step()
    assert proof_in_training_loop()(main) is lazy and proof_in_training_loop()(buffer) is Mutability.NOW
