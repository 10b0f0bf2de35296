"""Tensors in device or host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from megatron_datastates.errors import MismatchError
from megatron_datastates.format.values import Fragment
from megatron_datastates.plan.boxes import Runs, strided_runs
from megatron_datastates.providers.base import Mutability, ObjectSource


@dataclasses.dataclass(frozen=True, slots=True)
class TensorMemory:
    """A fragment that is a dense or strided tensor."""

    fragment: Fragment
    tensor: torch.Tensor
    mutability: Mutability
    device: int | None

    @property
    def owner(self) -> object:
        return self.tensor

    def made_eager(self) -> TensorMemory:
        return dataclasses.replace(self, mutability=Mutability.NOW)

    def runs(self) -> Runs:
        tensor = self.tensor
        if tensor.is_contiguous():
            size = self.fragment.bytes
            return Runs((tensor.data_ptr(),) if size else (), 1, size, size)
        return strided_runs(tensor.shape, tensor.stride(), tensor.element_size(), tensor.data_ptr())


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def tensor_source(
    key: str,
    tensor: torch.Tensor,
    mutability: Mutability,
    *,
    global_shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
) -> TensorMemory:
    """One tensor as a fragment of a global tensor (by default: all of it).

    Args:
        shape: of the fragment, where it has more (size 1) dimensions than the tensor.

    Raises:
        MismatchError: the tensor has another number of elements than the fragment, or is sparse, or has no
            memory at present, or lies on a device that is neither the host nor a CUDA device.
    """
    data = tensor.detach().resolve_conj().resolve_neg()  # the bytes in memory must be the values
    if data.device.type not in ("cpu", "cuda"):
        raise MismatchError(f"tensor {key!r} is on {data.device}: only host and CUDA tensors can be saved")
    shape = tuple(data.shape) if shape is None else tuple(shape)
    global_shape = shape if global_shape is None else tuple(global_shape)
    offset = (0,) * len(shape) if offset is None else tuple(offset)
    fragment = Fragment(key, dtype_name(data.dtype), global_shape, offset, shape)
    if data.layout is not torch.strided or fragment.bytes != data.numel() * data.element_size():
        raise MismatchError(
            f"tensor {key!r}: cannot store {tuple(data.shape)} {data.layout} as shape {shape}"
        )
    if fragment.bytes and data.untyped_storage().nbytes() == 0:
        raise MismatchError(f"tensor {key!r} has no memory: it was offloaded; bring it back before a save")
    device = data.device.index if data.device.type == "cuda" else None
    return TensorMemory(fragment, data, mutability, device)


class TensorProvider:
    """Plain named tensors, each a global tensor of its own."""

    def __init__(self, tensors: dict[str, torch.Tensor], mutability: Mutability) -> None:
        self._tensors = tensors
        self._mutability = mutability

    def tensors(self) -> Iterable[TensorMemory]:
        return (tensor_source(key, tensor, self._mutability) for key, tensor in self._tensors.items())

    def objects(self) -> Iterable[ObjectSource]:
        return ()
