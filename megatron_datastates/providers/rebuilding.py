"""Tensors in stored objects: the functions that their pickles call, with checks of the arguments.

torch's own functions check nothing: a tensor that is larger than its storage makes the storage grow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.serialization

from megatron_datastates.providers.plain import PickleContext, Placeholder, refuse, require

# The typed storages of old torch: torch.save still writes their names for these dtypes.
STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "QInt8Storage": torch.qint8,
    "QInt32Storage": torch.qint32,
    "QUInt8Storage": torch.quint8,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}


@dataclasses.dataclass(frozen=True)
class StorageKind:
    """The dtype of a storage, as a pickle names it."""

    dtype: torch.dtype | None  # None: bytes, whose tensor has a dtype


@dataclasses.dataclass(frozen=True)
class StoragePlaceholder:
    """Stands for a storage in a dry run."""

    dtype: torch.dtype
    bytes: int


class ClassPlaceholder(Placeholder):
    """Stands for a trusted class itself in a dry run."""

    def __call__(self, *arguments: Any) -> Placeholder:
        return Placeholder(arguments)


def _make(context: PickleContext, function: Callable[..., Any], *arguments: Any) -> Any:
    return Placeholder() if context.dry_run else function(*arguments)


def _dtype_and_bytes(storage: Any) -> tuple[torch.dtype, int]:
    if isinstance(storage, StoragePlaceholder):
        return storage.dtype, storage.bytes
    require(isinstance(storage, torch.storage.TypedStorage), "a tensor")
    return storage.dtype, storage._untyped_storage.nbytes()


def _check_reach(storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any) -> int:
    """Returns the bytes of all elements. Raises UnsafeObjectError if one is outside of the storage."""
    found, stored_bytes = _dtype_and_bytes(storage)
    dtype = found if dtype is None else dtype
    require(
        isinstance(dtype, torch.dtype) and isinstance(shape, tuple) and isinstance(strides, tuple), "a tensor"
    )
    require(len(shape) == len(strides), "a tensor")
    require(all(type(n) is int and 0 <= n < 1 << 62 for n in (offset, *shape, *strides)), "a tensor")
    count, reach = 1, 0
    for length, stride in zip(shape, strides, strict=True):
        count *= length
        reach += (length - 1) * stride
    require(count < 1 << 62, "a tensor")
    if count and (offset + reach + 1) * dtype.itemsize > stored_bytes:
        refuse(f"it has a tensor of shape {tuple(shape)} in a storage of only {stored_bytes} bytes")
    return count * int(dtype.itemsize)


def _tensor(context: PickleContext, storage: Any, offset: Any, shape: Any, strides: Any) -> Any:
    _check_reach(storage, None, offset, shape, strides)
    return _make(context, torch._utils._rebuild_tensor, storage, offset, shape, strides)


def _guard_tensor(name: str, *, has_dtype: bool) -> Callable[..., Any]:
    """Returns the guard of a function of torch's; with `has_dtype`, a storage of bytes has elements of it."""

    def make(
        context: PickleContext,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        grad: Any,
        hooks: Any,
        *more: Any,
    ) -> Any:
        _check_reach(storage, more[0] if has_dtype else None, offset, shape, strides)
        require(not hooks and type(grad) is bool, "a tensor")
        arguments = (storage, offset, shape, strides, grad, hooks, *more)
        return _make(context, getattr(torch._utils, name), *arguments)

    return make


def _quantized(
    context: PickleContext,
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    scheme: Any,
    grad: Any,
    hooks: Any,
) -> Any:
    needed = _check_reach(storage, None, offset, shape, strides)
    require(
        not hooks and type(scheme) is tuple and needed <= _dtype_and_bytes(storage)[1], "a quantized tensor"
    )
    context.charge(sum(8 * part.numel() for part in scheme if isinstance(part, torch.Tensor)))  # of channels
    arguments = (storage, offset, shape, strides, scheme, grad, hooks)
    return _make(context, torch._utils._rebuild_qtensor, *arguments)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | Placeholder)


