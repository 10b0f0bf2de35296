"""Python objects: serialized with torch.save, and read back by an unpickler with an allow list.

**What was saved can be loaded**: a save checks what it has serialized as a load would, unless it holds plain
data alone, and fails if a load would refuse it. Plain data of the standard library, numpy and torch is always
accepted. Other classes are accepted if the user trusts them (torch.serialization.add_safe_globals), or trusts
all objects (--datastates-trust-objects on). Then torch.load unpickles them with weights_only=False: *whoever
wrote such a checkpoint can run any code in the program that loads it*.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_datastates.errors import (
    CorruptDataError,
    FormatError,
    UnsafeObjectError,
    UntrustedClassError,
    is_lack_of_memory,
)
from megatron_datastates.format.tail import Kind
from megatron_datastates.providers.base import CopyBudget, EmptyObjects, Mutability, Write
from megatron_datastates.providers.megatron_classes import (
    MEGATRON_CLASSES,
    MegatronClassError,
    import_megatron,
)
from megatron_datastates.providers.members import PICKLE, Member, corrupt_member, find_members
from megatron_datastates.providers.optimizer_classes import OPTIMIZERS
from megatron_datastates.providers.private import NotPlainError, private_copy
from megatron_datastates.providers.rebuilding import ClassPlaceholder, StorageKind, StoragePlaceholder
from megatron_datastates.providers.unpickling import TRUST_ALL, FilledError, PartOfTensorError, Unpickler

logger = logging.getLogger(__name__)
_BUFFER_BYTES = 64 << 10  # a larger write, as of a tensor, passes the buffer by
_NOT_SAVED = "was not saved, as no load would accept it"
REMEDIES = (
    "Store plain data such as a state_dict(), or trust the class (torch.serialization.add_safe_globals) or "
    f"{TRUST_ALL}: docs/options.md#trust-objects"
)


@dataclasses.dataclass(slots=True)  # not frozen: a save makes hundreds, while the trainer waits
class ObjectSource:
    """A Python object, which torch.save serializes.

    Tensors in it are passed on one by one; torch.save holds only the rest, a pickle, as a whole, and the host
    copy of one device tensor at a time.

    Attributes:
        key: name of the object, relative to the provider's name.
        value: plain data of Python, numpy and torch, or of classes that the user trusts.
        mutability: how long `value` stays unchanged.
        named: of a private copy, see private.Copied; None if `value` is none.
    """

    key: str
    value: Any
    mutability: Mutability = Mutability.NOW
    named: frozenset[Any] | None = None

    kind = Kind.OBJECT

    @property
    def constant(self) -> bytes | None:
        """The bytes of [None]; None for other objects."""
        return nothing() if is_nothing(self.value) else None

    def snapshot(self, budget: CopyBudget) -> ObjectSource | None:
        """Returns a copy; None if the object holds something that is not copied, or is too large."""
        try:
            copied = private_copy(self.value, budget)
        except NotPlainError:
            return None
        return ObjectSource(self.key, copied.value, Mutability.NEVER, copied.named)

    def write(self, write: Write) -> bytes | None:
        """Passes on what torch.save writes, and returns its pickle. Raises what torch.save raises.

        Returns None for an object with known bytes, see `constant`.
        """
        if self.constant is not None:
            write(self.constant)
            return None
        with _Sink(write) as sink:  # once it is closed, a buffer that was not flushed writes nothing
            # torch.save makes some forty small writes for each object; the buffer joins them in C.
            buffer = io.BufferedWriter(sink, _BUFFER_BYTES)
            torch.save(self.value, buffer, pickle_module=_RecordingPickle)
            buffer.flush()
        sink.raise_error()
        return _RecordingPickle.take()

    def serialize(self) -> bytes:
        """Returns what torch.save writes. Raises what torch.save raises."""
        buffer = io.BytesIO()
        self.write(buffer.write)
        return buffer.getvalue()


@functools.lru_cache(maxsize=16)
def empty_sources(empty: EmptyObjects) -> tuple[ObjectSource, ...]:
    """Returns objects without a value one by one; the same sources at every save."""
    return tuple(ObjectSource(key, [None], Mutability.NEVER) for key in empty.keys)


def is_nothing(value: Any) -> bool:
    """Returns whether an object is [None]."""
    return type(value) is list and len(value) == 1 and value[0] is None


@functools.cache
def nothing() -> bytes:
    """Returns [None] as torch.save writes it, which takes 0.3 ms."""
    buffer = io.BytesIO()
    torch.save([None], buffer)
    return buffer.getvalue()


class _Sink(io.RawIOBase):
    """The file that torch.save writes. An error is kept until the end: torch's writer must not see it."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._error: BaseException | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._error is None:
            try:
                return self._write(data)
            except BaseException as error:
                self._error = error
        return len(data)

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class _Pickler(pickle.Pickler):
    """A Pickler that notes where the thread's last object was pickled to."""

    last = threading.local()

    def __init__(self, file: io.BytesIO, *args: Any, **kwargs: Any) -> None:
        self.last.file = file
        super().__init__(file, *args, **kwargs)


