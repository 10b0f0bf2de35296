"""Reads pickles of other formats with unpicklers that accept a fixed list of names.

A pickle is a program: it may call and change what it names. So every name is looked up here, and one that is
not on a list is refused before anything is imported. The unpicklers return substitutes for the named objects,
and these cannot be changed: a class without __setstate__ would take attributes from a pickle, for the whole
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

# Objects of these modules are accepted and ignored.
_UNREAD = ("megatron.", "nvidia_resiliency_ext.", "torch.distributed.checkpoint.")
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


class _Unread:
    """Substitute for objects that Megatron and others add to DCP's metadata; ignores its contents."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Fields:
    """Substitute for a class of DCP. Its attributes come from the pickle and are not checked here."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


class Metadata(_Fields):
    """DCP's metadata of a checkpoint."""

    state_dict_metadata: dict[Any, Any]  # TensorStorage or BytesStorage by key
    storage_data: dict[Any, Any]  # StorageInfo by Index


class TensorStorage(_Fields):
    """DCP's metadata of a tensor."""

    properties: Properties
    size: Any
    chunks: Any  # a list of Chunk


class BytesStorage(_Fields):
    """DCP's metadata of an object."""


class Chunk(_Fields):
    """One of a tensor's fragments."""

    offsets: Any
    sizes: Any


class Properties(_Fields):
    """DCP's properties of a tensor, which are pickled as a tuple."""

    dtype: Any

    def __setstate__(self, state: Any) -> None:
        self.dtype, *_ = state


class Index(_Fields):
    """Identifies an object by its key, or a fragment by its key and offset."""

    fqn: Any
    offset: Any = None


class StorageInfo(_Fields):
    """The place of an object or fragment."""

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
    """A function that a pickle may call."""

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
        raise UnsafeObjectError(f"it names {module}.{name}, which is not on the allow list")


def _strided(name: str) -> torch.layout:
    if name != "torch.strided":
        raise UnsafeObjectError(f"it has a tensor of layout {name}, expected torch.strided")
    return torch.strided


def load_metadata(path: Path) -> Metadata:
    """Loads DCP's `.metadata`. Its values are not checked and may have any type.

    Raises:
        OSError: the file cannot be read.
        UnsafeObjectError: it names an object that is not on the allow list.
        FormatError: it is damaged, or is another kind of file.
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


def _rebuild_v2(
    storage: StorageName, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, *more: Any
) -> TensorRecord:
    if storage.dtype is None:
        raise FormatError("its tensor is of an old kind, but its storage has no dtype")
    return _rebuild_v3(storage, offset, shape, strides, grad, hooks, storage.dtype, *more)


def _rebuild_v3(
    storage: StorageName, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> TensorRecord:
    if any(more):
        raise FormatError(f"its tensor is a view of a kind that is not supported ({more})")
    return TensorRecord(storage, dtype, offset, tuple(shape), tuple(strides))


def _parameter(data: TensorRecord, *unread: Any) -> TensorRecord:
    return data


_REBUILD = {
    "_rebuild_tensor_v2": _Function(_rebuild_v2),
    "_rebuild_tensor_v3": _Function(_rebuild_v3),
    "_rebuild_parameter": _Function(_parameter),
}


class _UntypedStorage(_Unread):
    """Substitute for a storage whose dtype is that of its tensor."""


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
        raise UnsafeObjectError(f"it names {module}.{name}, expected a plain tensor")

    def persistent_load(self, pid: Any) -> StorageName:
        kind, dtype, name, *_ = pid
        if kind != "storage" or not (isinstance(dtype, torch.dtype) or dtype is _UntypedStorage):
            raise FormatError(f"it refers to {pid}, expected a storage")
        return StorageName(dtype if isinstance(dtype, torch.dtype) else None, str(name))


def load_tensor_record(data: bytes, where: str) -> TensorRecord:
    """Loads `data.pkl` of an archive. Raises FormatError if it is not a plain tensor, or is damaged."""
    found = _load(_TensorUnpickler, data, io.BytesIO(data), where)
    if not isinstance(found, TensorRecord) or not isinstance(found.dtype, torch.dtype):
        raise FormatError(f"{where}: it is not a tensor")
    numbers = (found.storage_offset, *found.shape, *found.strides)
    if len(found.shape) != len(found.strides) or not all(
        isinstance(number, int) and 0 <= number < 1 << 62 for number in numbers
    ):
        raise FormatError(
            f"{where}: its tensor has an impossible shape {found.shape}, strides {found.strides} "
            f"or offset {found.storage_offset}"
        )
    return found


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
    """Executes a pickle, whose bytes are `data` and also the contents of `file`."""
    try:
        _check_sizes(data)
        return unpickler(file).load()
    except FormatError as error:
        raise type(error)(f"{where} was not read: {error}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise FormatError(f"{where} is damaged: {type(error).__name__}: {error}") from error


# Bytes of each opcode's argument according to pickletools; negative if the argument has its own length.
_ARGUMENTS = {ord(op.code): op.arg.n if op.arg is not None else 0 for op in pickletools.opcodes}
_COUNTED = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_TWO_LINES = {pickle.GLOBAL[0], pickle.INST[0]}


def _check_sizes(data: bytes | mmap.mmap) -> None:
    """Checks the lengths in a pickle's opcodes, before an unpickler allocates memory for them.

    Raises:
        UnpicklingError: a length exceeds the pickle, or a memo index its number of bytes so far.
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
        raise pickle.UnpicklingError("it is truncated, or an opcode has a length beyond its end")


def _check_number(number: int, at: int, size: int, code: int) -> None:
    most = size - at if code == pickle.FRAME[0] else at  # at most one memo entry per byte so far
    if not 0 <= number <= most:
        raise pickle.UnpicklingError(
            f"byte {at} has the length or memo index {number}, expected at most {most}"
        )
