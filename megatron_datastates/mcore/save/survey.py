"""What decides a sharded state dict: the modules, tensors and buckets of a model and its optimizer.

A survey proves that all of it is what it was: the same objects in the same places, with the same shapes,
strides, dtypes and devices, and plain attributes of modules with the same values. Addresses may differ. It
knows the classes of Megatron, torch and Transformer Engine; nothing can be proved of a class from elsewhere
that makes or changes a sharded state dict.

Holds tensors and modules weakly: what a program frees between saves is freed. Loops run in C where there is
an element for each tensor; the trainer waits for them in every save.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import FrameType
from typing import Any, NamedTuple

import torch

from megatron_datastates.engine import native
from megatron_datastates.engine.exchange import Described, Facts, describe, located
from megatron_datastates.mcore.save.attributes import Owners, UnprovableError, config_of, with_configs
from megatron_datastates.pipeline.saving.plans import has_unresolved_views
from megatron_datastates.providers.tensors import is_frozen

_TRUSTED = ("megatron.", "torch.", "transformer_engine.")  # beginnings of the names of modules
_CALLERS = ("megatron.core.", "megatron.training.", "torch.", "megatron_datastates.")  # that move no tensor
_DECIDING = ("sharded_state_dict", "state_dict", "_save_to_state_dict")
MAKER = "get_extra_state"  # called in every save, unless it is known to return None
_OF_OPTIMIZERS = ("sharded_state_dict", "state_dict")
_BUCKETING = (
    *_OF_OPTIMIZERS,
    "sharded_param_state_dp_reshardable",
    "get_parameter_state_dp_reshardable",
    "_get_main_param_and_optimizer_states",
)
_GROUPS = ("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups")
_BUCKET_SIZES = ("per_bucket_numel", "per_bucket_numel_unpadded")  # stored beside the buckets
_OURS = "megatron_datastates."
_SAVING = ("megatron.training.checkpointing", "save_checkpoint")  # makes state dicts, and saves them
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
# What is compared of each module, besides plain attributes (attributes.py).
_MEMBERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS)
_hooks = attrgetter(*_HOOKS)
_attributes = attrgetter("dtype", "shape", "device", "layout")


class Found(NamedTuple):
    """The tensors of a model and an optimizer, by their numbers."""

    tensors: list[torch.Tensor]
    described: Described | None  # if torch has a fast way to that


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
            _require_none_of_its_own(module, _DECIDING)
            for hook in chain.from_iterable(hooks.values() for hooks in _hooks(module)):
                _refuse(type(module), _untrusted_code_in(hook))
        parameters = chain.from_iterable(chunk.parameters() for chunk in model)
        if any(getattr(one, "is_gtp_weight_remat", False) for one in parameters):
            raise UnprovableError("state dicts gather parameters over ranks (GTP), so all make them or none")
        self._optimizers = [weakref.ref(one) for one in optimizers_in(optimizer)]
        self._chain = _chain_in(optimizer)
        opaque, by_class = _never_stored(modules), dict[type, list[Any]]()
        for module in modules:
            by_class.setdefault(type(module), []).append(module)
        self._owners = [
            Owners(some, None, members=_MEMBERS, own=[*_DECIDING, MAKER], opaque=opaque)
            for some in by_class.values()
        ]
        if configured := with_configs(modules):
            self._owners.append(Owners(configured, config_of, with_none=True))
        self._of_optimizers = native.Structure([], self._containers(), attributes=[], own=[], opaque=["step"])
        tensors = self._choose_tensors()
        # Of each tensor by its id, which means something only as long as the tensors exist: in this save.
        self.numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        # It decides only whether a tensor goes to the file of stable ones, and is checked of the few frozen
        # parameters alone. One frozen later joins them at the next full save.
        self._pick_frozen = items_at([at for at, one in enumerate(tensors) if is_frozen(one)])
        described = describe(tensors)
        self._facts = described.facts if described is not None else _slow_facts(tensors)
        self._addresses = described.addresses if described is not None else None  # at the last look
        self._types = list(map(type, tensors))

    def inner_optimizers(self) -> set[int]:
        """Returns the ids of the torch optimizers whose state was surveyed."""
        return {id(one.optimizer) for one in (ref() for ref in self._optimizers) if one is not None}

    def tensors_if_unchanged(self, optimizer: Any) -> Found:
        """Returns all tensors.

        Raises:
            UnprovableError: something has changed.
        """
        surveyed = [ref() for ref in self._optimizers]
        found = optimizers_in(optimizer)
        is_same = len(found) == len(surveyed) and all(map(is_, found, surveyed))
        if not is_same or _chain_in(optimizer) != self._chain:
            raise UnprovableError("an optimizer was added, removed or replaced")
        tensors = list(chain.from_iterable(self._leaves()))
        if any(_deciding(cls) != functions for cls, functions in self._classes.items()):
            raise UnprovableError("a method that makes state dicts was replaced")
        if not all(map(is_frozen, self._pick_frozen(tensors))):
            raise UnprovableError("a frozen parameter's requires_grad has changed")
        return self._described(tensors)

    def found_again(self, found: Found) -> Found:
        """Returns the tensors that `tensors_if_unchanged` has returned, and where they are now.

        Raises:
            UnprovableError: one of them has changed.
        """
        return self._described(found.tensors)

    def _choose_tensors(self) -> list[torch.Tensor]:
        """Returns the tensors, each once, and lets `_leaves` return only those."""
        tensors: dict[int, torch.Tensor] = {}
        choices = [owners.choose for owners in self._owners] + [self._of_optimizers.choose]
        for choose, leaves in zip(choices, self._leaves(), strict=True):
            chosen = []
            for at, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor) and id(leaf) not in tensors:
                    tensors[id(leaf)] = leaf
                    chosen.append(at)
            choose(chosen)
        return list(tensors.values())

    def _described(self, tensors: list[torch.Tensor]) -> Found:
        described = None
        if self._addresses is not None:
            described = located(tensors, self._types, self._facts, self._addresses)
        if described is None:
            described = describe(tensors)
            self._require_facts(tensors, described.facts if described is not None else None)
        if described is not None:
            self._addresses = described.addresses
        return Found(tensors, described)

    def _require_facts(self, tensors: list[torch.Tensor], facts: Facts | None) -> None:
        if list(map(type, tensors)) != self._types:
            raise UnprovableError("the class of a tensor has changed")
        if (facts or _slow_facts(tensors)) != self._facts:
            raise UnprovableError("a tensor has another shape, dtype, device or memory layout")
        if has_unresolved_views(tensors, facts):
            raise UnprovableError("a tensor has become a negated or conjugated view")

    def _containers(self) -> list[Any]:
        """Returns the containers of the optimizers. Raises UnprovableError if one of these is gone."""
        optimizers = [ref() for ref in self._optimizers]
        if None in optimizers:
            raise UnprovableError("an optimizer is gone")
        return list(map(_containers, optimizers))

    def _leaves(self) -> list[list[Any]]:
        """Returns the tensors that modules hold, and those that only optimizers hold.

        Raises:
            UnprovableError: what they hold is not what it was.
        """
        found = [owners.leaves() for owners in self._owners]
        of_optimizers = self._of_optimizers.leaves([], self._containers())
        if of_optimizers is None:
            raise UnprovableError("parameter groups, states or buckets of an optimizer are others")
        return [*found, of_optimizers]


def require_known_maker() -> None:
    """Checks that Megatron makes the state dict, and that no other code changes it.

    Raises:
        UnprovableError: a program has wrapped or replaced Megatron's function.
    """
    from megatron.training import checkpointing

    for module in code_of(checkpointing.generate_state_dict):
        if not module.startswith(_TRUSTED):
            raise UnprovableError(f"{module} has wrapped or replaced Megatron's generate_state_dict")


def is_megatrons_alone() -> bool:
    """Returns whether only Megatron, torch and this package run between `save_checkpoint` and the caller.

    Code of others that has returned by now is not seen: what it moved is stored as it was before.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module == _SAVING[0] and frame.f_code.co_name == _SAVING[1]:
            return True
        if not module.startswith(_CALLERS):
            return False
        frame = frame.f_back
    return False


