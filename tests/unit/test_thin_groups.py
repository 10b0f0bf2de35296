"""Parameter groups without states: what Megatron stores of them is what it stores of a whole state dict."""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_datastates.mcore.save import thin_groups
from megatron_datastates.mcore.save.thin_groups import groups_alone


class Own(torch.optim.Adam):
    """A program's own, which may add to its state dict."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)


def distributed(inner: torch.optim.Optimizer) -> Any:
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.optimizer, optimizer.grad_scaler = inner, SimpleNamespace(state_dict=lambda: {"scale": 2.0})
    optimizer.is_stub_optimizer = False
    return optimizer


def trained(cls: type[torch.optim.Adam]) -> torch.optim.Adam:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
    groups = [
        {"params": parameters[:1], "lr": 0.1, "is_expert": True},
        {"params": [], "wd_mult": 0.0},
        {"params": parameters[1:], "betas": (0.5, 0.6)},
    ]
    inner = cls(groups, lr=0.2)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    inner.step()
    for group in inner.param_groups:
        if group["params"]:
            group["step"] = 7
    return inner


def test_megatron_stores_the_same_of_both() -> None:
    inner = trained(torch.optim.Adam)
    optimizer, groups = distributed(inner), copy.deepcopy(inner.state_dict()["param_groups"])
    whole = optimizer.state_dict()
    with groups_alone([optimizer]):
        assert optimizer.state_dict() == whole
        inner.param_groups[0]["lr"] = 0.3
        assert optimizer.state_dict()["optimizer"]["param_groups"][0]["lr"] == 0.3
    inner.param_groups[0]["lr"] = 0.1
    assert inner.state_dict()["param_groups"] == groups, (
        "it has its own state dict again, and the same groups"
    )
    assert len(inner.state_dict()["state"]) == 4
    assert all("step" in group for group in whole["optimizer"]["param_groups"])


def test_states_are_not_made() -> None:
    inner = trained(torch.optim.Adam)
    with groups_alone([distributed(inner)]):
        assert inner.state_dict()["state"] == {}


def spoil_class(inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inner.__class__ = Own


def add_hook(inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inner.register_state_dict_post_hook(lambda optimizer, state: None)


def set_method(inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inner.state_dict = lambda: torch.optim.Adam.state_dict(inner)


def use_plain_torch(inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", False)


@pytest.mark.parametrize("change", [spoil_class, add_hook, set_method, use_plain_torch])
def test_what_a_program_has_a_say_in_is_asked_for_whole(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = trained(torch.optim.Adam)
    change(inner, monkeypatch)
    with groups_alone([distributed(inner)]):
        assert len(inner.state_dict()["state"]) == 4
    assert len(inner.state_dict()["state"]) == 4


def test_an_interrupt_between_two_optimizers_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    inners = [trained(torch.optim.Adam) for _ in range(2)]
    optimizers = [distributed(inner) for inner in inners]
    calls = iter([False, True])

    def interrupted(*args: Any) -> Any:
        if next(calls):
            raise KeyboardInterrupt
        return functools.partial(*args)

    monkeypatch.setattr(thin_groups, "functools", SimpleNamespace(partial=interrupted))
    with pytest.raises(KeyboardInterrupt), groups_alone(optimizers):
        pytest.fail("the second one was not interrupted")
    assert not any("state_dict" in vars(inner) for inner in inners)


def test_an_error_leaves_nothing_behind() -> None:
    inner = trained(torch.optim.Adam)
    with pytest.raises(KeyError), groups_alone([distributed(inner)]):
        raise KeyError
    assert len(inner.state_dict()["state"]) == 4
