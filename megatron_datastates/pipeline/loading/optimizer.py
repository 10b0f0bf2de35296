"""The optimizer's state by parameter, read from the buckets that Megatron's distributed optimizer stores.

    for key, tensor in optimizer_state(checkpoint).items():
        print(key, tensor.dtype, tensor.global_shape, tensor.read())

Keys and values are those of a checkpoint with fully reshardable optimizer state, but for the dtype, which is
the stored one. Neither Megatron nor the model is needed. Loads into another parallel layout read through it
(mcore/load/optimizer_layout.py), so does all that shows or converts optimizer state.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import FormatError
from megatron_datastates.format.optimizer_map import (
    Bucket,
    MapReach,
    OptimizerMap,
    ParameterShard,
    ShardReach,
)
from megatron_datastates.format.strides import footprint_elements
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.format.values import OPTIMIZER_MAP_NAME, is_optimizer_map
from megatron_datastates.pipeline.loading.dtypes import torch_dtype
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.plan.boxes import Box, checked_slice, contiguous_strides, first_overlap, intersect
from megatron_datastates.plan.frames import FramedBox
from megatron_datastates.plan.reads import BoxReads, ScheduledRead
from megatron_datastates.plan.strided import fragment_at, line_of, plan_strided

if TYPE_CHECKING:
    import torch

WHOLE_OBJECT = "/shard_0_1"  # the end of the key of an object that each group stores once
_MAPS_AT_A_TIME = 32
PREFIX = "optimizer.state"  # of the keys, as Megatron has it
# The dtype of main parameters that Megatron's precision-aware optimizer stores without the 16 bits that the
# bfloat16 weights have. They are no values: nothing but the same optimizer can use them.
REMAINDERS = "int16"


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
class Piece:
    """A main shard of a state, in one bucket."""

    key: str  # of the bucket's tensor
    begin: int  # of the parameter in it
    shard: ParameterShard


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """One state of one parameter as a global tensor.

    Its pieces lie apart. They tile it, unless a part of the parameter was frozen and so has no state, as when
    only some layers are trained of those that Megatron stores as one tensor.
    """

    key: str
    dtype: str  # torch's name
    global_shape: tuple[int, ...]
    checkpoint: Checkpoint
    pieces: tuple[Piece, ...]
    lines: dict[str, TensorEntry] = dataclasses.field(repr=False)  # by bucket's tensor, as far as known

    def sources(
        self,
        offset: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        *,
        has_holes: bool = False,
    ) -> list[BucketBox]:
        """Returns where a slice (all of it by default) lies in the checkpoint's buckets.

        Args:
            has_holes: the slice may have elements without state.

        Raises:
            MismatchError: the slice leaves the tensor.
            FormatError: the slice has elements without state, and not `has_holes`.
        """
        offset, shape = checked_slice(self.key, self.global_shape, offset, shape)
        boxes = []
        for piece in self.pieces:
            shard = piece.shard
            common = intersect(shard.offset, shard.shape, offset, shape)
            if common is None:
                continue
            at, lengths = common
            within = sum((a - o) * s for a, o, s in zip(at, shard.offset, shard.strides, strict=True))
            target = tuple(a - o for a, o in zip(at, offset, strict=True))
            begin = piece.begin + shard.start + within
            boxes.append(BucketBox(piece.key, begin, lengths, shard.strides, target))
        stored, whole = sum(math.prod(box.shape) for box in boxes), math.prod(shape)
        if stored < whole and not has_holes:
            raise FormatError(
                f"{self.key!r} has holes: {stored} of {whole} elements are stored; the rest has no optimizer "
                "state, because it was frozen or a map is missing"
            )
        return boxes

    @functools.cached_property
    def stored_elements(self) -> int:
        """The number of elements that have state."""
        return sum(math.prod(piece.shard.shape) for piece in self.pieces)

    @functools.cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Of the pieces in the tensor, (pieces, dimensions)."""
        return _rows([piece.shard.offset for piece in self.pieces], len(self.global_shape))

    @functools.cached_property
    def shapes(self) -> npt.NDArray[np.int64]:
        """Of the pieces, (pieces, dimensions)."""
        return _rows([piece.shard.shape for piece in self.pieces], len(self.global_shape))

    @property
    def encoded(self) -> bool:
        """Whether any of its bytes are stored encoded."""
        return any(self.line(piece.key).encoded for piece in self.pieces)

    def line(self, key: str) -> TensorEntry:
        """Returns where the elements of a bucket's tensor are stored, in order. Raises as `line_of`."""
        if key not in self.lines:
            self.lines[key] = line_of(self.checkpoint.index.tensor(key), key)
        return self.lines[key]

    def place(self, offset: Sequence[int], shape: Sequence[int]) -> tuple[frozenset[int], tuple[int, int]]:
        """Returns the files that hold a slice, more or less, and where its first element is: file, offset.

        Raises as `plan`.
        """
        files: set[int] = set()
        first = 0, 0
        for box in self.sources(offset, shape):
            line = self.line(box.key)
            last = box.begin + box.elements - 1
            low, high = fragment_at(line, box.begin, box.key), fragment_at(line, last, box.key)
            first = first if files else (int(line.files[low]), int(line.file_offsets[low]))
            files |= set(line.files[low : high + 1].tolist())
        return frozenset(files), first

    def plan(
        self,
        offset: Sequence[int],
        shape: Sequence[int],
        target_strides: Sequence[int],
        *,
        has_holes: bool = False,
    ) -> list[BoxReads | FramedBox]:
        """Plans to read a slice to memory with these strides (elements), each element in place.

        Raises:
            As `sources`, and FormatError: a part of a bucket is not stored, or stored twice.
        """
        item = torch_dtype(self.dtype, self.key).itemsize
        reads: list[BoxReads | FramedBox] = []
        for box in self.sources(offset, shape, has_holes=has_holes):
            target = item * sum(o * s for o, s in zip(box.offset, target_strides, strict=True))
            place = box.key, box.begin, box.shape, box.strides
            reads += plan_strided(self.line(box.key), *place, target_strides, target)
        return reads

    def read(self, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Returns a slice (all of it by default), in host memory, in its stored dtype.

        Raises:
            MismatchError: the slice leaves the tensor.
            StorageError, CorruptDataError, FormatError: as Checkpoint.read_tensor.
        """
        import torch  # here, so that commands that only look need none

        offset, shape = checked_slice(self.key, self.global_shape, offset, shape)
        self.sources(offset, shape)  # raises before memory is asked for: a hostile map has any shape
        target = torch.empty(shape, dtype=torch_dtype(self.dtype, self.key), device="cpu")
        reads = self.plan(offset, shape, contiguous_strides(shape))
        self.checkpoint.read([ScheduledRead(part, target.data_ptr()) for part in reads])
        return target


class BucketStates(Mapping[str, StateTensor]):
    """By key, every state of every parameter that the optimizer maps of a checkpoint describe.

    Constructing it reads the maps and no other data. A state is checked when it is asked for: all that is in
    `optimizer_state`, but for that state alone. States whose tensors were removed from the checkpoint are not
    there.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        wanted: Mapping[str, Box] | None = None,
        maps: Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        """Reads the maps.

        Args:
            wanted: slices (offset, shape) of parameters by key. What lies outside of them may be left out.
                None: everything.
            maps: all of the checkpoint's optimizer maps, as stored, with their keys. None: they are read.

        Raises:
            As `optimizer_state`, but for what is held twice.
        """
        self.checkpoint = checkpoint
        self.maps: dict[str, OptimizerMap] = {}  # by the prefix of their buckets, as far as wanted
        self.buckets: set[str] = set()  # the tensors of all maps
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        self._made: dict[str, StateTensor] = {}
        self._lines: dict[str, TensorEntry] = {}
        for key, value in _maps(checkpoint) if maps is None else maps:
            prefix, text = key[: key.rindex(OPTIMIZER_MAP_NAME)], _text(key, value)
            if wanted is not None and not self._is_wanted(prefix, MapReach.decode(text, key), wanted):
                continue
            decoded = self.maps[prefix] = OptimizerMap.decode(text, key)
            for bucket in decoded.buckets:
                for state in bucket.states:
                    self._add(f"{prefix}{bucket.name}.{state}", bucket, state)

    def _is_wanted(self, prefix: str, reach: MapReach, wanted: Mapping[str, Box]) -> bool:
        """Returns whether a map has anything of the slices. If not, its tensors are noted."""
        for bucket in reach.buckets:
            for parameter in bucket.parameters:
                for shard in parameter.shards:
                    box = wanted.get(shard.key)
                    if box is not None and _meet(box, shard):
                        return True
        for bucket in reach.buckets:
            self.buckets.update(f"{prefix}{bucket.name}.{state}" for state in bucket.states)
        return False

    def _add(self, tensor: str, bucket: Bucket, state: str) -> None:
        if tensor in self.buckets:
            raise FormatError(f"optimizer maps describe the tensor {tensor!r} twice")
        self.buckets.add(tensor)
        if tensor not in self.checkpoint.index.tensors:
            return
        _, shape = self.checkpoint.index.describe(tensor)
        if shape != (bucket.elements,):
            raise FormatError(
                f"tensor {tensor!r} has shape {shape}, and its optimizer map says ({bucket.elements},)"
            )
        for parameter in bucket.parameters:
            for shard in parameter.shards:
                if shard.main:
                    self._pieces[f"{PREFIX}.{state}.{shard.key}"].append(
                        Piece(tensor, parameter.begin, shard)
                    )

    def __getitem__(self, key: str) -> StateTensor:
        """Raises KeyError, and FormatError: elements that are held twice, or shapes that differ."""
        if key not in self._made:
            if key not in self._pieces:
                raise KeyError(key)
            self._made[key] = _state_tensor(self.checkpoint, key, self._pieces[key], self._lines)
        return self._made[key]

    def __contains__(self, key: object) -> bool:
        return key in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._pieces))

    def __len__(self) -> int:
        return len(self._pieces)


