"""The layout: the place of each fragment of a rank in its data file, planned before any I/O.

Eager fragments come first: the trainer waits for their copies, which must not queue after those of the whole
shard. The layout depends on names, dtypes, shapes and eagerness only, never on addresses or contents, so one
layout serves every save of the same structure.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import FormatError
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.index import build_index
from megatron_datastates.format.tail import Kind
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


class TailItem(NamedTuple):
    """What is known of an entry of the tail before it is written.

    A tuple, since every save makes and compares one for each entry.
    """

    kind: Kind
    key: str
    fragment: Fragment | None = None  # of an encoded tensor


def plan_layout(fragments: Sequence[Fragment], eager: Sequence[bool], tail: Sequence[TailItem]) -> Layout:
    """Plans the layout of `fragments`; fragment i is copied before the trainer continues if `eager[i]`.

    Args:
        tail: in the order of the footer's entries.

    Raises:
        FormatError: fragments of one key disagree on dtype or global shape, or two objects or two streams
            share a key.
    """
    objects, streams = _places(tail, Kind.OBJECT), _places(tail, Kind.STREAM)
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
    transformed = [item.fragment for item in tail if item.fragment is not None]
    encoded = [(fragment, Extent(0, number, fragment.bytes)) for number, fragment in enumerate(transformed)]
    keys = {fragment.key for fragment, _ in encoded}
    if keys:
        _refuse_halves(fragments, keys)
    index = build_index([*entries, *encoded], objects, streams, keys).encode()
    digest = hashlib.sha256(index).digest()[:16]
    return Layout(tuple(order), offsets, align_up(at, ALIGNMENT), index, digest)


def _places(tail: Sequence[TailItem], kind: Kind) -> dict[str, int]:
    keys = [item.key for item in tail if item.kind == kind]
    found = dict.fromkeys(keys, 0)
    if len(found) != len(keys):
        twice = next(key for key in found if keys.count(key) > 1)
        raise FormatError(
            f"{kind.name.lower()} {twice!r} is given twice, and only one of the two could be read back: "
            "rename one"
        )
    return found


def _refuse_halves(fragments: Sequence[Fragment], encoded: Collection[str]) -> None:
    half = next((fragment.key for fragment in fragments if fragment.key in encoded), None)
    if half is not None:
        raise FormatError(
            f"tensor {half!r} is encoded in one part and not in another: transform all of its fragments alike"
        )


def place_objects(sizes: Sequence[int], begin: int) -> tuple[list[int], int]:
    """Returns the offsets of serialized objects from `begin` on, and their end, a multiple of ALIGNMENT."""
    offsets, at = [], begin
    for size in sizes:
        at = align_up(at, SMALL_ALIGNMENT)
        offsets.append(at)
        at += size
    return offsets, align_up(at, ALIGNMENT)