def items_at(positions: Sequence[int]) -> Callable[[Sequence[Any]], Iterable[Any]]:
    """Returns a fast function that returns the items of a list at these positions."""
    if len(positions) < 2:  # itemgetter would not return a tuple
        return lambda items: [items[at] for at in positions]
    return itemgetter(*positions)


def optimizers_in(optimizer: Any) -> list[Any]:
    """Returns the optimizers of a chain, or the only one, without those that have no parameters.

    Raises:
        UnprovableError: there are others than Megatron's own.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    found = list(_links(optimizer))
    for cls in set(map(type, found)):
        if cls not in (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer):
            raise UnprovableError(f"the optimizer is a {cls.__qualname__}, which is not one of Megatron's")
        names = _BUCKETING if cls is DistributedOptimizer else _OF_OPTIMIZERS
        _require_trusted(cls, [getattr(cls, name) for name in names])
    for one in found:
        _require_none_of_its_own(one, _BUCKETING if has_buckets(one) else _OF_OPTIMIZERS)
    return [one for one in found if not getattr(one, "is_stub_optimizer", False)]


def _links(optimizer: Any) -> Iterable[Any]:
    """Returns the optimizers of a chain, of whose links some may be chains, or this one."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    cls = type(optimizer)
    if cls is not ChainedOptimizer and cls is not LayerWiseDistributedOptimizer:
        return [optimizer]
    for one in {cls, ChainedOptimizer}:
        _require_trusted(one, [getattr(one, name) for name in _OF_OPTIMIZERS])
    _require_none_of_its_own(optimizer, _OF_OPTIMIZERS)
    return chain.from_iterable(map(_links, optimizer.chained_optimizers))