def optimizer_state(checkpoint: Checkpoint) -> dict[str, StateTensor]:
    """Returns every state of every parameter by key (`optimizer.state.exp_avg.` and the parameter's).

    Reads the checkpoint's optimizer maps and no other data. Without maps there is nothing: the state is not
    stored in buckets, or was not saved. States whose tensors were removed from the checkpoint are not there.

    Raises:
        FormatError: a map is damaged, does not fit the stored buckets, or two hold the same elements.
        UnsupportedFormatError: a map was written by a later release.
        StorageError, CorruptDataError: as all reading.
    """
    return dict(BucketStates(checkpoint).items())


def has_optimizer_maps(checkpoint: Checkpoint) -> bool:
    """Returns whether the checkpoint has optimizer maps, without reading any."""
    return any(map(is_optimizer_map, checkpoint.index.objects))


def optimizer_map(checkpoint: Checkpoint, prefix: str) -> OptimizerMap | None:
    """Returns the map of one data-parallel group; None if it stored none. Reads no other map.

    Args:
        prefix: what the keys of the group's buckets begin with.

    Raises:
        FormatError, UnsupportedFormatError, StorageError, CorruptDataError: as `optimizer_state`.
    """
    key = f"{prefix}{OPTIMIZER_MAP_NAME}{WHOLE_OBJECT}"
    if key not in checkpoint.index.objects:
        return None
    return OptimizerMap.decode(_text(key, checkpoint.read_object(key)), key)


