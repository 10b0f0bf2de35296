"""Python objects, serialized with torch.save and read back with weights_only=True."""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import torch

from megatron_datastates.errors import UnsafeObjectError
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.private import NotPlainError, private_copy


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


def deserialize(data: bytes, key: str) -> Any:
    """What `serialize` was given.

    Nothing but plain data and the classes that torch allows is built: a checkpoint cannot run code.

    Raises:
        UnsafeObjectError: the bytes name a class that is not allowed, or are no pickle of ours.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        # torch wraps the unpickler's own words in advice to load the file without weights_only.
        reason = error.__context__ if isinstance(error, pickle.UnpicklingError) else error
        raise UnsafeObjectError(
            f"object {key!r} was not loaded: {reason or error}\n(only plain data and classes on torch's list "
            "of safe globals are loaded; torch.serialization.add_safe_globals adds one that you trust)"
        ) from error
