"""Reads pickles of other formats with unpicklers that accept a fixed list of names.

A pickle is a program: it may call and change what it names. So every name is looked up here, and one that is
not on a list is refused before anything is imported. The unpicklers return substitutes for the named objects,
and these cannot be changed: a class without __setstate__ would take attributes from a pickle, for the whole
process. Nothing here imports torch, so that `datastates ls` starts at once; tensor_records.py does.
"""

from __future__ import annotations

import collections
import enum
import errno
import functools
import io
import mmap
import pickle
import pickletools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from megatron_datastates.errors import EngineError, FormatError, UnsafeObjectError, is_lack_of_memory
from megatron_datastates.files import METADATA_BYTES, open_regular, size_of
from megatron_datastates.format.values import DTYPES

# Objects of these modules are accepted and ignored.
_UNREAD = ("megatron.", "nvidia_resiliency_ext.", "torch.distributed.checkpoint.")
# Attributes of an object. A class of DCP has few; a pickle may set the same ones in any number of objects.
_MOST_FIELDS = 64
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


class Unread:
    """Substitute for objects that Megatron and others add to DCP's metadata; ignores its contents."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def _check_few(state: Any) -> None:
    if not isinstance(state, dict | tuple) or len(state) > _MOST_FIELDS:
        raise UnsafeObjectError("it sets the state of an object to something that is not accepted")


class _Fields:
    """Substitute for a class of DCP. Its attributes come from the pickle and are not checked here."""

    __hash__: Any = None  # as of torch's: a pickle with such a key does not load

    def __setstate__(self, state: Any) -> None:
        _check_few(state)
        self.__dict__.update(state)


class Metadata(_Fields):
    """DCP's metadata of a checkpoint."""

    planner_data: Any = None
    storage_meta: Any = None
    version: Any = None
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

    __hash__ = object.__hash__

    offsets: Any
    sizes: Any


class Properties(_Fields):
    """DCP's properties of a tensor, which are pickled as a tuple."""

    dtype: Any
    others: tuple[Any, ...]  # layout, requires_grad, memory_format, pin_memory; strides

    def __setstate__(self, state: Any) -> None:
        _check_few(state)
        self.dtype, *others = state
        self.others = tuple(others)


class Index(_Fields):
    """Identifies an object by its key, or a fragment by its key and offset."""

    __hash__ = object.__hash__

    fqn: Any
    offset: Any = None


class StorageMeta(_Fields):
    """What the writer of a checkpoint says of itself."""


class StorageInfo(_Fields):
    """The place of an object or fragment."""

    relative_path: Any
    offset: Any
    length: Any
    transform_descriptors: Any = None


class Function:
    """A function that a pickle may call."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise UnsafeObjectError("it would change a function")


class OrderedDictionary(collections.OrderedDict[Any, Any]):
    """Substitute for an OrderedDict; ignores its attributes."""

    def __init__(self) -> None: ...  # no copy of a dictionary

    def __setstate__(self, state: Any) -> None: ...


def same_items(items: Any = ()) -> Any:
    """Returns the items of a collection as they are.

    A pickle may make any number of collections of the same items: copies would take memory out of proportion.
    """
    if not isinstance(items, tuple | list):
        raise UnsafeObjectError("it makes a collection of something that is not accepted")
    return items


class DTypeName:
    """Substitute for a dtype of torch; its text is torch's, such as `torch.bfloat16`."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return f"torch.{self._name}"

    def __setstate__(self, state: Any) -> None:
        raise UnsafeObjectError("it would change a dtype")


class Member:
    """Substitute for a member of an enumeration, or for the one layout that is known."""

    __slots__ = ("of",)

    def __init__(self, of: str) -> None:
        self.of = of

    def __setstate__(self, state: Any) -> None:
        raise UnsafeObjectError("it would change a constant")


def _member(values: frozenset[Any], name: str, value: Any) -> Member:
    if value not in values:
        raise UnsafeObjectError(f"it has {value!r} for {name}, which has no such member")
    return Member(name)


def _strided(name: str) -> Member:
    if name != "torch.strided":
        raise UnsafeObjectError(f"it has a tensor of layout {name}, expected torch.strided")
    return Member("layout")


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch.distributed.checkpoint.metadata", "Metadata"): Metadata,
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): TensorStorage,
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"): BytesStorage,
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"): Chunk,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): Properties,
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): Index,
    ("torch.distributed.checkpoint.metadata", "StorageMeta"): StorageMeta,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    ("collections", "OrderedDict"): OrderedDictionary,
    ("builtins", "set"): Function(same_items),
    ("torch", "Size"): Function(same_items),
    ("torch.serialization", "_get_layout"): Function(_strided),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return Unread
        if module == "torch" and name in DTYPES:
            return DTypeName(name)
        if module.startswith(_UNREAD):
            return Unread
        raise UnsafeObjectError(f"it names {module}.{name}, which is not on the allow list")


class _StrictUnpickler(_MetadataUnpickler):
    """Refuses also what torch does not have, and what it would refuse to make."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch.distributed.checkpoint.") and (module, name) not in _KNOWN:
            import torch.distributed.checkpoint  # which imports its modules; no other is imported here

            found = getattr(sys.modules.get(module), name, None)
            if not isinstance(found, type):
                raise UnsafeObjectError(f"it names {module}.{name}, which torch {torch.__version__} lacks")
            if issubclass(found, enum.Enum):
                return Function(functools.partial(_member, frozenset(one.value for one in found), name))
        return super().find_class(module, name)


def load_metadata(path: Path, *, strict: bool = False) -> Metadata:
    """Loads DCP's `.metadata`. Its values are not checked and may have any type.

    Args:
        strict: refuse what torch would refuse, also in parts that nothing here reads; imports torch.

    Raises:
        OSError: the file cannot be read.
        UnsafeObjectError: it names an object that is not on the allow list.
        FormatError: it is damaged, or is another kind of file.
        EngineError: there is not enough memory.
    """
    with open_regular(path, METADATA_BYTES) as file:
        if size_of(file) == 0:
            raise FormatError(f"{path} is damaged: it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            unpickler = _StrictUnpickler if strict else _MetadataUnpickler
            metadata = load_pickle(unpickler, data, file, str(path))
    if not isinstance(metadata, Metadata) or not all(
        isinstance(part, dict)
        for part in (getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None))
    ):
        raise FormatError(f"{path} is not the metadata of a torch_dist checkpoint")
    return metadata


def load_pickle(
    unpickler: type[pickle.Unpickler], data: bytes | mmap.mmap, file: BinaryIO | io.BytesIO, where: str
) -> Any:
    """Executes a pickle, whose bytes are `data` and also the contents of `file`."""
    try:
        _check_sizes(data)
        return unpickler(file).load()
    except FormatError as error:
        raise type(error)(f"{where} was not read: {error}") from error
    except Exception as error:  # a damaged pickle raises anything
        if is_lack_of_memory(error):
            text = f"{where} was not read: there is not enough memory"
            raise EngineError(text, code=errno.ENOMEM) from error
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
