"""The optimizer map: where each parameter lies in the buckets of Megatron's distributed optimizer.

One object per data-parallel group, as JSON text. A bucket's name is a part of its tensors' keys: the prefix
before it is the one of the map's own key. Belongs here: the values, their codec, and the checks that need
nothing else of the checkpoint.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import FormatError, UnsupportedFormatError
from megatron_datastates.format.strides import footprint_elements, overlaps_itself

MAP_FORMAT_VERSION = 1
_MAX_ELEMENTS = 1 << 62  # sums and products of offsets stay within 64 bits
_MAX_DIMENSIONS = 64
_MAX_RUNS = 1 << 24  # of consecutive elements, in the shards of a parameter that are not one after another
Elements = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_ELEMENTS)]
Sizes = Annotated[tuple[Elements, ...], msgspec.Meta(max_length=_MAX_DIMENSIONS)]


class ParameterShard(msgspec.Struct, frozen=True):
    """A shard of a global tensor of the model, and where it lies in a parameter. All numbers are elements."""

    key: str  # of the global tensor
    global_shape: Sizes
    offset: Sizes  # of the shard in it
    shape: Sizes  # of the shard, prepended axes included
    start: Elements  # its first element, counted from the parameter's first
    strides: Sizes  # in the parameter
    main: bool  # False: a replica; another parameter holds the main one


class Parameter(msgspec.Struct, frozen=True):
    """Elements [begin, end) of a bucket. It has no shards if its place in the model is not known."""

    name: str  # in the sharded state dict of the rank that stored it
    begin: Elements
    end: Elements
    shards: tuple[ParameterShard, ...]


class Bucket(msgspec.Struct, frozen=True):
    """One bucket, stored as the tensors NAME.STATE of `elements` elements each."""

    name: str
    elements: Elements  # without the padding at its end
    states: tuple[str, ...]  # exp_avg, for instance
    parameters: tuple[Parameter, ...]


class OptimizerMap(msgspec.Struct, frozen=True):
    """All buckets of one data-parallel group."""

    format_version: int
    buckets: tuple[Bucket, ...]

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str, key: str) -> OptimizerMap:
        """Returns the map in `text`, the object `key` of a checkpoint.

        Raises:
            FormatError: the text is damaged, parameters leave their bucket or overlap, or shards leave their
                parameter or their global tensor.
            UnsupportedFormatError: a later release wrote it.
        """
        decoded: OptimizerMap = _decoded(_DECODER, text, key)
        for bucket in decoded.buckets:
            _check_bucket(bucket, key)
        return decoded


class ShardReach(msgspec.Struct, frozen=True, gc=False):
    """Where a shard lies in the model. See ParameterShard."""

    key: str
    offset: Sizes
    shape: Sizes


class ParameterReach(msgspec.Struct, frozen=True):
    """The shards of a parameter."""

    shards: tuple[ShardReach, ...]


class BucketReach(msgspec.Struct, frozen=True):
    """A bucket's tensors, and what they hold. See Bucket."""

    name: str
    states: tuple[str, ...]
    parameters: tuple[ParameterReach, ...]


class MapReach(msgspec.Struct, frozen=True):
    """What decides whether somebody needs a map: decoded in a fifth of the time of a whole one."""

    format_version: int
    buckets: tuple[BucketReach, ...]

    @classmethod
    def decode(cls, text: str, key: str) -> MapReach:
        """Raises as `OptimizerMap.decode`, but for numbers that do not fit each other."""
        decoded: MapReach = _decoded(_REACH_DECODER, text, key)
        return decoded


class _Head(msgspec.Struct):
    format_version: int


# Made at import, as in manifest.py.
_DECODER, _HEAD_DECODER = msgspec.json.Decoder(OptimizerMap), msgspec.json.Decoder(_Head)
_REACH_DECODER = msgspec.json.Decoder(MapReach)


def _decoded(decoder: Any, text: str, key: str) -> Any:
    try:
        found = _HEAD_DECODER.decode(text).format_version
        if found != MAP_FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"the optimizer map {key!r} has format {found}; this release reads format "
                f"{MAP_FORMAT_VERSION}: update this installation of megatron_datastates."
            )
        return decoder.decode(text)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(f"the optimizer map {key!r} is damaged: {error}") from error


