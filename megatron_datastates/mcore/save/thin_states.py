"""Optimizers that store states by parameter, without them, while Megatron makes a thin state dict.

Megatron's own code makes all plain values (those of parameter groups, the step, the loss scaler), and what it
does with chains of optimizers. It is asked of a copy of each optimizer in which one small tensor stands in
for all parameters of a group and all states, and another one for main parameters; nothing that is no tensor
depends on how many there are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor

from megatron_datastates.mcore.save.attributes import UnprovableError
from megatron_datastates.mcore.save.survey import has_buckets
from megatron_datastates.mcore.save.thin_groups import makes_groups_as_torch

_STEP = "step"
# What Megatron does not store by parameter: it asks whether a name is in "step", and so are all its parts.
_NOT_STORED = frozenset(_STEP[first:end] for first in range(5) for end in range(first, 5))
_NAME = "stand-in"
_STAND_IN, _MAIN_STAND_IN = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")


@contextlib.contextmanager
def states_left_out(optimizers: Iterable[Any], asked: Callable[[Any], None]) -> Iterator[None]:
    """Leaves tensors out of the sharded state dicts of those that store states by parameter.

    Args:
        asked: called with each of them before Megatron's code makes its state dict. All that this package can
            find out about them has been found out by then.

    Raises:
        UnprovableError: one has values that its state dict would not have.
    """
    found = [one for one in optimizers if not has_buckets(one)]
    thin = [_thin(one) for one in found]
    try:  # from the first one on: an interrupt may come between any two
        for one, its_copy in zip(found, thin, strict=True):
            one.__dict__["sharded_state_dict"] = functools.partial(_sharded_state_dict, one, its_copy, asked)
        yield
    finally:
        for one in found:
            one.__dict__.pop("sharded_state_dict", None)


def _thin(optimizer: Any) -> Any:
    """Returns a copy whose state dict Megatron makes of a stand-in."""
    if not makes_groups_as_torch(optimizer.optimizer):
        raise UnprovableError(f"{type(optimizer.optimizer).__qualname__} may make state dicts of its own")
    thin = copy.copy(optimizer)
    groups = getattr(optimizer, "fp32_from_float16_groups", None)
    thin.optimizer = _Inner(optimizer.optimizer, groups)
    if groups is not None:
        thin.float16_groups = [[_STAND_IN] if group else [] for group in groups]
        thin.fp32_from_float16_groups = [[_MAIN_STAND_IN] if group else [] for group in groups]
    return thin


class _Inner:
    """Stands in for a torch optimizer: each group has one parameter or none, and all have one state.

    Args:
        mains: by group, the main parameters; None if the optimizer has none.
    """

    def __init__(self, inner: Any, mains: list[list[Any]] | None) -> None:
        self._inner = inner
        self._mains = mains
        self._state = {0: {_NAME: _STAND_IN, **_step_of(inner)}} if inner.state else {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups = self._inner.param_groups
        mains = [[]] * len(groups) if self._mains is None else self._mains
        stand_ins = [_MAIN_STAND_IN if main else _STAND_IN for main in mains]
        return [
            group | {"params": group["params"] and [one]}
            for group, one in zip(groups, stand_ins, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        groups = [group | {"params": group["params"] and [0]} for group in self._inner.param_groups]
        return {"state": self._state, "param_groups": groups}


def _step_of(inner: Any) -> dict[str, Any]:
    """Returns the step that all states have; empty if none has one.

    Raises:
        UnprovableError: they differ, or a state has nothing else.
    """
    states = inner.state.values()
    if any(state.keys() <= _NOT_STORED for state in states):
        raise UnprovableError("a parameter has no state")
    steps = [state[_STEP] for state in states if state.get(_STEP) is not None]
    if len({step.item() if isinstance(step, torch.Tensor) else step for step in steps}) > 1:
        raise UnprovableError("the step is not the same for all parameters")
    return {_STEP: steps[0]} if steps else {}


def _sharded_state_dict(
    optimizer: Any, thin: Any, asked: Callable[[Any], None], model_state: Any, *args: Any, **kwargs: Any
) -> Any:
    asked(optimizer)
    state = type(thin).sharded_state_dict(thin, {_NAME: _stand_in_shard()}, *args, **kwargs)
    dict_list_map_inplace(_without_data, state)
    return state


def _without_data(item: Any) -> Any:
    return LocalNonpersistentObject(None) if isinstance(item, ShardedTensor) else item


def _stand_in_shard() -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(_NAME, _STAND_IN)
