"""The layout: the place of each fragment of a rank in its data file, planned before any I/O.

Eager fragments come first: the trainer waits for their copies, which must not queue after those of the whole
shard. The layout depends on names, dtypes, shapes and eagerness only, never on addresses or contents, so one
layout serves every save of the same structure.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import FormatError
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.index import build_index
from megatron_datastates.format.values import ALIGNMENT, LARGE_BYTES, SMALL_ALIGNMENT, Extent, Fragment


@dataclasses.dataclass(frozen=True)
class Layout:
    """The plan of one rank's data file up to its objects."""

    order: tuple[int, ...]  # indices into the fragments, in the order of the file
    offsets: npt.NDArray[np.uint64]  # bytes, in the order of the file
    tensor_end: int  # where the objects begin; a multiple of ALIGNMENT
    index: bytes  # this rank's own index, encoded
    digest: bytes  # 16 bytes: the layout digest


def align_up(value: int, alignment: int) -> int:
    """Returns the smallest multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


def plan_layout(
    fragments: Sequence[Fragment],
    eager: Sequence[bool],
    object_keys: Sequence[str],
    stream_keys: Sequence[str] = (),
) -> Layout:
    """Plans the layout of `fragments`; fragment i is copied before the trainer continues if `eager[i]`.

    Raises:
        FormatError: fragments of one key disagree on dtype or global shape, or two objects or two streams
            share a key.
    """
    for kind, keys in (("object", object_keys), ("stream", stream_keys)):
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise FormatError(
                f"{kind} {twice!r} is given twice, and only one of the two could be read back: rename one"
            )
    order = sorted(range(len(fragments)), key=lambda i: not eager[i])
    offsets = np.zeros(len(order), np.uint64)
    at = HEADER_BYTES
    entries = []
    for place, i in enumerate(order):
        size = fragments[i].bytes
        at = align_up(at, ALIGNMENT if size >= LARGE_BYTES else SMALL_ALIGNMENT)
        offsets[place] = at
        entries.append((fragments[i], Extent(0, at, size)))
        at += size
    index = build_index(entries, dict.fromkeys(object_keys, 0), dict.fromkeys(stream_keys, 0)).encode()
    digest = hashlib.sha256(index).digest()[:16]
    return Layout(tuple(order), offsets, align_up(at, ALIGNMENT), index, digest)


def place_objects(sizes: Sequence[int], begin: int) -> tuple[list[int], int]:
    """Returns the offsets of serialized objects from `begin` on, and their end, a multiple of ALIGNMENT."""
    offsets, at = [], begin
    for size in sizes:
        at = align_up(at, SMALL_ALIGNMENT)
        offsets.append(at)
        at += size
    return offsets, align_up(at, ALIGNMENT)
