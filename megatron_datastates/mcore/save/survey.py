"""What decides a sharded state dict: the modules, tensors and buckets of a model and its optimizer.

A survey proves that all of it is what it was: the same objects in the same places, with the same shapes,
strides, dtypes and devices. Addresses may differ. It knows the classes of Megatron, torch and Transformer
Engine; a class of anybody else that has its own say in a sharded state dict cannot be proved.

Holds tensors and modules weakly: what a program frees between saves is freed. Loops run in C where there is
an element for each tensor; the trainer waits for them in every save.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, call, contains, is_
from typing import Any

import torch

from megatron_datastates.engine.exchange import describe
from megatron_datastates.pipeline.plans import Words

_TRUSTED = ("megatron.", "torch.", "transformer_engine.")  # beginnings of the names of modules
_DECIDING = ("sharded_state_dict", "state_dict", "_save_to_state_dict")
_BUCKETING = (
    "sharded_param_state_dp_reshardable",
    "get_parameter_state_dp_reshardable",
    "_get_main_param_and_optimizer_states",
)
_OURS = "megatron_datastates."
_members = attrgetter("_parameters", "_buffers", "_modules")
_not_stored = attrgetter("_non_persistent_buffers_set")
_hooks = attrgetter("_state_dict_hooks", "_state_dict_pre_hooks")
_is_trained = attrgetter("requires_grad")
_facts = attrgetter("dtype", "shape", "device", "layout")


class UnprovableError(Exception):
    """What was prepared for one save cannot be proved to hold for another; the text says why."""


@dataclasses.dataclass
class _Look:
    """What a survey finds at one time."""

    objects: list[Any]  # compared by identity
    values: list[Any]  # compared by equality


class Survey:
    """What a model and an optimizer consisted of when this was made.

    Raises:
        UnprovableError: one of their classes is unknown.
    """

    def __init__(self, model: Sequence[Any], optimizer: Any) -> None:
        modules = list(chain.from_iterable(chunk.modules() for chunk in model))
        self._classes = {cls: _deciding(cls) for cls in set(map(type, modules))}
        for cls, functions in self._classes.items():
            _require_trusted(cls, functions)
        for module in modules:
            _require_trusted(type(module), [vars(module).get(name) for name in _DECIDING])
            for hook in chain.from_iterable(hooks.values() for hooks in _hooks(module)):
                _require_trusted(type(module), [hook])
        self._modules = list(map(_reference, modules))
        self._optimizers = [weakref.ref(one) for one in distributed_optimizers(optimizer)]
        look = self._look()
        self._objects = list(map(_reference, look.objects))
        self._values = look.values
        places = {id(item): at for at, item in enumerate(look.objects) if isinstance(item, torch.Tensor)}
        self._tensors = list(places.values())  # positions in `objects`, each tensor once
        tensors = [look.objects[at] for at in self._tensors]
        # Of each tensor by its id, which means something only as long as the tensors exist: in this save.
        self.numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self._described, _ = _describe(tensors)

    def inner_optimizers(self) -> set[int]:
        """Returns the ids of the torch optimizers whose state was surveyed."""
        return {id(one.optimizer) for one in (ref() for ref in self._optimizers) if one is not None}

    def tensors_if_unchanged(self, optimizer: Any) -> list[torch.Tensor]:
        """Returns all tensors, by their numbers.

        Raises:
            UnprovableError: something has changed.
        """
        surveyed = [ref() for ref in self._optimizers]
        found = distributed_optimizers(optimizer)
        if len(found) != len(surveyed) or not all(map(is_, found, surveyed)):
            raise UnprovableError("an optimizer was added, removed or replaced")
        look = self._look()
        if len(look.objects) != len(self._objects) or look.values != self._values:
            raise UnprovableError("modules, buffers, parameter groups or buckets were added or removed")
        if not all(map(is_, look.objects, map(call, self._objects))):
            raise UnprovableError("a tensor, a module or a bucket was replaced")
        if any(_deciding(cls) != functions for cls, functions in self._classes.items()):
            raise UnprovableError("a method that makes state dicts was replaced")
        tensors = [look.objects[at] for at in self._tensors]
        if any(map(torch.Tensor.is_neg, tensors)) or any(map(torch.Tensor.is_conj, tensors)):
            raise UnprovableError("a tensor has become a negated or conjugated view")
        self.addresses_if_unchanged(tensors)
        return tensors

    def addresses_if_unchanged(self, tensors: list[torch.Tensor]) -> Words | None:
        """Returns the addresses that tensors have now, if torch has a fast way to them.

        Args:
            tensors: what `tensors_if_unchanged` has returned.

        Raises:
            UnprovableError: one of them has changed.
        """
        described, addresses = _describe(tensors)
        if described != self._described:
            raise UnprovableError("a tensor has another shape, dtype, device or memory layout")
        return addresses

    def _look(self) -> _Look:
        modules, optimizers = [ref() for ref in self._modules], [ref() for ref in self._optimizers]
        if None in modules or None in optimizers:
            raise UnprovableError("a module or an optimizer is gone")
        look = _Look([], [])
        _add_modules(look, modules)
        for optimizer in optimizers:
            _add_optimizer(look, optimizer)
        # A reference to what is gone returns None, too.
        look.values.append(list(map(is_, look.objects, repeat(None))))
        return look


def distributed_optimizers(optimizer: Any) -> list[Any]:
    """Returns the distributed optimizers of a chain, or the only one, without those that have no parameters.

    Raises:
        UnprovableError: there are others.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    chained = optimizer.chained_optimizers if type(optimizer) is ChainedOptimizer else [optimizer]
    for one in chained:
        if type(one) is not DistributedOptimizer:
            raise UnprovableError(f"the optimizer is a {type(one).__qualname__}, not a DistributedOptimizer")
    _require_trusted(DistributedOptimizer, [getattr(DistributedOptimizer, name) for name in _BUCKETING])
    return [one for one in chained if not getattr(one, "is_stub_optimizer", False)]