def _check_bucket(bucket: Bucket, key: str) -> None:
    end = 0
    for parameter in sorted(bucket.parameters, key=lambda p: (p.begin, p.end)):
        place = f"parameter {parameter.name!r} in bucket {bucket.name!r} of {key!r}"
        if not parameter.begin <= parameter.end <= bucket.elements:
            raise FormatError(
                f"{place} has elements [{parameter.begin}, {parameter.end}) of a bucket of {bucket.elements}"
            )
        if parameter.begin < end:
            raise FormatError(f"{place} begins at {parameter.begin}, and the one before it ends at {end}")
        end = parameter.end
        elements = parameter.end - parameter.begin
        # Readers allocate what a map claims, so it must not claim more elements than are stored.
        if sum(math.prod(shard.shape) for shard in parameter.shards) > elements:
            raise FormatError(f"{place}: its shards have more than its {elements} elements")
        for shard in parameter.shards:
            if not _fits(shard, elements):
                raise FormatError(
                    f"{place}: its shard of {shard.key!r} leaves the parameter or its global shape "
                    f"{shard.global_shape}"
                )
        if _share_elements(parameter.shards):
            raise FormatError(f"{place}: an element of it belongs to its shards twice")


def cover(shards: Sequence[ParameterShard], elements: int) -> bool:
    """Returns whether shards are a whole parameter of so many elements, each of them once."""
    is_whole = sum(math.prod(shard.shape) for shard in shards) == elements
    return is_whole and all(_fits(shard, elements) for shard in shards) and not _share_elements(shards)


def _fits(shard: ParameterShard, elements: int) -> bool:
    boxes = (shard.global_shape, shard.offset, shard.shape, shard.strides)
    if len({len(sizes) for sizes in boxes}) != 1 or _product(shard.global_shape) >= _MAX_ELEMENTS:
        return False
    if any(o + n > s for s, o, n in zip(*boxes[:3], strict=True)):
        return False
    if 0 in shard.shape:
        return True
    return shard.start + footprint_elements(shard.shape, shard.strides) <= elements


def _share_elements(shards: Sequence[ParameterShard]) -> bool:
    """Returns whether two elements of shards, or of one shard, are the same element of their parameter.

    True also if that is hard to decide.
    """
    spans = sorted(
        (shard.start, shard.start + footprint_elements(shard.shape, shard.strides), number)
        for number, shard in enumerate(shards)
        if 0 not in shard.shape
    )
    if any(overlaps_itself(shards[number].shape, shards[number].strides) for _, _, number in spans):
        return True
    if all(one[1] <= other[0] for one, other in itertools.pairwise(spans)):
        return False
    if sum(_run_count(shards[number]) for _, _, number in spans) > _MAX_RUNS:
        return True
    runs = [_runs(shards[number]) for _, _, number in spans]
    begins = np.concatenate([begins for begins, _ in runs])
    ends = begins + np.concatenate([np.full(len(begins), size) for begins, size in runs])
    order = np.argsort(begins)
    return bool((ends[order][:-1] > begins[order][1:]).any())


def _run_count(shard: ParameterShard) -> int:
    size, count = 1, 1
    for stride, length in sorted((s, n) for s, n in zip(shard.strides, shard.shape, strict=True) if n > 1):
        size, count = (size * length, count) if stride == size else (size, count * length)
    return count


def _runs(shard: ParameterShard) -> tuple[npt.NDArray[np.int64], int]:
    """Returns where runs of consecutive elements of a shard begin, in no order, and the size of each."""
    size, begins = 1, np.array([shard.start], np.int64)
    for stride, length in sorted((s, n) for s, n in zip(shard.strides, shard.shape, strict=True) if n > 1):
        if stride == size:
            size *= length
        else:
            begins = (begins[:, None] + np.arange(length, dtype=np.int64) * stride).reshape(-1)
    return begins, size


def _product(sizes: Iterable[int]) -> int:
    """Returns the product of sizes, with 1 for 0: a size of 0 must not hide absurd ones beside it."""
    return math.prod(max(size, 1) for size in sizes)
