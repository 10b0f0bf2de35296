"""Extra states of modules in a sharded state dict: values that `get_extra_state` makes for every save."""

from __future__ import annotations

import copy
import dataclasses
import dis
import functools
import io
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

from megatron_datastates.mcore.save.attributes import UnprovableError
from megatron_datastates.mcore.save.survey import MAKER, code_of

_NAME = re.compile(r"(?:(.*)\.)?_extra_state([0-9]*)")
_PICKLING = ("transformer_engine.", "megatron.")  # modules whose extra states are pickles
_SPLIT = "_split_extra_state"  # a method of TEGroupedLinear
# Megatron's FusedMLASelfAttention stores the extra state of its one down projection under the names of two.
_FUSED = re.compile(r"(.*)\blinear_(?:q|kv)_down_proj")
_TENSORS = (ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject)


@dataclasses.dataclass(slots=True)
class ExtraState:
    """One module's extra state."""

    name: str
    template: ShardedObject  # without its value
    value_of: Callable[[], Any]  # makes the value
    keys: frozenset[str]  # under which this rank stores it: one, or none
    is_empty: bool  # it never has a value, whatever its module holds


class ExtraStates:
    """The extra states of a model chunk.

    Args:
        empty: the classes of modules whose extra states are empty, and the code of their methods.
        dropped: modules whose extra states Megatron has made and then not stored, as a new model has the same
            (--ckpt-drop-redundant-extra-state).
    """

    def __init__(
        self,
        found: Sequence[ExtraState],
        empty: dict[type, CodeType],
        dropped: Sequence[weakref.ref[Any]],
    ) -> None:
        self.all = found
        self.others = [one for one in found if not one.is_empty]
        self.empty_keys = frozenset().union(*(one.keys for one in found if one.is_empty))
        self._empty = empty
        self._dropped = dropped

    def require_dropped(self) -> None:
        """Raises UnprovableError if Megatron would now store an extra state that it has not stored."""
        from megatron.training import checkpointing

        is_stored = getattr(checkpointing, "_fp8_extra_state_is_persistent", lambda value: value is not None)
        for module in self._dropped:
            value = _value(module)
            parts = getattr(module(), _SPLIT, lambda whole: [whole])(value)
            if any(map(is_stored, parts)):
                raise UnprovableError("an extra state that was not stored has a value to be stored")

    def are_still_empty(self) -> bool:
        """Returns whether the classes are what they were. A survey shows whether a module's own method is."""
        return all(_empty_code(cls) is code for cls, code in self._empty.items())


def extra_states(chunk: Any, state: dict[str, Any]) -> ExtraStates:
    """Returns the objects in a model's sharded state dict.

    Raises:
        UnprovableError: there is something that is neither a tensor nor a module's extra state.
    """
    modules = dict(chunk.named_modules(remove_duplicate=False))
    values: dict[str, _Values] = {}
    empty: dict[type, CodeType] = {}
    found = []
    dropped: dict[int, weakref.ref[Any]] = {}  # by id of the module
    for key, item in state.items():
        may_be_one = isinstance(item, ShardedObject | LocalNonpersistentObject)
        name = _NAME.fullmatch(key) if may_be_one else None
        module = _module(modules, name[1] or "") if name is not None else None
        if isinstance(item, LocalNonpersistentObject) and module is not None:
            dropped[id(module)] = weakref.ref(module)
        elif isinstance(item, ShardedObject):
            if name is None or module is None or (name[2] and not hasattr(type(module), _SPLIT)):
                raise UnprovableError(f"the object {key!r} of the model is not a module's extra state")
            if hasattr(type(module), _SPLIT):
                its_values = values.setdefault(name[1] or "", _Values(weakref.ref(module)))
                value_of: Callable[[], Any] = functools.partial(its_values.value, int(name[2] or 0))
            else:
                value_of = functools.partial(_value, weakref.ref(module))
            if not _is_equal(item.data, value_of, is_anew=_makes_anew(module)):
                raise UnprovableError(f"the object {key!r} of the model is not what its module makes")
            template = copy.copy(item)
            template.data = None
            keys = frozenset([item.unique_key] if is_main_replica(item.replica_id) else [])
            code = None if MAKER in vars(module) else _empty_code(type(module))
            if code is not None:
                empty[type(module)] = code
            found.append(ExtraState(key, template, value_of, keys, is_empty=code is not None))
        elif not all(isinstance(leaf, _TENSORS) for leaf in _leaves(item)):
            raise UnprovableError(f"{key!r} of the model is neither a tensor nor a sharded object")
    return ExtraStates(found, empty, list(dropped.values()))


