"""The optimizer's state by parameter, read from the buckets that Megatron's distributed optimizer stores.

    for key, tensor in optimizer_state(checkpoint).items():
        print(key, tensor.dtype, tensor.global_shape, tensor.read())

Keys and values are those of a checkpoint with fully reshardable optimizer state, but for the dtype, which is
the stored one. Neither Megatron nor the model is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron_datastates.errors import FormatError, MismatchError
from megatron_datastates.format.optimizer_map import Bucket, OptimizerMap, ParameterShard, footprint_elements
from megatron_datastates.format.values import OPTIMIZER_MAP_NAME, is_optimizer_map
from megatron_datastates.pipeline.load import Checkpoint, torch_dtype
from megatron_datastates.plan.boxes import first_overlap, intersect

_PREFIX = "optimizer.state"  # of the keys, as Megatron has it


@dataclasses.dataclass(frozen=True)
class BucketBox:
    """A strided box of a stored bucket, and where it goes in the slice that was asked for."""

    key: str  # of the bucket's tensor, which has one dimension
    begin: int  # the box's first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    offset: tuple[int, ...]  # in the slice

    @property
    def elements(self) -> int:
        """The bucket's elements from the box's first to its last, both included."""
        return footprint_elements(self.shape, self.strides)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A main shard of a state, in one bucket."""

    key: str  # of the bucket's tensor
    begin: int  # of the parameter in it
    shard: ParameterShard


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """One state of one parameter as a global tensor. Its pieces tile it."""

    key: str
    dtype: str  # torch's name
    global_shape: tuple[int, ...]
    checkpoint: Checkpoint
    pieces: tuple[_Piece, ...]

    def sources(
        self, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> list[BucketBox]:
        """Returns where a slice (all of it by default) lies in the checkpoint's buckets.

        Raises:
            MismatchError: the slice leaves the tensor.
        """
        offset, shape = self._slice(offset, shape)
        found = []
        for piece in self.pieces:
            shard = piece.shard
            common = intersect(shard.offset, shard.shape, offset, shape)
            if common is None:
                continue
            at, lengths = common
            within = sum((a - o) * s for a, o, s in zip(at, shard.offset, shard.strides, strict=True))
            target = tuple(a - o for a, o in zip(at, offset, strict=True))
            begin = piece.begin + shard.start + within
            found.append(BucketBox(piece.key, begin, lengths, shard.strides, target))
        return found

    def read(self, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Returns a slice (all of it by default), in host memory, in its stored dtype.

        What lies between the slice's elements in a bucket is read, too, and held until all is read.

        Raises:
            MismatchError: the slice leaves the tensor.
            StorageError, CorruptDataError, FormatError: as Checkpoint.read_tensor.
        """
        offset, shape = self._slice(offset, shape)
        target = torch.empty(shape, dtype=torch_dtype(self.dtype))
        boxes = self.sources(offset, shape)
        ranges = [(box.key, (box.begin,), (box.elements,)) for box in boxes]
        for box, values in zip(boxes, self.checkpoint.read_tensors(ranges), strict=True):
            place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            target[place] = values.as_strided(box.shape, box.strides)
        return target

    def _slice(
        self, offset: Sequence[int] | None, shape: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        whole = self.global_shape
        offset = tuple(offset) if offset is not None else (0,) * len(whole)
        shape = tuple(shape) if shape is not None else whole
        if not len(offset) == len(shape) == len(whole) or any(
            o < 0 or n < 0 or o + n > s for o, n, s in zip(offset, shape, whole, strict=True)
        ):
            raise MismatchError(f"{self.key!r} has shape {whole}: there is no slice of {shape} at {offset}")
        return offset, shape


def optimizer_state(checkpoint: Checkpoint) -> dict[str, StateTensor]:
    """Returns every state of every parameter by key (`optimizer.state.exp_avg.` and the parameter's).

    Reads the checkpoint's optimizer maps and no other data. Without maps there is nothing: the state is not
    stored in buckets, or was not saved. States whose tensors were removed from the checkpoint are not there.

    Raises:
        FormatError: a map is damaged, does not fit the stored buckets, or together they leave holes in a
            parameter or hold some of it twice.
        UnsupportedFormatError: a map was written by a later release.
        StorageError, CorruptDataError: as all reading.
    """
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    described = set()
    for prefix, decoded in _maps(checkpoint):
        for bucket in decoded.buckets:
            for state in bucket.states:
                tensor = f"{prefix}{bucket.name}.{state}"
                if tensor in described:
                    raise FormatError(f"optimizer maps describe the tensor {tensor!r} twice")
                described.add(tensor)
                _collect(checkpoint, tensor, bucket, state, pieces)
    return {key: _state_tensor(checkpoint, key, found) for key, found in sorted(pieces.items())}


def _maps(checkpoint: Checkpoint) -> Iterator[tuple[str, OptimizerMap]]:
    """Yields each map with the prefix of its buckets' keys."""
    keys = sorted(filter(is_optimizer_map, checkpoint.index.objects))
    for key, value in checkpoint.read_objects(keys).items():
        if not (isinstance(value, list) and len(value) == 1 and isinstance(value[0], str)):
            raise FormatError(f"the optimizer map {key!r} is not a list of one text")
        yield key[: key.rindex(OPTIMIZER_MAP_NAME)], OptimizerMap.decode(value[0], key)


def _collect(
    checkpoint: Checkpoint, tensor: str, bucket: Bucket, state: str, pieces: dict[str, list[_Piece]]
) -> None:
    if tensor not in checkpoint.index.tensors:
        return
    shape = checkpoint.index.tensor(tensor).global_shape
    if shape != (bucket.elements,):
        raise FormatError(
            f"tensor {tensor!r} has shape {shape}, and its optimizer map says ({bucket.elements},)"
        )
    for parameter in bucket.parameters:
        for shard in parameter.shards:
            if shard.main:
                pieces[f"{_PREFIX}.{state}.{shard.key}"].append(_Piece(tensor, parameter.begin, shard))


def _state_tensor(checkpoint: Checkpoint, key: str, pieces: Sequence[_Piece]) -> StateTensor:
    shape, dtype = pieces[0].shard.global_shape, checkpoint.index.tensor(pieces[0].key).dtype
    for piece in pieces:
        found = piece.shard.global_shape, checkpoint.index.tensor(piece.key).dtype
        if found != (shape, dtype):
            raise FormatError(
                f"{key!r} is {dtype} of global shape {shape} in {pieces[0].key!r}, and {found[1]} of "
                f"{found[0]} in {piece.key!r}"
            )
    stored, whole = sum(math.prod(piece.shard.shape) for piece in pieces), math.prod(shape)
    if stored < whole:
        raise FormatError(f"{key!r} has holes: {stored} of {whole} elements are stored")
    offsets = np.array([piece.shard.offset for piece in pieces], np.int64).reshape(len(pieces), len(shape))
    shapes = np.array([piece.shard.shape for piece in pieces], np.int64).reshape(len(pieces), len(shape))
    overlap = first_overlap(offsets, shapes)
    if overlap is not None:
        raise FormatError(f"{key!r}: two shards both hold the element at {overlap}")
    return StateTensor(key, dtype, shape, checkpoint, tuple(pieces))
