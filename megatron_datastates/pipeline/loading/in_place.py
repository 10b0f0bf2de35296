"""Which targets native code may read stored bytes into, and the temporaries for all others.

Belongs here: what loads of tensors have in common, whichever program asks for them: what they require of a
target, and how values get from a temporary to it. Does not belong here: which bytes are read, and what is
read together (filling.py, and dcp/transfers.py for DCP's plans).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_datastates.engine.memory import local_ranks
from megatron_datastates.engine.reader import is_on_current_device
from megatron_datastates.errors import MismatchError
from megatron_datastates.format.strides import footprint_elements, overlaps_itself
from megatron_datastates.providers.tensors import dtype_name

_ALIGNMENT = 16  # bytes, of the largest dtype
_COMPARED = 1 << 18  # elements at a time: numpy makes both of one kind
_ONLY_POWERS = "float8_e8m0fnu"  # torch makes other numbers of those that it does not have


# -- targets -----------------------------------------------------------------------------------------------


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a torch.Tensor or a Parameter, and of no other subclass."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def require_memory(key: str, target: torch.Tensor) -> None:
    """Raises MismatchError for a target without memory, or that ends beyond its storage.

    torch fills the former with nothing, and other memory would be written to beyond the latter.
    """
    if target.is_meta or target.layout is not torch.strided:
        kind = "on the meta device" if target.is_meta else f"of the layout {target.layout}"
        raise MismatchError(
            f"tensor {key!r}: the target is {kind}, and has no memory to fill: pass one that has"
        )
    if not is_plain(target) or target.device.type not in ("cpu", "cuda"):
        return
    end = target.storage_offset() + footprint_elements(target.shape, target.stride())
    found = target.untyped_storage().nbytes()
    if target.numel() and end * target.itemsize > found:
        raise MismatchError(
            f"tensor {key!r}: the target ends beyond its storage of {found} bytes: that was resized, as "
            "where a tensor is offloaded; bring it back before the load"
        )
    if target.numel() and not target.data_ptr():  # native code would write to that address
        raise MismatchError(
            f"tensor {key!r}: the target wraps another tensor, and has no memory of its own to fill: pass "
            "one that has"
        )


def fits_in_place(target: torch.Tensor, encoded: bool) -> bool:
    """Returns whether elements of the same dtype can be read into the target without a temporary."""
    return (
        is_plain(target)
        and not (encoded and is_on_device(target))
        and target.layout is torch.strided
        and not (target.is_conj() or target.is_neg())
        and (is_on_current_device(target) if is_on_device(target) else target.device.type == "cpu")
        and (target.is_contiguous() or not overlaps_itself(target.shape, target.stride()))
    )


def is_on_device(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is in memory of a CUDA device."""
    return tensor.is_cuda


def is_read_beside(shape: Sequence[int], global_shape: Sequence[int]) -> bool:
    """Returns whether other ranks of this node probably read the same: what is sharded is read in parts."""
    return local_ranks() > 1 and tuple(shape) == tuple(global_shape)


def note_change(target: torch.Tensor) -> None:
    """Notes that native code fills a tensor, so that autograd refuses to use it as it was before."""
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)


def overlapping(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Returns, in order, the numbers of ranges of addresses (begin, end) that others of them overlap."""
    begins, ends = np.array(ranges, np.uint64).reshape(-1, 2).T
    order = np.argsort(begins, kind="stable")
    joins = begins[order][1:] < np.maximum.accumulate(ends[order])[:-1]  # one that begins before it
    has_common = np.append(joins, False) | np.insert(joins, 0, False)
    return sorted(order[has_common[: len(order)]].tolist())


# -- temporaries -------------------------------------------------------------------------------------------


class Temporaries:
    """Host memory for temporaries that live by turns: allocations of their own would fragment the heap."""

    def __init__(self, size: int) -> None:
        """Args: size: in bytes; pages that are never used cost nothing."""
        self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor; of memory of its own if it does not fit in what is left."""
        begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        end = begin + math.prod(shape) * dtype.itemsize
        if end > len(self._memory):
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        self._used = end
        return self._memory[begin:end].view(dtype).reshape(tuple(shape))

    def clear(self) -> None:
        """Forgets what was taken, which nothing may use afterwards."""
        self._used = 0


def part_of(target: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Returns the box [start, start + shape) of a plain tensor, as a view."""
    return target[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]


def copy_converted(key: str, stored: torch.Tensor, target: torch.Tensor) -> None:
    """Copies stored values into a tensor of another dtype, device or kind.

    Args:
        stored: in host memory.

    Raises:
        MismatchError: the target's dtype does not have one of these integers, or has no sign and no zero.
    """
    try:
        if stored.dtype != target.dtype and dtype_name(target.dtype) == _ONLY_POWERS:
            raise NotImplementedError
        if is_plain(target) and _must_be_exact(stored.dtype, target.dtype):
            converted = stored.to(target.dtype)
            value = _first_lost(stored.reshape(-1), converted.reshape(-1))
            if value is not None:
                raise MismatchError(
                    f"tensor {key!r} was saved as {stored.dtype}, and has values that {target.dtype} does "
                    f"not have, such as {value}: load it as it was saved"
                )
            stored = converted
        with torch.inference_mode() if target.is_inference() else contextlib.nullcontext():
            target.copy_(stored)
    except NotImplementedError as error:  # torch's dtypes of less than a byte
        raise MismatchError(
            f"tensor {key!r} was saved as {stored.dtype}, which cannot be converted to {target.dtype}: load "
            "it as it was saved"
        ) from error


def _must_be_exact(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Returns whether both are integers.

    Floats become what torch makes of them, rounded or infinite, as in torch_dist's loads.
    """
    return stored != wanted and not any(one.is_floating_point or one.is_complex for one in (stored, wanted))


def _first_lost(stored: torch.Tensor, found: torch.Tensor) -> Any:
    """Returns the first of these integers that has become another; None if there is none."""
    for before, after in zip(stored.split(_COMPARED), found.split(_COMPARED), strict=True):
        wrong = np.asarray(before.numpy() != after.numpy())  # by value, of any two kinds
        if wrong.any():
            return before.numpy()[wrong][0].item()
    return None