def _add_modules(look: _Look, modules: list[Any]) -> None:
    members = list(chain.from_iterable(map(_members, modules)))
    look.objects.extend(map(type, modules))
    look.objects.extend(chain.from_iterable(map(dict.values, members)))
    hooks = list(chain.from_iterable(map(_hooks, modules)))
    look.objects.extend(chain.from_iterable(map(dict.values, hooks)))
    own = list(map(vars, modules))
    look.values += [
        list(chain.from_iterable(members)),
        list(map(len, members)),
        list(map(frozenset, map(_not_stored, modules))),
        list(map(len, hooks)),
        [any(map(contains, own, repeat(name))) for name in _DECIDING],
    ]


def _add_optimizer(look: _Look, optimizer: Any) -> None:
    inner = optimizer.optimizer
    groups = [group["params"] for group in inner.param_groups]
    params = list(chain.from_iterable(groups))
    states = [inner.state.get(param) or {} for param in params]
    ranges = [
        (param, bounds["gbuf_local"])
        for by_dtype in optimizer.gbuf_ranges
        for buckets in by_dtype.values()
        for bucket in buckets
        for param, bounds in bucket["param_map"].items()
    ]
    buckets = [bucket for buffer in optimizer.buffers for bucket in buffer.buckets]
    look.objects += [inner, *optimizer.buffers, *buckets, *params]
    look.objects.extend(chain.from_iterable(ranges))
    held = chain.from_iterable(map(dict.items, states))
    look.objects.extend(
        value for name, value in held if name != "step" and isinstance(value, torch.Tensor)
    )  # a step is a value, which the optimizer's own state dict has
    look.values += [
        list(map(len, groups)),
        list(map(tuple, states)),
        list(optimizer.model_param_group_index_map.values()),
        [(bucket.grad_data.numel(), getattr(bucket, "numel_unpadded", None)) for bucket in buckets],
        [optimizer.data_parallel_group_idx, getattr(optimizer, "distributed_optimizer_instance_id", 0)],
        id(optimizer.data_parallel_group),
    ]


def _describe(tensors: list[torch.Tensor]) -> tuple[Any, Words | None]:
    """Returns a value that is equal for tensors of equal shapes, strides, dtypes, devices and so on.

    Returns their addresses, too, if torch has a fast way to them.
    """
    trained = list(map(_is_trained, tensors))
    seen = describe(tensors)
    if seen is not None:
        return (seen.description, trained), seen.addresses
    strides = [tensor.stride() if tensor.layout is torch.strided else None for tensor in tensors]
    return (list(map(_facts, tensors)), strides, trained), None


def _deciding(cls: type) -> list[Any]:
    return [getattr(cls, name, None) for name in _DECIDING]


def _require_trusted(cls: type, functions: Iterable[Any]) -> None:
    for function in functions:
        for part in _unwrapped(function):
            home = _home(part)
            if not home.startswith(_TRUSTED):
                name = getattr(part, "__qualname__", repr(part))
                raise UnprovableError(f"{home}.{name} has a say in the state dict of {cls.__qualname__}")


def _unwrapped(function: Any) -> Iterator[Any]:
    """Yields a function and what it wraps, as far as `functools.wraps` has noted it, without our hooks."""
    while function is not None:
        if not _home(function).startswith(_OURS):
            yield function
        function = getattr(function, "__wrapped__", None)


def _home(function: Any) -> str:
    """Returns the module that a function was written in: `functools.wraps` copies `__module__` only."""
    home = getattr(function, "__globals__", {}).get("__name__")
    return home or getattr(function, "__module__", None) or ""


def _reference(item: Any) -> Callable[[], Any]:
    """Returns a weak reference; for None, a function that returns it."""
    return _none if item is None else weakref.ref(item)


def _none() -> None:
    return None
