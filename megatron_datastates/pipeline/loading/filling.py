"""Fills tensors with slices of stored ones: in place where bytes and memory allow it, else by conversion.

Belongs here: checks of a request, and what is read together. Does not belong here: which targets may be
written to, and how values become another dtype (in_place.py); how bytes are read (data_files.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.reader import Reader
from megatron_datastates.errors import MismatchError
from megatron_datastates.format.strides import footprint_elements, overlaps_itself
from megatron_datastates.pipeline.loading.dtypes import note_conversion, torch_dtype
from megatron_datastates.pipeline.loading.in_place import (
    Temporaries,
    copy_converted,
    fits_in_place,
    is_plain,
    is_read_beside,
    note_change,
    overlapping,
    part_of,
    require_memory,
)
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.slices import plan_into
from megatron_datastates.plan.boxes import cut_box
from megatron_datastates.plan.reads import ScheduledRead, in_groups
from megatron_datastates.providers.base import Place

_PIECE_BYTES = 8 << 20  # of a tensor that cannot be read in place, as stored
_GROUP_BYTES = 32 << 20  # read at a time


class _Piece(NamedTuple):
    """A part of a target that is read into a temporary first."""

    key: str
    offset: tuple[int, ...]  # in the global tensor
    target: torch.Tensor
    dtype: torch.dtype  # as stored
    through_cache: bool  # see ScheduledRead

    @property
    def bytes(self) -> int:
        return self.target.numel() * self.dtype.itemsize


def fill(checkpoint: Checkpoint, targets: Mapping[str, tuple[Place, torch.Tensor]]) -> None:
    """Fills tensors with slices of global ones. Lazy saves that still read the targets come first.

    Of contiguous targets that share memory, such as tied weights, the last one counts.

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
    memory: list[torch.Tensor] = []
    planned: dict[int, list[ScheduledRead]] = {}  # by number, of those that are read in place
    pieces: dict[int, list[_Piece]] = {}  # of the others
    with checkpoint.costs.timing("planning"):
        checkpoint.index.preload(targets)  # one by one, each would open the index
        for number, (key, (place, target)) in enumerate(targets.items()):
            target = target.detach()
            memory.append(target)
            if _fits_in_place(checkpoint, key, place, target):
                cached = is_read_beside(place.shape, place.global_shape)
                planned[number] = plan_into(checkpoint, key, place.offset, place.shape, target, cached)
            else:
                pieces[number] = list(_pieces(checkpoint, key, place, target))
        shared = sharing(memory)
    for number in planned:
        note_change(memory[number])
    reader, temporaries = checkpoint.new_reader(), Temporaries(_GROUP_BYTES)
    alone = sorted(set(range(len(memory))).difference(shared))
    for numbers in (alone, *([number] for number in shared)):  # the latter one by one, in their order
        checkpoint.read([read for number in numbers for read in planned.get(number, ())], reader)
        others = (piece for number in numbers for piece in pieces.get(number, ()))
        for group in in_groups(others, lambda piece: piece.bytes, _GROUP_BYTES):
            _fill_group(checkpoint, group, reader, temporaries)


def sharing(targets: Sequence[torch.Tensor]) -> list[int]:
    """Returns, in order, the numbers of contiguous tensors that have memory in common with others of them.

    Threads would fill that with parts of each, if they read all at once.
    """
    return overlapping([_memory_range(target) for target in targets])


def _memory_range(target: torch.Tensor) -> tuple[int, int]:
    """Returns where a contiguous tensor begins and ends, as addresses; zeros for any other."""
    is_known = is_plain(target) and target.device.type in ("cpu", "cuda") and target.is_contiguous()
    return (target.data_ptr(), target.data_ptr() + target.nbytes) if is_known else (0, 0)


def _fill_group(
    checkpoint: Checkpoint, group: list[_Piece], reader: Reader, temporaries: Temporaries
) -> None:
    temporaries.clear()
    memory = [temporaries.take(piece.target.shape, piece.dtype) for piece in group]
    scheduled: list[ScheduledRead] = []
    with checkpoint.costs.timing("planning"):
        for piece, temporary in zip(group, memory, strict=True):
            scheduled += plan_into(
                checkpoint, piece.key, piece.offset, temporary.shape, temporary, piece.through_cache
            )
    checkpoint.read(scheduled, reader)
    for piece, temporary in zip(group, memory, strict=True):
        copy_converted(piece.key, temporary, piece.target)


def _pieces(checkpoint: Checkpoint, key: str, place: Place, target: torch.Tensor) -> Iterator[_Piece]:
    dtype = torch_dtype(checkpoint.index.tensor(key).dtype, key)
    cached = is_read_beside(place.shape, place.global_shape)
    if not is_plain(target):  # a part of a quantized tensor is a copy of it
        yield _Piece(key, tuple(place.offset), target, dtype, cached)
        return
    for start, shape in cut_box((0,) * len(place.shape), place.shape, _PIECE_BYTES // dtype.itemsize):
        offset = tuple(a + b for a, b in zip(place.offset, start, strict=True))
        yield _Piece(key, offset, part_of(target, start, shape), dtype, cached)


def _fits_in_place(checkpoint: Checkpoint, key: str, place: Place, target: torch.Tensor) -> bool:
    """Returns whether stored bytes go right to the target's memory. Raises as `fill`."""
    if key not in checkpoint.index.tensors:
        raise checkpoint.index.missing("tensor", key, str(checkpoint.directory))
    entry = checkpoint.index.tensor(key)
    if entry.global_shape != place.global_shape:
        raise MismatchError(
            f"tensor {key!r} was saved with the shape {entry.global_shape} in {checkpoint.directory}, "
            f"and is wanted with {place.global_shape}"
        )
    if tuple(target.shape) != tuple(place.shape):
        raise MismatchError(
            f"tensor {key!r}: the target has the shape {tuple(target.shape)}, and its place the shape "
            f"{tuple(place.shape)}: pass a target of that shape"
        )
    require_memory(key, target)
    plain = is_plain(target)
    if hasattr(target, "to_local"):
        raise MismatchError(
            f"tensor {key!r}: the target is a {type(target).__qualname__}, which is filled only by "
            "torch.distributed.checkpoint with a reader of megatron_datastates.dcp: use that, or pass a "
            "ds.Shard of its local tensor"
        )
    if plain and _shares_memory(target):
        raise MismatchError(
            f"tensor {key!r}: elements of the target share memory: pass one that was not expanded"
        )
    return (
        not note_conversion(checkpoint.rounded, key, torch_dtype(entry.dtype, key), target.dtype)
        and fits_in_place(target, entry.encoded)
        and target.is_contiguous()  # reads are planned so, and those that share memory are found by it
    )


def _shares_memory(tensor: torch.Tensor) -> bool:
    """Returns whether two elements of a strided tensor have the same place in memory."""
    shape, strides = tensor.shape, tensor.stride()
    if not tensor.numel() or not overlaps_itself(shape, strides):
        return False
    if any(n > 1 and step == 0 for n, step in zip(shape, strides, strict=True)):
        return True
    places = torch.zeros(footprint_elements(shape, strides), dtype=torch.bool, device="cpu")
    places.as_strided(shape, strides).fill_(True)
    return int(places.count_nonzero()) < tensor.numel()
