"""Python objects: serialized with torch.save, and read back by a machine with a closed list of names.

**What is saved can be loaded**: a save looks at what it has serialized as a load would, and fails for what no
load would accept. Plain data of the standard library, numpy and torch needs nothing. Classes of others are
loaded if the user vouches for them (torch.serialization.add_safe_globals), or for all objects
(--datastates-trust-objects on), which then are unpickled by torch.load with weights_only=False: *whoever
wrote such a checkpoint can run any code in the program that loads it*.
"""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_datastates.errors import FormatError, UnsafeObjectError, UntrustedClassError
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.members import Member, find_members
from megatron_datastates.providers.private import NotPlainError, private_copy
from megatron_datastates.providers.rebuilding import Named, SeenStorage, StorageKind
from megatron_datastates.providers.unpickling import Unpickler

logger = logging.getLogger(__name__)
_PICKLE = "data.pkl"
WAYS_OUT = (
    "Plain data of Python, numpy and torch is stored and loaded. For anything else: store a state_dict() of "
    "plain data; or vouch for a class by torch.serialization.add_safe_globals([...]), in the programs that "
    "save and load; or vouch for all objects by --datastates-trust-objects on "
    "(MEGATRON_DATASTATES_TRUST_OBJECTS=on), which lets whoever wrote a checkpoint run any code where it is "
    "loaded"
)
# What Megatron vouches for when it is imported (megatron/core/safe_globals.py), as it is to be found in
# checkpoints that a process without Megatron looks at.
_OF_MEGATRON = frozenset(
    {
        "megatron.core.enums.ModelType",
        "megatron.core.optimizer.optimizer_config.OptimizerConfig",
        "megatron.core.rerun_state_machine.RerunDiagnostic",
        "megatron.core.rerun_state_machine.RerunMode",
        "megatron.core.rerun_state_machine.RerunState",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.CudaGraphModule",
        "megatron.core.transformer.enums.CudaGraphScope",
        "megatron.core.transformer.enums.InferenceCudaGraphScope",
        "signal.Signals",
        "torch._C.Generator",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class PickledObject:
    """One object under one key."""

    key: str
    value: Any
    mutability: Mutability

    def secured(self) -> PickledObject | SerializedObject:
        """The object as it is now, whatever its owner does next: copied, or serialized where it cannot be."""
        if self.mutability is Mutability.NEVER:
            return self
        try:
            return PickledObject(self.key, private_copy(self.value), Mutability.NEVER)
        except NotPlainError:
            return SerializedObject(self.key, self.serialize())

    def serialize(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(self.value, buffer)
        return buffer.getvalue()


@dataclasses.dataclass(frozen=True, slots=True)
class SerializedObject:
    """One object that has been serialized."""

    key: str
    data: bytes

    def secured(self) -> SerializedObject:
        return self

    def serialize(self) -> bytes:
        return self.data


def deserialize(data: bytes, key: str, *, trust: bool = False) -> Any:
    """Makes what `serialize` was given.

    Args:
        trust: what is not accepted is unpickled all the same, whatever code that runs.

    Raises:
        UnsafeObjectError: the bytes name a class that is not accepted, or are no pickle of ours.
    """
    try:
        return _executed(data)
    except UnsafeObjectError as error:
        if not trust:
            raise _refusal(f"object {key!r} was not loaded", error) from error
    logger.warning(
        "object %r is unpickled without any check, as --datastates-trust-objects is on: whoever wrote the "
        "checkpoint runs code in this program",
        key,
    )
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        raise UnsafeObjectError(f"object {key!r} was not loaded: {type(error).__name__}: {error}") from error


def deserialize_for_people(data: bytes, key: str, stand_in: Callable[[str], type]) -> Any:
    """Makes it with `stand_in(name)` for each class that is on no list of ours; no class is vouched for."""
    try:
        return _executed(data, trusted={}, stand_in=stand_in)
    except UnsafeObjectError as error:
        raise _refusal(f"object {key!r} was not loaded", error) from error


def check_saved(data: bytes, key: str, *, trust: bool = False) -> None:
    """Looks at an object as a load in this process would; makes no tensor, and runs no code of users.

    Args:
        trust: what is not accepted is warned of, and no error.

    Raises:
        UnsafeObjectError: a load would not accept it.
    """
    _check(data, f"object {key!r} was not saved, as no load would accept it", trust)


def check_stored(data: bytes, key: str, *, trust: bool = False) -> None:
    """Looks at what was stored before, perhaps by a program that has Megatron, likewise."""
    _check(data, f"object {key!r} cannot be loaded", trust, stand_in=_named_by_megatron)


def _check(data: bytes, what: str, trust: bool, **how: Any) -> None:
    try:
        _executed(data, only_looks=True, **how)
    except UnsafeObjectError as error:
        if not trust:
            raise _refusal(what, error) from error
        logger.warning("--datastates-trust-objects is on, so this is no error: %s: %s", what, error)


def _named_by_megatron(name: str) -> Named:
    if name not in _OF_MEGATRON:
        raise UntrustedClassError(name)
    return Named()


def _refusal(what: str, error: UnsafeObjectError) -> UnsafeObjectError:
    if isinstance(error, UntrustedClassError):
        return UntrustedClassError(f"{what}: it holds {error}, which nobody vouches for. {WAYS_OUT}")
    advice = "" if isinstance(error, _DamagedError) else f". {WAYS_OUT}"
    return UnsafeObjectError(f"{what}: {error}{advice}")


class _DamagedError(UnsafeObjectError):
    """No option makes an object of it."""


class _Archive:
    """An object as it is stored. Raises FormatError when it is made: it is no archive of torch.save."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._members = find_members(io.BytesIO(data))
        self._found: dict[str, torch.UntypedStorage] = {}
        order = self._members.get("byteorder")
        if order is not None and bytes(self._view(order)) != b"little":
            raise FormatError("it was written by a machine of another byte order")

    def _view(self, member: Member) -> memoryview:
        return memoryview(self._data)[member.offset : member.offset + member.size]

    def execute(self, **how: Any) -> Any:
        """The object, or what stands for it where the pickle is only looked at (see Unpickler)."""
        member = self._members[_PICKLE]
        member.check(self._view(member), _PICKLE)
        stream = io.BytesIO(self._data)  # shares them
        stream.seek(member.offset)
        storages = self._seen if how.get("only_looks") else self._storage
        value = Unpickler(stream, storages, **how).load()
        if stream.tell() > member.offset + member.size:
            raise FormatError(f"its {_PICKLE} does not end")
        torch._utils._validate_loaded_sparse_tensors()
        return value

    def _member(self, kind: StorageKind, name: str, count: int) -> tuple[torch.dtype, Member]:
        dtype, member = kind.dtype or torch.uint8, self._members.get(f"data/{name}")
        if member is None or member.size != count * torch._utils._element_size(dtype):
            raise FormatError(f"its storage {name!r} is missing, or is not of {count} elements of {dtype}")
        return dtype, member

    def _seen(self, kind: StorageKind, name: str, count: int) -> SeenStorage:
        dtype, member = self._member(kind, name, count)
        return SeenStorage(dtype, member.size)

    def _storage(self, kind: StorageKind, name: str, count: int) -> Any:
        dtype, member = self._member(kind, name, count)
        if name not in self._found:
            view, target = self._view(member), torch.empty(member.size, dtype=torch.uint8)
            member.check(view, f"storage {name!r}")
            target.numpy()[:] = np.frombuffer(view, np.uint8)
            self._found[name] = target.untyped_storage()
        return torch.storage.TypedStorage(wrap_storage=self._found[name], dtype=dtype, _internal=True)


def _executed(data: bytes, **how: Any) -> Any:
    """Raises UnsafeObjectError."""
    try:
        return _Archive(data).execute(**how)
    except UnsafeObjectError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        text = str(error) if isinstance(error, FormatError) else f"{type(error).__name__}: {error}"
        raise _DamagedError(text) from error
