"""Reads and writes `data.pkl` of an archive of torch.save that holds one tensor."""

from __future__ import annotations

import collections
import dataclasses
import io
import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from megatron_datastates.convert.sources.pickles import Function, OrderedDictionary, Unread, load_pickle
from megatron_datastates.errors import FormatError, UnsafeObjectError
from megatron_datastates.format.values import DTYPES
from megatron_datastates.plan.boxes import contiguous_strides
from megatron_datastates.providers.rebuilding import STORAGES

_VIEWS = {"conj", "neg"}  # kinds of views, as torch.save names them


@dataclasses.dataclass(frozen=True)
class StorageName:
    """A reference of a tensor's pickle to its storage, another member of the archive."""

    dtype: torch.dtype | None  # None: the tensor has it
    name: str


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """A tensor as torch.save describes it."""

    storage: StorageName
    dtype: torch.dtype
    storage_offset: int  # elements, as all below
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_conj: bool = False  # the values are the conjugates of what is stored, as of Tensor.conj
    is_neg: bool = False  # the values are the negatives of what is stored, as of Tensor.conj().imag

    @property
    def flipped(self) -> tuple[int, ...]:
        """Returns the bytes of an element whose first bit is another one in the values: that of a sign.

        Raises:
            FormatError: the dtype has no such values.
        """
        last = self.dtype.itemsize - 1
        if not self.is_conj and not self.is_neg:
            return ()
        if self.dtype.is_complex:
            middle = (last - 1) // 2
            return {(1, 0): (last,), (0, 1): (middle, last), (1, 1): (middle,)}[self.is_conj, self.is_neg]
        if self.is_conj or self.dtype not in (torch.float16, torch.float32, torch.float64):
            raise FormatError(f"its tensor of {self.dtype} is a view of a kind that is not supported")
        return (last,)


def _rebuild_v2(
    storage: StorageName, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, *more: Any
) -> TensorRecord:
    if storage.dtype is None:
        raise FormatError("its tensor is of an old kind, but its storage has no dtype")
    return _rebuild_v3(storage, offset, shape, strides, grad, hooks, storage.dtype, *more)


def _rebuild_v3(
    storage: StorageName, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> TensorRecord:
    view = more[0] if more and more[0] else {}
    if any(more[1:]) or not isinstance(view, dict) or not view.keys() <= _VIEWS:
        raise FormatError(f"its tensor is a view of a kind that is not supported ({more})")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple):  # of which no copy is made
        raise FormatError("its tensor has a shape or strides of an unexpected kind")
    is_conj, is_neg = view.get("conj") is True, view.get("neg") is True
    return TensorRecord(storage, dtype, offset, shape, strides, is_conj, is_neg)


def _parameter(data: TensorRecord, *unread: Any) -> TensorRecord:
    return data


_REBUILD = {
    "_rebuild_tensor_v2": Function(_rebuild_v2),
    "_rebuild_tensor_v3": Function(_rebuild_v3),
    "_rebuild_parameter": Function(_parameter),
}


class _UntypedStorage(Unread):
    """Substitute for a storage whose dtype is that of its tensor."""


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in _REBUILD:
            return _REBUILD[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDictionary
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _UntypedStorage
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and name in DTYPES:
            return getattr(torch, name)
        raise UnsafeObjectError(f"it names {module}.{name}, expected a plain tensor")

    def persistent_load(self, pid: Any) -> StorageName:
        kind, dtype, name, *_ = pid
        if kind != "storage" or not (isinstance(dtype, torch.dtype) or dtype is _UntypedStorage):
            raise FormatError(f"it refers to {pid}, expected a storage")
        return StorageName(dtype if isinstance(dtype, torch.dtype) else None, str(name))


def load_tensor_record(data: bytes, where: str) -> TensorRecord:
    """Loads `data.pkl` of an archive. Raises FormatError if it is not a plain tensor, or is damaged."""
    record = load_pickle(_TensorUnpickler, data, io.BytesIO(data), where)
    if not isinstance(record, TensorRecord) or not isinstance(record.dtype, torch.dtype):
        raise FormatError(f"{where}: it is not a tensor")
    numbers = (record.storage_offset, *record.shape, *record.strides)
    if len(record.shape) != len(record.strides) or not all(
        isinstance(number, int) and 0 <= number < 1 << 62 for number in numbers
    ):
        raise FormatError(
            f"{where}: its tensor has an impossible shape {record.shape}, strides {record.strides} "
            f"or offset {record.storage_offset}"
        )
    return record


class _Storage:
    """A storage in the same archive as the pickle that refers to it."""

    def __init__(self, kind: type[Any], count: int) -> None:
        self.reference = ("storage", kind, "0", "cpu", count)


class _Rebuilt:
    """An object that is pickled as a call of a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.reference if isinstance(value, _Storage) else None


def dump_tensor_record(dtype: str, shape: Sequence[int]) -> bytes:
    """Returns `data.pkl` as torch.save writes it for a contiguous tensor on the host, with storage 0."""
    torch_dtype = getattr(torch, dtype)
    count, strides = math.prod(shape), contiguous_strides(shape)
    hooks: collections.OrderedDict[str, Any] = collections.OrderedDict()
    arguments = (0, tuple(shape), strides, False, hooks)
    name = next((name for name, known in STORAGES.items() if known == torch_dtype), None)
    if name is not None:
        storage = _Storage(getattr(torch, name), count)
        rebuilt = _Rebuilt(torch._utils._rebuild_tensor_v2, (storage, *arguments))
    else:
        storage = _Storage(torch.UntypedStorage, count * torch_dtype.itemsize)
        rebuilt = _Rebuilt(torch._utils._rebuild_tensor_v3, (storage, *arguments, torch_dtype))
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=2).dump(rebuilt)
    return buffer.getvalue()