def _text(key: str, value: Any) -> str:
    if not (isinstance(value, list) and len(value) == 1 and isinstance(value[0], str)):
        raise FormatError(f"the optimizer map {key!r} is not a list of one text")
    return value[0]


def _maps(checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    """Yields each map with its key, few of them in memory at a time."""
    keys = sorted(filter(is_optimizer_map, checkpoint.index.objects))
    for begin in range(0, len(keys), _MAPS_AT_A_TIME):
        yield from checkpoint.read_objects(keys[begin : begin + _MAPS_AT_A_TIME]).items()


def _state_tensor(
    checkpoint: Checkpoint, key: str, pieces: Sequence[Piece], lines: dict[str, TensorEntry]
) -> StateTensor:
    shape, dtype = pieces[0].shard.global_shape, checkpoint.index.describe(pieces[0].key)[0]
    for piece in pieces:
        found = piece.shard.global_shape, checkpoint.index.describe(piece.key)[0]
        if found != (shape, dtype):
            raise FormatError(
                f"{key!r} is {dtype} of global shape {shape} in {pieces[0].key!r}, and {found[1]} of "
                f"{found[0]} in {piece.key!r}"
            )
    state = StateTensor(key, dtype, shape, checkpoint, tuple(pieces), lines)
    overlap = first_overlap(state.offsets, state.shapes)
    if overlap is not None:
        raise FormatError(f"{key!r}: two shards both hold the element at {overlap}")
    return state


def _meet(box: Box, shard: ShardReach) -> bool:
    """Returns whether a shard and a box of its tensor have an element in common. Called very often."""
    if not len(box[0]) == len(shard.offset) == len(shard.shape):
        return True  # the whole map will show what is wrong
    for begin, size, own, length in zip(*box, shard.offset, shard.shape, strict=True):
        if own + length <= begin or begin + size <= own:
            return False
    return True


def _rows(places: Sequence[Sequence[int]], dims: int) -> npt.NDArray[np.int64]:
    return np.array(places, np.int64).reshape(len(places), dims)
