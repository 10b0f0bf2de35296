"""Addresses and descriptions of many tensors at once, through DLPack's exchange API where torch offers it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_datastates.engine import native
from megatron_datastates.format.tables import Words

_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # torch 2.10 and newer


class Facts(NamedTuple):
    """What tensors are."""

    description: bytes  # equal if dtypes, devices, shapes and strides are, tensor by tensor
    has_complex: bool
    has_negative: bool  # whether one is a negated view: its bytes in memory are not its values


class Described(NamedTuple):
    """What tensors are, and where. Element i of the array and of the list is about tensor i."""

    facts: Facts
    addresses: Words  # of the first elements
    storages: list[Any]  # which own the memory


def describe(tensors: list[torch.Tensor]) -> Described | None:
    """Describes tensors; returns None if torch has no such API, or it cannot describe one of the tensors."""
    found = _look(tensors, torch.Tensor.untyped_storage)
    return Described(found[1], np.frombuffer(found[0], np.uint64), found[2]) if found is not None else None


def facts_of(tensors: list[torch.Tensor]) -> Facts | None:
    """Returns what tensors are; None as `describe`."""
    found = _look(tensors, None)
    return found[1] if found is not None else None


def located(tensors: list[torch.Tensor], types: list[type], facts: Facts, known: Words) -> Described | None:
    """Describes tensors that have these types and match `facts`; returns None if one may not.

    Faster than `describe`. Of tensors at their `known` addresses, it does not ask whether they are negated.
    """
    if _EXCHANGE is None or facts.has_complex or facts.has_negative:
        return None
    views = (torch.Tensor.is_neg, torch.Tensor.untyped_storage)
    found = native.locate_tensors(_EXCHANGE, tensors, types, facts.description, known.tobytes(), *views)
    return Described(facts, np.frombuffer(found[0], np.uint64), found[1]) if found is not None else None


def measured(storages: list[Any]) -> tuple[Words, Words]:
    """Returns the addresses of untyped storages, and their sizes in bytes."""
    addresses, sizes = native.measure_storages(storages, torch.UntypedStorage.data_ptr)
    return np.frombuffer(addresses, np.uint64), np.frombuffer(sizes, np.uint64)


def _look(tensors: list[torch.Tensor], storage_of: object) -> tuple[bytes, Facts, list[Any]] | None:
    if _EXCHANGE is None:
        return None
    found = native.describe_tensors(_EXCHANGE, tensors, torch.Tensor.is_neg, storage_of)
    return (found[0], Facts(*found[1:4]), found[4]) if found is not None else None
