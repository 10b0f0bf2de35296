"""Modules and configs of a model: what they hold, and their plain attributes.

Megatron's own classes make keys and offsets of attributes that do not change while they train. Those of a
fork may change, such as the places of experts. So the values of all plain attributes are compared: those of
modules, and of what these have as `config`, that are a number, a text, an enum, or a container of at most
_MOST_ITEMS of these and of None. Not _PASSING, and of modules not what is None: those attributes are filled
and emptied in each pass, and whenever one of a compared name is set, all have to be looked at.
"""

from __future__ import annotations

import copy
import enum
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from megatron_datastates.engine import native

_FREQUENT: frozenset[type] = frozenset([bool, int, float, str])
_PLAIN: tuple[type, ...] = (
    *_FREQUENT,
    *(type(None), complex, bytes, range, enum.Enum, np.generic, torch.dtype, torch.device),
)
_MOST_ITEMS = 1000  # every save looks at all
# What every module has (`training`), and what Megatron and Transformer Engine change in each iteration.
_PASSING = frozenset(vars(torch.nn.Module())) | {"is_first_microbatch", "current_microbatch"}


class UnprovableError(Exception):
    """What was prepared for one save cannot be proved to hold for another; the text says why."""


class Owners:
    """Objects of one kind: all modules of a class, or the configs of modules. Holds the modules weakly.

    Args:
        find: returns the object that is meant, given a module; None if the module is.
        members: attributes to compare, besides the plain ones.
        own: methods, which an object may have as attributes of its own.
        opaque: keys of values in `members` that do not matter.
        with_none: also compares attributes that are None.
    """

    def __init__(
        self,
        modules: Sequence[Any],
        find: Callable[[Any], Any] | None,
        *,
        members: Sequence[str] = (),
        own: Sequence[str] = (),
        opaque: Sequence[str] = (),
        with_none: bool = False,
    ) -> None:
        self._modules, self._find = list(map(weakref.ref, modules)), find
        found = self._found()
        self._plain = [_plain_attributes(one, with_none) for one in found]
        names = sorted(set(chain.from_iterable(self._plain)))
        self._structure = native.Structure(
            found, [], attributes=[*members, *names], own=list(own), opaque=list(opaque)
        )

    def choose(self, leaves: list[int]) -> None:
        """Lets `leaves` return only those with these numbers."""
        self._structure.choose(leaves)

    def leaves(self) -> list[Any]:
        """Returns what the objects hold by identity.

        Raises:
            UnprovableError: they do not hold what they did.
        """
        found = self._found()
        leaves = self._structure.leaves(found, [])
        if leaves is None:
            raise UnprovableError(self._change(found))
        return leaves

    def _found(self) -> list[Any]:
        modules = [ref() for ref in self._modules]
        if None in modules:
            raise UnprovableError("a module is gone")
        if self._find is None:
            return modules
        found = list(map(self._find, modules))
        if not all(hasattr(one, "__dict__") for one in found):
            raise UnprovableError("the config of a module is gone")
        return found

    def _change(self, found: list[Any]) -> str:
        """Returns what has changed, for a message. Slow."""
        for one, before in zip(found, self._plain, strict=True):
            for name, value in before.items():
                now = vars(one).get(name, one)
                if now is not value and not (type(now) is type(value) and _is_plain(now) and now == value):
                    return f"the attribute {name} of a {type(one).__qualname__} has changed"
        kind = type(found[0]).__qualname__
        return f"a parameter, buffer, module, hook or attribute of a {kind} was added, removed or replaced"


def config_of(module: Any) -> Any:
    """Returns the config that a module has; None if it has none."""
    return vars(module).get("config")


def with_configs(modules: Sequence[Any]) -> list[Any]:
    """Returns modules that have configs with attributes, one module for each config."""
    found = {id(config_of(one)): one for one in modules if hasattr(config_of(one), "__dict__")}
    return list(found.values())


def _plain_attributes(owner: Any, with_none: bool) -> dict[str, Any]:
    own, found = vars(owner), {}
    for name in own.keys() - _PASSING:
        value = own[name]
        if type(value) in _FREQUENT:
            found[name] = value
        elif (with_none or value is not None) and _is_plain(value):
            found[name] = copy.deepcopy(value)
    return found


def _is_plain(value: Any) -> bool:
    waiting, seen = [value], 0
    while waiting:
        one = waiting.pop()
        items: Sequence[Any] = ()
        if isinstance(one, dict):
            items = [*one, *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            items = list(one)
        elif not isinstance(one, _PLAIN):
            return False
        seen += len(items)
        if seen > _MOST_ITEMS:
            return False
        waiting += items
    return True