class _RecordingPickle:
    """The module `pickle` for torch.save, except that what was pickled can be had afterwards."""

    __name__ = pickle.__name__
    Pickler = _Pickler

    @staticmethod
    def take() -> bytes:
        """Returns what this thread has pickled last."""
        file: io.BytesIO = _Pickler.last.__dict__.pop("file")
        return file.getvalue()


def deserialize(data: bytes, key: str, *, trust: bool = False) -> Any:
    """Returns the object that was serialized to `data`.

    Imports Megatron-Core if the object contains one of its classes that are on the allow list.

    Args:
        key: the object's key, for messages.
        trust: unpickle what the allow list refuses by torch.load, which runs any code that the pickle names.

    Raises:
        UnsafeObjectError: `data` names a class that is not accepted, or is not what torch.save writes.
    """
    try:
        return _unpickle_importing(data)
    except UnsafeObjectError as error:
        if not trust:
            raise _refusal(f"object {key!r} was not loaded", error) from error.__cause__
    logger.warning(
        "object %r is unpickled without any check, as --datastates-trust-objects is on: whoever wrote the "
        "checkpoint can run any code in this program",
        key,
    )
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        if is_lack_of_memory(error):
            raise MemoryError(str(error)) from error
        raise UnsafeObjectError(f"object {key!r} was not loaded: {type(error).__name__}: {error}") from error


def deserialize_for_display(data: bytes, key: str, stand_in: Callable[[str], type]) -> Any:
    """Returns the object with `stand_in(name)` instead of each class that the allow list lacks.

    The user's trusted classes are replaced, too: nothing outside the allow list runs.

    Raises:
        UnsafeObjectError: `data` is not what torch.save writes, or does what no stand-in can do.
    """
    try:
        return _unpickle(data, trusted={}, stand_in=stand_in)
    except UnsafeObjectError as error:
        raise _refusal(f"object {key!r} was not loaded", error) from error.__cause__


def check_saved(data: bytes, key: str, *, trust: bool = False) -> None:
    """Checks that a load in this process would accept an object; makes no tensor and runs no code of users.

    Args:
        data: all bytes that torch.save wrote.
        trust: log a warning instead of raising.

    Raises:
        UnsafeObjectError: a load would not accept it.
    """
    _check(lambda: _unpickle(data, dry_run=True), key, _NOT_SAVED, trust)


def check_pickle(data: bytes, key: str, *, named: frozenset[Any] | None = None, trust: bool = False) -> None:
    """Checks an object as `check_saved` does, given only the pickle that `ObjectSource.write` returned.

    Its storages are not looked at: torch.save has just written them.

    Args:
        named: of its source. If loads accept all of that, nothing is looked at: the pickle of Megatron's
            arguments takes the GIL from the trainer for 3 ms.
    """
    global _accepted
    trusted = torch.serialization.get_safe_globals()
    accepted = _accepted if _accepted.trusted == trusted else _Accepted(trusted, frozenset())
    if named is not None and named <= accepted.named:
        return
    if _check(lambda: _execute_pickle(data), key, _NOT_SAVED, trust) and named is not None:
        _accepted = _Accepted(trusted, accepted.named | named)


class _Accepted(NamedTuple):
    """What pickles named that were accepted."""

    trusted: list[Any]  # by the user, at that time
    named: frozenset[Any]


_accepted = _Accepted([], frozenset())  # replaced as a whole, by any thread


def check_stored(data: bytes, key: str, *, trust: bool = False) -> None:
    """Checks a stored object as `check_saved` does, but always accepts Megatron's classes.

    Raises CorruptDataError, whatever `trust` says, if the checksum of a tensor in it differs: torch.load
    compares none.
    """
    if name := corrupt_member(data):
        raise CorruptDataError(
            f"object {key!r} cannot be loaded: the CRC-32 of its {name} differs: it is corrupt"
        )
    execute = functools.partial(_unpickle, data, dry_run=True, stand_in=_megatron_class)
    _check(execute, key, "cannot be loaded", trust)