def _sparse(context: PickleContext, layout: Any, parts: Any) -> Any:
    require(type(layout) in (torch.layout, Placeholder) and type(parts) is tuple, "a sparse tensor")
    require(
        all(_is_tensor(part) or type(part) in (torch.Size, tuple, bool) for part in parts), "a sparse tensor"
    )
    devices = [part.device for part in parts if isinstance(part, torch.Tensor)]
    with devices[0] if devices else contextlib.nullcontext():  # else torch makes it on the default device
        return _make(context, torch._utils._rebuild_sparse_tensor, layout, parts)


def _meta(context: PickleContext, *arguments: Any) -> Any:
    return _make(context, torch._utils._rebuild_meta_tensor_no_storage, *arguments)


def _check_attributes(state: Any = None) -> None:
    """Checks the attributes of a tensor or parameter, which torch sets one by one.

    Those that are properties of torch are never in a pickle of torch's. Setting them runs torch's code:
    `real` copies all elements, of which an expanded tensor may have any number.
    """
    for part in state if type(state) is tuple else (state,):
        require(part is None or type(part) is dict, "the attributes of a tensor")
        for name in part or ():
            require(type(name) is str, "the attributes of a tensor")
            found = inspect.getattr_static(torch.Tensor, name, None)
            require(not hasattr(type(found), "__set__"), f"a tensor's attribute {name!r}")


def _parameter(context: PickleContext, data: Any, grad: Any, hooks: Any, *state: Any) -> Any:
    require(_is_tensor(data) and type(grad) is bool and not hooks, "a parameter")
    _check_attributes(*state)
    rebuild: Any = torch._utils._rebuild_parameter_with_state if state else torch._utils._rebuild_parameter
    return _make(context, rebuild, data, grad, hooks, *state)


def _wrapper(context: PickleContext, kind: Any, *arguments: Any) -> Any:
    require(context.is_trusted(kind), "a tensor of a class")
    return _make(context, torch._utils._rebuild_wrapper_subclass, kind, *arguments)


def _from_type(context: PickleContext, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    known = kind is torch.Tensor or kind is torch.nn.Parameter or context.is_trusted(kind)
    require(known and type(arguments) is tuple, "a tensor of a class")
    if not context.is_trusted(kind):
        _check_attributes(state)
    data = context.call(function, arguments)
    require(_is_tensor(data), "a tensor of a class")
    return _make(context, torch._tensor._rebuild_from_type_v2, lambda: data, kind, (), state)


def _size(context: PickleContext, lengths: Any = ()) -> Any:
    require(type(lengths) is tuple and all(type(n) is int for n in lengths), "a torch.Size")
    return torch.Size(lengths)


def _device(context: PickleContext, *arguments: Any) -> Any:
    require(all(type(argument) in (str, int) for argument in arguments), "a torch.device")
    return torch.device(*arguments)


def _layout(context: PickleContext, name: Any = None) -> Any:
    require(type(name) is str, "a layout")
    return torch.serialization._get_layout(name)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _guard_tensor("_rebuild_tensor_v2", has_dtype=False),
    "torch._utils._rebuild_tensor_v3": _guard_tensor("_rebuild_tensor_v3", has_dtype=True),
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.serialization._get_layout": _layout,
}


def _values() -> dict[str, Any]:
    found: dict[str, Any] = {f"torch.{name}": StorageKind(dtype) for name, dtype in STORAGES.items()}
    found |= {"torch.storage.UntypedStorage": StorageKind(None), "torch.UntypedStorage": StorageKind(None)}
    found |= {
        str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype | torch.qscheme)
    }
    found |= {"torch.Tensor": torch.Tensor, "torch.nn.parameter.Parameter": torch.nn.Parameter}
    return found | {"torch.Size": torch.Size, "torch.device": torch.device} | _FUNCTIONS


VALUES: dict[str, Any] = _values()  # module.name -> object
CALLS: dict[int, Callable[..., Any]] = {
    **{id(function): function for function in _FUNCTIONS.values()},
    id(torch.Size): _size,
    id(torch.device): _device,
}
