"""Addresses and descriptions of many tensors at once, through DLPack's exchange API where torch offers it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.engine import native

_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # torch 2.10 and newer


class Described(NamedTuple):
    """The addresses and the description of a list of tensors."""

    addresses: npt.NDArray[np.uint64]  # of the first elements
    description: bytes  # equal if dtypes, devices, shapes and strides are, tensor by tensor
    has_complex: bool


def describe(tensors: list[torch.Tensor]) -> Described | None:
    """Describes tensors; returns None if torch has no such API, or it cannot describe one of the tensors."""
    found = native.describe_tensors(_EXCHANGE, tensors) if _EXCHANGE is not None else None
    return Described(np.frombuffer(found[0], np.uint64), *found[1:]) if found is not None else None
