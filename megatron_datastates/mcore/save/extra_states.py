"""Extra states of modules in a sharded state dict: values that `get_extra_state` makes for every save."""

from __future__ import annotations

import copy
import dataclasses
import io
import weakref
from collections.abc import Callable, Iterator
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

from megatron_datastates.mcore.save.survey import UnprovableError

_EXTRA = "_extra_state"


_TENSORS = (ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject)


@dataclasses.dataclass(slots=True)
class ExtraState:
    """One module's extra state."""

    name: str
    template: ShardedObject  # without its value
    value_of: Callable[[], Any]  # makes the value
    key: str  # under which it is stored
    is_stored: bool  # by this rank


def extra_states(chunk: Any, state: dict[str, Any]) -> list[ExtraState]:
    """Returns the objects in a model's sharded state dict.

    Raises:
        UnprovableError: there is something that is neither a tensor nor a module's extra state.
    """
    modules = dict(chunk.named_modules())
    found = []
    for key, item in state.items():
        if isinstance(item, ShardedObject):
            module = modules.get(key.removesuffix(_EXTRA).removesuffix("."))
            if not key.endswith(_EXTRA) or module is None or not _is_equal(item.data, module.get_extra_state):
                raise UnprovableError(f"the object {key!r} of the model is not a module's extra state")
            template = copy.copy(item)
            template.data = None
            value_of = _value_of(weakref.ref(module))
            is_stored = is_main_replica(item.replica_id)
            found.append(ExtraState(key, template, value_of, item.unique_key, is_stored))
        elif not all(isinstance(leaf, _TENSORS) for leaf in _leaves(item)):
            raise UnprovableError(f"{key!r} of the model is neither a tensor nor a sharded object")
    return found


def _leaves(item: Any) -> Iterator[Any]:
    return iter(nested_values(item)) if isinstance(item, dict | list) else iter([item])


def _value_of(reference: weakref.ref[Any]) -> Callable[[], Any]:
    """Returns a function that calls a module's `get_extra_state`, whichever it has by then."""

    def value() -> Any:
        module = reference()
        if module is None:
            raise UnprovableError("a module is gone")
        return module.get_extra_state()

    return value


def _is_equal(value: Any, make: Callable[[], Any]) -> bool:
    """Returns whether `make` makes an equal extra state: nothing, bytes or a tensor."""
    other = make()
    if isinstance(value, io.BytesIO) and isinstance(other, io.BytesIO):
        return value.getvalue() == other.getvalue()
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    return value is None and other is None