def _chain_in(optimizer: Any) -> Any:
    """Returns a value that is equal for chains of equal links, without what keeps them alive."""
    links = getattr(optimizer, "chained_optimizers", None)
    return id(optimizer) if links is None else [type(optimizer), *map(_chain_in, links)]


def has_buckets(optimizer: Any) -> bool:
    """Returns whether this is a distributed optimizer; the others store states by parameter."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return type(optimizer) is DistributedOptimizer


def gathers(optimizer: Any) -> bool:
    """Returns whether an optimizer's state dict is made by collective calls, that of a load or of any save.

    Layer-wise optimizers look for the values of parameter groups that are empty on some ranks.
    """
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    links = getattr(optimizer, "chained_optimizers", ())
    return isinstance(optimizer, LayerWiseDistributedOptimizer) or any(map(gathers, links))


def _require_none_of_its_own(owner: Any, methods: Iterable[str]) -> None:
    for name in methods:
        if name in vars(owner):
            kind = type(owner).__qualname__
            raise UnprovableError(f"one {kind} has its own {name}, which may change the state dict")


def _never_stored(modules: list[Any]) -> list[str]:
    """Returns names of buffers that are not persistent, such as counters that are replaced in each step.

    A name that means anything else in one of the modules is none of these. One that a state dict has after
    all is not among the surveyed tensors: such a save is not prepared.
    """
    stored, dropped = set[str](), set[str]()
    for module in modules:
        own = module._non_persistent_buffers_set
        dropped.update(own)
        stored.update(module._parameters, module._modules, module._buffers.keys() - own)
    return sorted(dropped - stored)


def _containers(optimizer: Any) -> list[Any]:
    """Returns what decides how an optimizer's state is stored; a step there is a plain value."""
    inner = optimizer.optimizer
    held = [inner, [group["params"] for group in inner.param_groups], inner.state]
    if not has_buckets(optimizer):
        return [*held, *(getattr(optimizer, name, None) for name in _GROUPS)]
    buckets = [list(buffer.buckets) for buffer in optimizer.buffers]
    return [
        *held,
        optimizer.gbuf_ranges,
        optimizer.model_param_group_index_map,
        list(optimizer.buffers),
        buckets,
        list(map(_sizes, chain.from_iterable(buckets))),
        [getattr(optimizer, name, None) for name in _BUCKET_SIZES],
        [optimizer.data_parallel_group_idx, getattr(optimizer, "distributed_optimizer_instance_id", 0)],
        id(optimizer.data_parallel_group),
    ]


def _sizes(bucket: Any) -> tuple[Any, ...]:
    return bucket.grad_data.numel(), getattr(bucket, "numel_unpadded", None)


def _slow_facts(tensors: list[torch.Tensor]) -> Any:
    """Returns a value that is equal for tensors of equal shapes, strides, dtypes, devices and so on."""
    strides = [tensor.stride() if tensor.layout is torch.strided else None for tensor in tensors]
    return list(map(_attributes, tensors)), strides


def _deciding(cls: type) -> list[Any]:
    return [getattr(cls, name, None) for name in _DECIDING]


def _require_trusted(cls: type, functions: Iterable[Any]) -> None:
    _refuse(cls, next(filter(None, map(_untrusted_code_in_method, functions)), None))


def _refuse(cls: type, untrusted: str | None) -> None:
    if untrusted is not None:
        raise UnprovableError(f"{untrusted} may change the state dict of {cls.__qualname__}")


def _untrusted_code_in(function: Any) -> str | None:
    """Returns the name of a function of others that this is, or wraps; None if there is none."""
    for part in _unwrapped(function):
        module = _defining_module(part)
        if not module.startswith(_TRUSTED):
            return f"{module}.{getattr(part, '__qualname__', repr(part))}"
    return None


# Cached for methods of classes: a replaced one is another function. Not for hooks, which may hold modules.
_untrusted_code_in_method = functools.cache(_untrusted_code_in)


@functools.cache
def code_of(function: Any) -> tuple[str, ...]:
    """Returns the names of the modules that a function, and what it wraps, were written in."""
    return tuple([_defining_module(part) for part in _unwrapped(function)])


def _unwrapped(function: Any) -> Iterator[Any]:
    """Yields a function and what it wraps, as far as `functools.wraps` has noted it, without our hooks."""
    while function is not None:
        if not _defining_module(function).startswith(_OURS):
            yield function
        function = getattr(function, "__wrapped__", None)


def _defining_module(function: Any) -> str:
    """Returns the module that a function was written in: `functools.wraps` copies `__module__` only."""
    module = getattr(function, "__globals__", {}).get("__name__")
    return module or getattr(function, "__module__", None) or ""
