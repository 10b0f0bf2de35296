"""Private copies of plain data, which are serialized later while the owner changes the original.

The trainer waits for the copy, which takes a tenth of the time of serializing.
"""

from __future__ import annotations

import argparse
import collections
import enum
import io
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from megatron_datastates.providers.base import CopyBudget


class NotPlainError(Exception):
    """The data holds something that is not copied here."""


class Copied(NamedTuple):
    """A private copy, and what a check of what it is serialized to depends on."""

    value: Any
    # Classes, and enumerations with names of members: both are stored by name. All else is plain: a load
    # always accepts it. None: it may refuse something, such as an array or a key of nested tuples.
    named: frozenset[Any] | None


# These cannot be changed.
_UNCHANGING = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_NAMES = {str}


# The copies made so far, by the address of the original. (A plain dictionary, as hundreds of objects each
# need one.) No object lies at the following.
_Memo = dict[int, Any]
_LEFT = 0  # the number of bytes that may still be copied
_NAMED = -1  # Copied.named, as a set; not there before the first one
_UNKNOWN = -2  # there if that becomes None


def _take(memo: _Memo, size: int) -> None:
    """Raises NotPlainError if no `size` bytes are left."""
    memo[_LEFT] -= size
    if memo[_LEFT] < 0:
        raise NotPlainError(f"{size} bytes, more than may be copied")


def private_copy(value: Any, budget: CopyBudget) -> Copied:
    """Returns a copy that shares nothing mutable with `value` and serializes to an equal object.

    An object that `value` refers to twice is copied once, and the copy refers to it twice.

    Args:
        budget: what arrays, tensors and buffers are counted against.

    Raises:
        NotPlainError: `value` holds something other than plain containers, scalars, arrays and host tensors,
            or more bytes than the budget has left.
    """
    memo: _Memo = {_LEFT: budget.left}
    try:
        copied = _copy(value, memo)
    except RecursionError:
        raise NotPlainError("it is nested too deeply") from None
    budget.left = memo[_LEFT]
    return Copied(copied, None if _UNKNOWN in memo else frozenset(memo.get(_NAMED, ())))


def _copy(value: Any, memo: _Memo) -> Any:
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    copy = _COPIES.get(kind)
    if copy is None:
        if isinstance(value, enum.Flag | np.generic):
            memo[_UNKNOWN] = True
            return _copy_row(value) if isinstance(value, np.void) else value
        if kind is type or isinstance(value, enum.Enum):
            # A member by its name, as it may have no hash.
            memo.setdefault(_NAMED, set()).add(value if kind is type else (kind, value._name_))
            return value
        raise NotPlainError(f"a {kind.__qualname__}")
    # The memo is by address: `value` and all in it stay alive while the caller holds it.
    if id(value) in memo:
        return memo[id(value)]
    return copy(value, memo)


def _copy_list(value: list[Any], memo: _Memo) -> list[Any]:
    copied = memo[id(value)] = value.copy()
    if not _UNCHANGING.issuperset(map(type, value)):
        copied[:] = [item if type(item) in _UNCHANGING else _copy(item, memo) for item in value]
    return copied


def _copy_tuple(value: tuple[Any, ...], memo: _Memo) -> tuple[Any, ...]:
    if _UNCHANGING.issuperset(map(type, value)):  # as the 625 numbers of Python's RNG
        return value
    copied = tuple([item if type(item) in _UNCHANGING else _copy(item, memo) for item in value])
    if id(value) not in memo:  # else an item that refers back to the tuple has copied it
        memo[id(value)] = copied
    return cast(tuple[Any, ...], memo[id(value)])


def _copy_set(value: set[Any], memo: _Memo) -> set[Any]:
    _note_keys(value, memo)
    memo[id(value)] = copied = {_copy(item, memo) for item in value}
    return copied


def _note_keys(keys: Iterable[Any], memo: _Memo) -> bool:
    """Returns whether no key can be changed. Of others, a load accepts some: tuples that are not too deep."""
    are_unchanging = _UNCHANGING.issuperset(map(type, keys))
    if not are_unchanging:
        memo[_UNKNOWN] = True
    return are_unchanging


def _copy_dictionary(value: dict[Any, Any], memo: _Memo) -> dict[Any, Any]:
    copied = memo[id(value)] = type(value)()
    if _note_keys(value, memo):  # then nearly all is copied in C
        copied.update(value)
        for key in [key for key, item in value.items() if type(item) not in _UNCHANGING]:
            copied[key] = _copy(value[key], memo)
    else:
        for key, item in value.items():
            copied[_copy(key, memo)] = _copy(item, memo)
    return copied


def _copy_ordered(value: dict[Any, Any], memo: _Memo) -> dict[Any, Any]:
    copied = _copy_dictionary(value, memo)
    if value.__dict__:  # as a module's state dict has
        _copy_attributes(value, copied, memo)
    return copied


def _copy_namespace(value: argparse.Namespace, memo: _Memo) -> argparse.Namespace:
    copied = memo[id(value)] = argparse.Namespace()
    _copy_attributes(value, copied, memo)
    return copied


def _copy_attributes(value: Any, copied: Any, memo: _Memo) -> None:
    if not _NAMES.issuperset(map(type, value.__dict__)):
        memo[_UNKNOWN] = True  # of attributes, a load accepts text as names alone
    copied.__dict__.update(_copy_dictionary(value.__dict__, memo))


def _copy_bytearray(value: bytearray, memo: _Memo) -> bytearray:
    _take(memo, len(value))
    memo[id(value)] = copied = bytearray(value)
    return copied


def _copy_buffer(value: io.BytesIO, memo: _Memo) -> io.BytesIO:
    if value.closed or value.__dict__:
        raise NotPlainError("a closed BytesIO, or one with attributes")
    _take(memo, value.getbuffer().nbytes)
    memo[id(value)] = copied = io.BytesIO(value.getvalue())
    copied.seek(value.tell())
    return copied


def _copy_array(value: np.ndarray, memo: _Memo) -> np.ndarray:
    if value.dtype.hasobject:
        raise NotPlainError("an array of objects")
    _take(memo, value.nbytes)
    memo[_UNKNOWN] = True
    memo[id(value)] = copied = value.copy(order="K")
    return copied


def _copy_row(value: np.void) -> np.void:
    """Returns a copy of one row of a structured array, which may be a view of the array."""
    if value.dtype.hasobject:
        raise NotPlainError("a row of objects")
    return value.copy()


def _copy_tensor(value: torch.Tensor, memo: _Memo) -> torch.Tensor:
    if value.is_cuda or value.requires_grad or value.layout is not torch.strided or value.__dict__:
        raise NotPlainError("a tensor that is not plain host memory")
    # torch.save keeps memory that two tensors share shared; separate copies would not share it.
    address = value.untyped_storage().data_ptr()
    if address:  # else it is empty
        if address in memo:
            raise NotPlainError("two tensors that share memory")
        memo[address] = None  # cannot be the id of an object: none lies in a storage
    _take(memo, value.nbytes)
    memo[_UNKNOWN] = True
    memo[id(value)] = copied = value.clone()
    return copied


_COPIES: dict[type, Callable[[Any, _Memo], Any]] = {
    list: _copy_list,
    tuple: _copy_tuple,
    set: _copy_set,
    dict: _copy_dictionary,
    collections.OrderedDict: _copy_ordered,
    argparse.Namespace: _copy_namespace,
    bytearray: _copy_bytearray,
    io.BytesIO: _copy_buffer,
    np.ndarray: _copy_array,
    torch.Tensor: _copy_tensor,
}