def _module(modules: dict[str, Any], name: str) -> Any:
    """Returns the module whose extra state has this name; None if there is none."""
    fused = _FUSED.fullmatch(name) if name not in modules else None
    return modules.get(f"{fused[1]}linear_qkv_down_proj" if fused is not None else name)


def _leaves(item: Any) -> Iterator[Any]:
    return iter(nested_values(item)) if isinstance(item, dict | list) else iter([item])


class _Values:
    """The parts of an extra state of Megatron's TEGroupedLinear, as many as it has matrices.

    It makes all of them at once. They are asked for in their order; those of another save are never returned.
    """

    def __init__(self, module: weakref.ref[Any]) -> None:
        self._module = module
        self._parts: list[Any] = []

    def value(self, number: int) -> Any:
        """Returns a part of the extra state.

        Raises:
            UnprovableError: there is no such part.
        """
        if number == 0 or not self._parts:
            self._parts = self._make()
        if number >= len(self._parts):
            raise UnprovableError("an extra state has fewer parts than it had")
        value = self._parts[number]
        if number == len(self._parts) - 1:
            self._parts = []
        return value

    def _make(self) -> list[Any]:
        made = _value(self._module)
        return list(getattr(self._module(), _SPLIT)(made))


def _value(module: weakref.ref[Any]) -> Any:
    """Returns what a module's `get_extra_state` makes. Raises UnprovableError if the module is gone."""
    found = module()
    if found is None:
        raise UnprovableError("a module is gone")
    return found.get_extra_state()


def _empty_code(cls: type) -> CodeType | None:
    """Returns the code of a class's `get_extra_state` if all that it does is to return None, else None.

    Megatron's layers have such a method, for checkpoints of Transformer Engine's.
    """
    function = getattr(cls, MAKER, None)
    # A class that answers for its attributes itself may answer with another method.
    answers = any("__getattribute__" in vars(base) for base in cls.__mro__[:-1])
    if not isinstance(function, FunctionType) or answers:
        return None
    return function.__code__ if not hasattr(cls, _SPLIT) and _returns_none(function.__code__) else None


@functools.lru_cache(maxsize=64)
def _returns_none(code: CodeType) -> bool:
    return _instructions(code) == _instructions((lambda self: None).__code__)


def _instructions(code: CodeType) -> list[tuple[str, Any]]:
    return [(one.opname, one.argval) for one in dis.get_instructions(code)]


def _makes_anew(module: Any) -> bool:
    """Returns whether a module's extra states of equal values may have other bytes each time.

    Transformer Engine pickles tensors, and torch's pickles of them have addresses.
    """
    makers = code_of(type(module).get_extra_state)
    return MAKER not in vars(module) and all(home.startswith(_PICKLING) for home in makers)


def _is_equal(value: Any, make: Callable[[], Any], *, is_anew: bool) -> bool:
    """Returns whether `make` makes an equal extra state: nothing, bytes or a tensor.

    Args:
        is_anew: any bytes are equal.
    """
    other = make()
    if isinstance(value, io.BytesIO) and isinstance(other, io.BytesIO):
        return is_anew or value.getvalue() == other.getvalue()
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    return value is None and other is None
