"""Pickles of other formats, read by unpicklers that know a list of names and build nothing else.

A pickle is a program: what it names, it may call and change. So every name is looked up here, and what is not
on a list is refused by its name before anything of it is imported. What is handed out stands in for what is
named, and cannot be changed: a class without __setstate__ takes attributes from a pickle, for the whole
process.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import math
import mmap
import pickle
import pickletools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.serialization
from torch.distributed.checkpoint import filesystem, metadata

from megatron_datastates.errors import FormatError, UnsafeObjectError
from megatron_datastates.files import METADATA_BYTES, open_regular, size_of
from megatron_datastates.format.values import DTYPES
from megatron_datastates.plan.boxes import contiguous_strides
from megatron_datastates.providers.rebuilding import STORAGES

# What they add is not looked at, whatever they call it.
_UNREAD = ("megatron.", "nvidia_resiliency_ext.", "torch.distributed.checkpoint.")
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


class _Unread:
    """Stands for what Megatron and others add to DCP's metadata: none of it is looked at."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Fields:
    """Stands for a class of DCP's: of what a pickle says of an instance, what is read here; unchecked."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


class Metadata(_Fields):
    """Of a checkpoint."""

    state_dict_metadata: dict[Any, Any]  # of TensorStorage and BytesStorage
    storage_data: dict[Any, Any]  # StorageInfo by Index


class TensorStorage(_Fields):
    """Of a tensor."""

    properties: Properties
    size: Any
    chunks: Any  # of Chunk


class BytesStorage(_Fields):
    """Of an object."""


class Chunk(_Fields):
    """One of a tensor's fragments."""

    offsets: Any
    sizes: Any


class Properties(_Fields):
    """Of a tensor; pickled as a tuple."""

    dtype: Any

    def __setstate__(self, state: Any) -> None:
        self.dtype, *_ = state


class Index(_Fields):
    """Names an object, or a fragment by its offset."""

    fqn: Any
    offset: Any = None


class StorageInfo(_Fields):
    """Where one lies."""

    relative_path: Any
    offset: Any
    length: Any
    transform_descriptors: Any = None


_METADATA = {
    (metadata.__name__, "Metadata"): Metadata,
    (metadata.__name__, "TensorStorageMetadata"): TensorStorage,
    (metadata.__name__, "BytesStorageMetadata"): BytesStorage,
    (metadata.__name__, "ChunkStorageMetadata"): Chunk,
    (metadata.__name__, "TensorProperties"): Properties,
    (metadata.__name__, "MetadataIndex"): Index,
    (filesystem.__name__, "_StorageInfo"): StorageInfo,
}


class _Function:
    """What a pickle may call."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise UnsafeObjectError("it would change a function")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA:
            return _METADATA[module, name]
        if (module, name) in (("collections", "OrderedDict"), ("builtins", "set")):
            return collections.OrderedDict if name == "OrderedDict" else set
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _Unread
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _Function(_strided)
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and name in DTYPES:
            return getattr(torch, name)
        if module.startswith(_UNREAD):
            return _Unread
        raise UnsafeObjectError(f"it names {module}.{name}, which is not read")


def _strided(name: str) -> torch.layout:
    if name != "torch.strided":
        raise UnsafeObjectError(f"it holds a tensor of layout {name}: only strided tensors are read")
    return torch.strided


def load_metadata(path: Path) -> Metadata:
    """DCP's `.metadata`; what is in it may be of any type.

    Raises:
        OSError: it cannot be read.
        FormatError: it is damaged, or no such file. UnsafeObjectError: it names what is not on the list.
    """
    with open_regular(path, METADATA_BYTES) as file:
        if size_of(file) == 0:
            raise FormatError(f"{path} is damaged: it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _load(_MetadataUnpickler, data, file, str(path))
    if not isinstance(found, Metadata) or not all(
        isinstance(part, dict)
        for part in (getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None))
    ):
        raise FormatError(f"{path} is not the metadata of a torch_dist checkpoint")
    return found


@dataclasses.dataclass(frozen=True)
class StorageName:
    """What a pickle of torch.save says of a storage, which lies beside it in the archive."""

    dtype: torch.dtype | None  # None: its tensor says
    name: str


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """What torch.save says of a tensor."""

    storage: StorageName
    dtype: torch.dtype
    storage_offset: int  # elements, as all below
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_v2(
    storage: StorageName, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, *more: Any
) -> TensorRecord:
    if storage.dtype is None:
        raise FormatError("a storage has no dtype")
    return _rebuild_v3(storage, offset, shape, strides, grad, hooks, storage.dtype, *more)


def _rebuild_v3(
    storage: StorageName, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> TensorRecord:
    if any(more):
        raise FormatError(f"its tensor is a view of a kind that is not read: {more}")
    return TensorRecord(storage, dtype, offset, tuple(shape), tuple(strides))


def _parameter(data: TensorRecord, *unread: Any) -> TensorRecord:
    return data


_REBUILD = {
    "_rebuild_tensor_v2": _Function(_rebuild_v2),
    "_rebuild_tensor_v3": _Function(_rebuild_v3),
    "_rebuild_parameter": _Function(_parameter),
}


class _UntypedStorage(_Unread):
    """As a name: its tensor says of which dtype it is."""


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in _REBUILD:
            return _REBUILD[name]
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _UntypedStorage
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and name in DTYPES:
            return getattr(torch, name)
        raise UnsafeObjectError(f"it names {module}.{name}, and is to be a plain tensor")

    def persistent_load(self, pid: Any) -> StorageName:
        kind, dtype, name, *_ = pid
        if kind != "storage" or not (isinstance(dtype, torch.dtype) or dtype is _UntypedStorage):
            raise FormatError(f"it refers to {pid}")
        return StorageName(dtype if isinstance(dtype, torch.dtype) else None, str(name))


def load_tensor_record(data: bytes, where: str) -> TensorRecord:
    """`data.pkl` of an archive. Raises FormatError."""
    found = _load(_TensorUnpickler, data, io.BytesIO(data), where)
    if not isinstance(found, TensorRecord) or not isinstance(found.dtype, torch.dtype):
        raise FormatError(f"{where}: it is no tensor")
    numbers = (found.storage_offset, *found.shape, *found.strides)
    if len(found.shape) != len(found.strides) or not all(
        isinstance(number, int) and 0 <= number < 1 << 62 for number in numbers
    ):
        raise FormatError(f"{where}: its tensor has shape {found.shape} and strides {found.strides}")
    return found


class _Storage:
    """A storage beside the pickle that refers to it."""

    def __init__(self, kind: type[Any], count: int) -> None:
        self.reference = ("storage", kind, "0", "cpu", count)


class _Rebuilt:
    """Pickled as a call of one of torch's functions."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.reference if isinstance(value, _Storage) else None


