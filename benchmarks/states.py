"""States to save: named tensors cut out of one allocation, in host or device memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_datastates.config import GIB
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider

Tensors = dict[str, torch.Tensor]


def cut(memory: torch.Tensor, count: int, pitch_bytes: int, gap_bytes: int) -> Tensors:
    """Returns `count` tensors of bytes in `memory`, one every `pitch_bytes`.

    The gap after each keeps the engine from merging neighbours into one copy, as in a real model's memory.
    """
    size = pitch_bytes - gap_bytes
    starts = (i * pitch_bytes for i in range(count))
    return {f"decoder.layers.{i}.weight": memory[at : at + size] for i, at in enumerate(starts)}


def host_tensors(count: int, size_bytes: int) -> Tensors:
    """Returns `count` resident, non-zero tensors of `size_bytes` each in one allocation of host memory."""
    total = count * size_bytes
    if total < GIB:
        memory = torch.arange(total, dtype=torch.int32).to(torch.uint8)
    else:  # a range of integers first would take four times the memory
        memory = torch.full((total,), 37, dtype=torch.uint8)
    return cut(memory, count, size_bytes, gap_bytes=1)


def lazy(tensors: Tensors) -> TensorProvider:
    """Returns a provider of tensors that stay unchanged until the next fence, as parameters do."""
    return TensorProvider(tensors, Mutability.AT_FENCE)


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the sum of the tensors' sizes."""
    return sum(tensor.nbytes for tensor in tensors.values())