def _check(execute: Callable[[], object], key: str, refusal: str, trust: bool) -> bool:
    """Returns whether a load would accept it; if not, only with `trust`."""
    try:
        execute()
        return True
    except UnsafeObjectError as error:
        if not trust or (isinstance(error, PartOfTensorError) and refusal == _NOT_SAVED):
            raise _refusal(f"object {key!r} {refusal}", error) from error.__cause__
        logger.warning("object %r can be loaded only with --datastates-trust-objects on: %s", key, error)
        return False


def _megatron_class(name: str) -> ClassPlaceholder:
    if name not in MEGATRON_CLASSES | OPTIMIZERS:
        raise UntrustedClassError(name)
    return ClassPlaceholder()


def _refusal(what: str, error: UnsafeObjectError) -> UnsafeObjectError:
    if isinstance(error, MegatronClassError):
        return UntrustedClassError(f"{what}: {error}")
    if isinstance(error, UntrustedClassError):
        return UntrustedClassError(f"{what}: it contains {error}, which is not trusted. {REMEDIES}")
    advice = "" if isinstance(error, _DamagedError | FilledError | PartOfTensorError) else f". {REMEDIES}"
    return UnsafeObjectError(f"{what}: {error}{advice}")


class _DamagedError(UnsafeObjectError):
    """The bytes are damaged or not an object: no option makes them load."""


class _Archive:
    """A stored object. Its constructor raises FormatError if `data` is not an archive of torch.save."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._members = find_members(io.BytesIO(data))
        self._found: dict[str, torch.UntypedStorage] = {}
        order = self._members.get("byteorder")
        if order is not None and bytes(order.of(data)) != b"little":
            raise FormatError("it was written on a big-endian machine: expected little-endian")

    def execute(self, **how: Any) -> Any:
        """Returns the object or, in a dry run, placeholders. Arguments and errors are Unpickler's."""
        member = self._members[PICKLE]
        member.check(member.of(self._data), PICKLE)
        stream = io.BytesIO(self._data)  # shares the bytes, copies none
        stream.seek(member.offset)
        storages = self._placeholder if how.get("dry_run") else self._storage
        value = Unpickler(stream, storages, **how).load()
        if stream.tell() > member.offset + member.size:
            raise FormatError(f"its {PICKLE} runs past its end")
        torch._utils._validate_loaded_sparse_tensors()
        return value

    def _member(self, kind: StorageKind, name: str, count: int) -> tuple[torch.dtype, Member]:
        dtype, member = kind.dtype or torch.uint8, self._members.get(f"data/{name}")
        if member is None or member.size != count * torch._utils._element_size(dtype):
            raise FormatError(
                f"its storage {name!r} is missing, or its size is not that of {count} elements of {dtype}"
            )
        return dtype, member

    def _placeholder(self, kind: StorageKind, name: str, count: int) -> StoragePlaceholder:
        dtype, member = self._member(kind, name, count)
        return StoragePlaceholder(dtype, member.size)

    def _storage(self, kind: StorageKind, name: str, count: int) -> Any:
        dtype, member = self._member(kind, name, count)
        if name not in self._found:
            view, target = member.of(self._data), torch.empty(member.size, dtype=torch.uint8, device="cpu")
            member.check(view, f"storage {name!r}")
            target.numpy()[:] = np.frombuffer(view, np.uint8)
            self._found[name] = target.untyped_storage()
        return torch.storage.TypedStorage(wrap_storage=self._found[name], dtype=dtype, _internal=True)


def _unpickle(data: bytes, **how: Any) -> Any:
    """Returns the object. Raises UnsafeObjectError for damage of any kind, too."""
    return _guarded(lambda: _Archive(data).execute(**how))


def _unpickle_importing(data: bytes) -> Any:
    try:
        return _unpickle(data)
    except UntrustedClassError as error:
        if not import_megatron(str(error)):
            raise
    return _unpickle(data)


def _execute_pickle(data: bytes) -> None:
    def placeholder(kind: StorageKind, name: str, count: int) -> StoragePlaceholder:
        dtype = kind.dtype or torch.uint8
        return StoragePlaceholder(dtype, count * torch._utils._element_size(dtype))

    _guarded(lambda: Unpickler(io.BytesIO(data), placeholder, dry_run=True).load())
    torch._utils._validate_loaded_sparse_tensors()


def _guarded(load: Callable[[], Any]) -> Any:
    try:
        return load()
    except UnsafeObjectError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        if is_lack_of_memory(error):  # which shows no damage
            raise MemoryError(str(error)) from error
        text = str(error) if isinstance(error, FormatError) else f"{type(error).__name__}: {error}"
        raise _DamagedError(text) from error