def dump_tensor_record(dtype: str, shape: Sequence[int]) -> bytes:
    """`data.pkl` of a contiguous tensor on the host, whose storage is named 0: as torch.save writes it."""
    found = getattr(torch, dtype)
    count, strides = math.prod(shape), contiguous_strides(shape)
    hooks: collections.OrderedDict[str, Any] = collections.OrderedDict()
    arguments = (0, tuple(shape), strides, False, hooks)
    name = next((name for name, known in STORAGES.items() if known == found), None)
    if name is not None:
        storage = _Storage(getattr(torch, name), count)
        rebuilt = _Rebuilt(torch._utils._rebuild_tensor_v2, (storage, *arguments))
    else:
        storage = _Storage(torch.UntypedStorage, count * found.itemsize)
        rebuilt = _Rebuilt(torch._utils._rebuild_tensor_v3, (storage, *arguments, found))
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=2).dump(rebuilt)
    return buffer.getvalue()


def _load(
    unpickler: type[pickle.Unpickler], data: bytes | mmap.mmap, file: BinaryIO | io.BytesIO, where: str
) -> Any:
    """Executes the pickle that is in `data`, and in `file`."""
    try:
        _check_sizes(data)
        return unpickler(file).load()
    except FormatError as error:
        raise type(error)(f"{where} was not read: {error}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise FormatError(f"{where} is damaged: {type(error).__name__}: {error}") from error


# How long the argument of each opcode is, as pickletools has it: bytes, or less than 0 for one that says so.
_ARGUMENTS = {ord(op.code): op.arg.n if op.arg is not None else 0 for op in pickletools.opcodes}
_COUNTED = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_TWO_LINES = {pickle.GLOBAL[0], pickle.INST[0]}


def _check_sizes(data: bytes | mmap.mmap) -> None:
    """Walks over the opcodes of a pickle, before an unpickler takes memory for what they announce.

    Raises:
        UnpicklingError: one announces more bytes than there are, or a place in the memo that is too far.
    """
    at, size = 0, len(data)
    arguments, stop = _ARGUMENTS, pickle.STOP[0]
    while at < size:
        code = data[at]
        length = arguments.get(code)
        at += 1
        if length is None:
            raise pickle.UnpicklingError(f"it has an unknown opcode at byte {at - 1}")
        if length >= 0:
            if code == pickle.LONG_BINPUT[0] or code == pickle.FRAME[0]:
                _check_number(int.from_bytes(data[at : at + length], "little"), at, size, code)
            at += length
        elif length == pickletools.UP_TO_NEWLINE:
            begin = at
            for _ in range(2 if code in _TWO_LINES else 1):
                at = data.find(b"\n", at) + 1
                if at == 0:
                    raise pickle.UnpicklingError("it ends within a line")
            if code == pickle.PUT[0]:
                _check_number(int(data[begin : at - 1]), at, size, code)
        else:
            digits = _COUNTED[length]
            at += digits + int.from_bytes(data[at : at + digits], "little")
        if code == stop:
            break
    if at > size:
        raise pickle.UnpicklingError("it announces more bytes than there are")


def _check_number(number: int, at: int, size: int, code: int) -> None:
    most = size - at if code == pickle.FRAME[0] else at  # a place for each byte so far
    if not 0 <= number <= most:
        raise pickle.UnpicklingError(f"it announces {number} where {most} is the most")
