"""Fills tensors with slices of stored ones: in place where bytes and memory allow it, else by conversion.

Belongs here: which targets may be written to, and how values become another dtype. Does not: how bytes are
read (load.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.reader import is_on_current_device
from megatron_datastates.errors import MismatchError
from megatron_datastates.pipeline.load import Checkpoint, torch_dtype
from megatron_datastates.plan.boxes import cut_box
from megatron_datastates.plan.reads import ScheduledRead
from megatron_datastates.providers.base import Place

_PIECE_BYTES = 8 << 20  # of a tensor that cannot be read in place, as stored
_GROUP_BYTES = 32 << 20  # read at a time
_COMPARED = 1 << 18  # elements at a time: numpy makes both of one kind
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Piece(NamedTuple):
    """A part of a target that is read into a temporary first."""

    key: str
    offset: tuple[int, ...]  # in the global tensor
    target: torch.Tensor


def fill(checkpoint: Checkpoint, targets: Mapping[str, tuple[Place, torch.Tensor]]) -> None:
    """Fills tensors with slices of global ones. Lazy saves that still read the targets come first.

    What cannot be read in place is converted through temporaries of 32 MiB, or of the size of a tensor of a
    subclass, such as a quantized one.

    Args:
        targets: by key, the slice that is wanted and a tensor of its shape, of any device.

    Raises:
        MissingKeyError: no such tensor.
        MismatchError: it has another shape, or values that the dtype of the target does not have; or the
            target has no memory of its own to fill.
        FormatError: the checkpoint holds only a part of it.
    """
    FENCE.wait("a load")
    scheduled: list[ScheduledRead] = []
    others: list[_Piece] = []
    with checkpoint.costs.timing("planning"):
        for key, (place, target) in targets.items():
            target = target.detach()
            if _fits_in_place(checkpoint, key, place, target):
                scheduled += checkpoint.plan_into(key, place.offset, place.shape, target)
            else:
                others += _pieces(checkpoint, key, place, target)
    reader = checkpoint.new_reader()
    checkpoint.read(scheduled, reader)
    for group in _groups(checkpoint, others):
        slices = [(piece.key, piece.offset, tuple(piece.target.shape)) for piece in group]
        for piece, found in zip(group, checkpoint.read_tensors(slices, reader), strict=True):
            copy_converted(piece.key, found, piece.target)


def _groups(checkpoint: Checkpoint, pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Groups pieces that are read together; a larger one is a group by itself."""
    group: list[_Piece] = []
    room = _GROUP_BYTES
    for piece in pieces:
        dtype = torch_dtype(checkpoint.index.tensor(piece.key).dtype, piece.key)
        size = piece.target.numel() * dtype.itemsize
        if group and size > room:
            yield group
            group, room = [], _GROUP_BYTES
        group.append(piece)
        room -= size
    if group:
        yield group


def _pieces(checkpoint: Checkpoint, key: str, place: Place, target: torch.Tensor) -> Iterator[_Piece]:
    if type(target) not in _PLAIN:  # a part of a quantized tensor is a copy of it
        yield _Piece(key, tuple(place.offset), target)
        return
    item = torch_dtype(checkpoint.index.tensor(key).dtype, key).itemsize
    for start, shape in cut_box((0,) * len(place.shape), place.shape, _PIECE_BYTES // item):
        offset = tuple(a + b for a, b in zip(place.offset, start, strict=True))
        yield _Piece(key, offset, target[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))])


def _fits_in_place(checkpoint: Checkpoint, key: str, place: Place, target: torch.Tensor) -> bool:
    """Returns whether stored bytes go right to the target's memory. Raises as `fill`."""
    entry = checkpoint.index.tensor(key)
    if entry.global_shape != place.global_shape:
        raise MismatchError(
            f"tensor {key!r} was saved with the shape {entry.global_shape}, "
            f"and is wanted with {place.global_shape}"
        )
    if tuple(target.shape) != tuple(place.shape):
        raise MismatchError(
            f"tensor {key!r}: the target has the shape {tuple(target.shape)}, and its place the shape "
            f"{tuple(place.shape)}: pass a target of that shape"
        )
    if target.is_meta or target.layout is not torch.strided:
        kind = "on the meta device" if target.is_meta else f"of the layout {target.layout}"
        raise MismatchError(
            f"tensor {key!r}: the target is {kind}, and has no memory to fill: pass one that has"
        )
    is_plain = type(target) in _PLAIN
    is_expanded = any(n > 1 and step == 0 for n, step in zip(target.shape, target.stride(), strict=True))
    if is_plain and is_expanded:
        raise MismatchError(
            f"tensor {key!r}: elements of the target share memory: pass one that was not expanded"
        )
    return (
        checkpoint.is_same_dtype(key, torch_dtype(entry.dtype, key), target.dtype)
        and is_plain
        and target.is_contiguous()
        and not target.is_neg()
        and not target.is_conj()
        and (target.device.type == "cpu" or (is_on_current_device(target) and not entry.encoded))
    )


def copy_converted(key: str, stored: torch.Tensor, target: torch.Tensor) -> None:
    """Copies stored values into a tensor of another dtype, device or kind.

    Args:
        stored: in host memory.

    Raises:
        MismatchError: the target's dtype does not have one of these integers.
    """
    if stored.dtype != target.dtype and type(target) in _PLAIN:
        found = _converted(key, stored, target.dtype)
        value = _first_lost(stored.reshape(-1), found.reshape(-1))
        if value is not None:
            raise MismatchError(
                f"tensor {key!r} was saved as {stored.dtype}, and has values that {target.dtype} does not "
                f"have, such as {value}: load it as it was saved"
            )
        stored = found
    target.copy_(stored)


def _converted(key: str, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    try:
        return stored.to(dtype)
    except NotImplementedError as error:  # torch's dtypes of less than a byte
        raise MismatchError(
            f"tensor {key!r} was saved as {stored.dtype}, which this torch cannot convert to {dtype}: load "
            "it as it was saved"
        ) from error


def _first_lost(stored: torch.Tensor, found: torch.Tensor) -> Any:
    """Returns the first of these integers that has become another; None if there is none.

    Floats become what torch makes of them, rounded or infinite, as in torch_dist's loads.
    """
    if any(one.is_floating_point() or one.is_complex() for one in (stored, found)):
        return None
    for before, after in zip(stored.split(_COMPARED), found.split(_COMPARED), strict=True):
        wrong = np.asarray(before.numpy() != after.numpy())  # by value, of any two kinds
        if wrong.any():
            return before.numpy()[wrong][0].item()
    return None
