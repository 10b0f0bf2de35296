"""Addresses and descriptions of many tensors at once, through DLPack's exchange API where torch offers it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.engine import native

Words = npt.NDArray[np.uint64]
_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # torch 2.10 and newer


class Facts(NamedTuple):
    """What tensors are."""

    description: bytes  # equal if dtypes, devices, shapes and strides are, tensor by tensor
    has_complex: bool
    has_negative: bool  # whether one is a negated view: its bytes in memory are not its values


class Described(NamedTuple):
    """What tensors are, and where. Element i of arrays and lists is about tensor i."""

    facts: Facts
    addresses: Words  # of the first elements
    storages: list[Any]  # which own the memory
    bases: Words  # addresses of the storages; 0 for one without memory


def describe(tensors: list[torch.Tensor]) -> Described | None:
    """Describes tensors; returns None if torch has no such API, or it cannot describe one of the tensors."""
    if _EXCHANGE is None or (found := native.describe_tensors(_EXCHANGE, tensors, storages=True)) is None:
        return None
    addresses, description, has_complex, has_negative, storages, bases = found
    facts = Facts(description, has_complex, has_negative)
    return Described(facts, np.frombuffer(addresses, np.uint64), storages, np.frombuffer(bases, np.uint64))


def facts_of(tensors: list[torch.Tensor]) -> Facts | None:
    """Returns what tensors are; None as `describe`."""
    if _EXCHANGE is None or (found := native.describe_tensors(_EXCHANGE, tensors, storages=False)) is None:
        return None
    return Facts(*found[1:])
