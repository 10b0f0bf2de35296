"""How much a rank stores is estimated by what its optimizers hold once they have stepped."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_datastates.mcore import fences


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets the optimizers of other tests."""
    fences.install()
    monkeypatch.setattr(fences, "_stepped", type(fences._stepped)())
    yield


def stepped(*parameters: torch.Tensor) -> torch.optim.Optimizer:
    """Returns Adam after a step."""
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer = torch.optim.Adam(parameters)
    assert fences.stepped_bytes() == 0, "it has not stepped"
    optimizer.step()
    return optimizer


def test_a_main_parameter_counts_with_its_moments_and_the_weight_of_the_model() -> None:
    optimizer = stepped(torch.nn.Parameter(torch.zeros(1000)))
    step = 4
    assert fences.stepped_bytes() == 1000 * (4 + 4 + 4 + 2) + step
    del optimizer
    assert fences.stepped_bytes() == 0


def test_a_parameter_of_two_bytes_is_the_weight_itself() -> None:
    optimizer = stepped(torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)))
    assert fences.stepped_bytes() == 1000 * (2 + 2 + 2) + 4
    del optimizer


def test_sparse_states_are_left_out() -> None:
    optimizer = stepped(torch.nn.Parameter(torch.zeros(1000)))
    before = fences.stepped_bytes()
    next(iter(optimizer.state.values()))["sparse"] = torch.zeros(5).to_sparse()
    assert fences.stepped_bytes() == before


def test_what_two_optimizers_share_counts_once() -> None:
    weight = torch.nn.Parameter(torch.zeros(1000))
    inner = stepped(weight)
    outer = torch.optim.SGD([weight])
    outer.state = inner.state
    before = fences.stepped_bytes()
    outer.step()
    assert fences.stepped_bytes() == before


def test_threads_that_save_lazily_for_the_first_time_at_once_add_one_fence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added = []

    def register(hook: object) -> None:
        added.append(hook)
        time.sleep(0.1)

    monkeypatch.setattr(fences, "_installed", False)
    monkeypatch.setattr(fences, "_FREEING_METHODS", ())
    monkeypatch.setattr(fences, "register_optimizer_step_pre_hook", register)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: fences.install(), range(2)))
    assert len(added) == 1
