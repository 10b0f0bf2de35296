"""Fills tensors with slices of stored ones: in place where bytes and memory allow it, else by conversion.

Belongs here: which targets may be written to, and how values become another dtype. Does not: how bytes are
read (load.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.memory import local_ranks
from megatron_datastates.engine.reader import Reader, is_on_current_device
from megatron_datastates.errors import MismatchError
from megatron_datastates.format.strides import footprint_elements, overlaps_itself
from megatron_datastates.pipeline.loading.load import Checkpoint, torch_dtype
from megatron_datastates.plan.boxes import cut_box
from megatron_datastates.plan.reads import ScheduledRead
from megatron_datastates.providers.base import Place
from megatron_datastates.providers.tensors import dtype_name

_PIECE_BYTES = 8 << 20  # of a tensor that cannot be read in place, as stored
_GROUP_BYTES = 32 << 20  # read at a time
_ALIGNMENT = 16  # bytes, of the largest dtype
_COMPARED = 1 << 18  # elements at a time: numpy makes both of one kind
_ONLY_POWERS = "float8_e8m0fnu"  # torch makes other numbers of those that it does not have


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
                cached = _is_read_beside(place)
                planned[number] = checkpoint.plan_into(key, place.offset, place.shape, target, cached)
            else:
                pieces[number] = list(_pieces(checkpoint, key, place, target))
        shared = sharing(memory)
    for number in planned:
        note_change(memory[number])
    reader, temporaries = checkpoint.new_reader(), Temporaries(_GROUP_BYTES)
    alone = sorted(set(range(len(memory))).difference(shared))
    for numbers in (alone, *([number] for number in shared)):  # the latter one by one, in their order
        checkpoint.read([read for number in numbers for read in planned.get(number, ())], reader)
        for group in _groups(piece for number in numbers for piece in pieces.get(number, ())):
            _fill_group(checkpoint, group, reader, temporaries)


def _is_read_beside(place: Place) -> bool:
    """Returns whether other ranks of this node probably read the same: what is sharded is read in parts."""
    return local_ranks() > 1 and tuple(place.shape) == tuple(place.global_shape)


def note_change(target: torch.Tensor) -> None:
    """Notes that native code fills a tensor, so that autograd refuses to use it as it was before."""
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)


def sharing(targets: Sequence[torch.Tensor]) -> list[int]:
    """Returns, in order, the numbers of contiguous tensors that have memory in common with others of them.

    Threads would fill that with parts of each, if they read all at once.
    """
    return overlapping([_memory_range(target) for target in targets])


def _memory_range(target: torch.Tensor) -> tuple[int, int]:
    """Returns where a contiguous tensor begins and ends, as addresses; zeros for any other."""
    is_known = is_plain(target) and target.device.type in ("cpu", "cuda") and target.is_contiguous()
    return (target.data_ptr(), target.data_ptr() + target.nbytes) if is_known else (0, 0)


def overlapping(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Returns, in order, the numbers of ranges of addresses (begin, end) that others of them overlap."""
    begins, ends = np.array(ranges, np.uint64).reshape(-1, 2).T
    order = np.argsort(begins, kind="stable")
    joins = begins[order][1:] < np.maximum.accumulate(ends[order])[:-1]  # one that begins before it
    has_common = np.append(joins, False) | np.insert(joins, 0, False)
    return sorted(order[has_common[: len(order)]].tolist())


def _fill_group(
    checkpoint: Checkpoint, group: list[_Piece], reader: Reader, temporaries: Temporaries
) -> None:
    temporaries.clear()
    memory = [temporaries.take(piece.target.shape, piece.dtype) for piece in group]
    scheduled: list[ScheduledRead] = []
    with checkpoint.costs.timing("planning"):
        for piece, temporary in zip(group, memory, strict=True):
            scheduled += checkpoint.plan_into(
                piece.key, piece.offset, temporary.shape, temporary, piece.through_cache
            )
    checkpoint.read(scheduled, reader)
    for piece, temporary in zip(group, memory, strict=True):
        copy_converted(piece.key, temporary, piece.target)


def _groups(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Groups pieces that are read together; a larger one is a group by itself."""
    group: list[_Piece] = []
    room = _GROUP_BYTES
    for piece in pieces:
        if group and piece.bytes > room:
            yield group
            group, room = [], _GROUP_BYTES
        group.append(piece)
        room -= piece.bytes
    if group:
        yield group


def _pieces(checkpoint: Checkpoint, key: str, place: Place, target: torch.Tensor) -> Iterator[_Piece]:
    dtype, cached = torch_dtype(checkpoint.index.tensor(key).dtype, key), _is_read_beside(place)
    if not is_plain(target):  # a part of a quantized tensor is a copy of it
        yield _Piece(key, tuple(place.offset), target, dtype, cached)
        return
    for start, shape in cut_box((0,) * len(place.shape), place.shape, _PIECE_BYTES // dtype.itemsize):
        offset = tuple(a + b for a, b in zip(place.offset, start, strict=True))
        part = target[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
        yield _Piece(key, offset, part, dtype, cached)


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
        checkpoint.is_same_dtype(key, torch_dtype(entry.dtype, key), target.dtype)
        and plain
        and target.is_contiguous()
        and not target.is_neg()
        and not target.is_conj()
        and (target.device.type == "cpu" or (is_on_current_device(target) and not entry.encoded))
    )


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
