"""Plain named tensors in device or host memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_datastates.errors import MismatchError
from megatron_datastates.format.values import DTYPES
from megatron_datastates.providers.base import Mutability, StateReader, Tensors


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without torch's prefix: `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def check_dtype(key: str, dtype: torch.dtype) -> None:
    """Raises MismatchError for a dtype that the format does not have."""
    if dtype_name(dtype) not in DTYPES:
        raise MismatchError(
            f"tensor {key!r} has dtype {dtype_name(dtype)}, which cannot be saved: view or convert it, for "
            "example as uint8"
        )


def is_frozen(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a Parameter, or a view of one, that no optimizer trains."""
    base = tensor._base if tensor._base is not None else tensor
    return not base.requires_grad and isinstance(base, torch.nn.Parameter)


class TensorProvider:
    """Named tensors, each a whole global tensor."""

    def __init__(self, tensors: dict[str, torch.Tensor], mutability: Mutability) -> None:
        self._tensors = tensors
        self._mutability = mutability

    def entries(self) -> Iterator[Tensors]:
        count = len(self._tensors)
        yield Tensors(
            list(self._tensors),
            list(self._tensors.values()),
            [self._mutability] * count,
            [None] * count,
            [False] * count,
        )

    def restore(self, reader: StateReader) -> None:
        """Fills the tensors in place."""
        reader.read_into(self._tensors)
