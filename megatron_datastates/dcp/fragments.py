"""Which stored fragment an item of DCP's load plan means.

Belongs here: finding fragments by offset in an entry of the index. Does not belong here: which bytes of a
fragment are read, and into what (transfers.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_datastates.errors import FormatError
from megatron_datastates.format.tensor_entry import TensorEntry

_MANY = 64  # fragments of a tensor: from so many on, they are looked up in a dictionary


class FragmentFinder:
    """Finds the stored fragment that an item of DCP's plan means.

    Args:
        asked: how many fragments of each tensor are going to be asked for.
    """

    def __init__(self, asked: Mapping[str, int]) -> None:
        self._asked = asked
        self._numbers: dict[str, dict[bytes, int]] = {}  # by key and offset, where many are asked for

    def __call__(self, entry: TensorEntry, index: MetadataIndex) -> int:
        """Returns the number of the fragment with elements at the offset of `index`. Raises FormatError."""
        found = _hinted(entry, index)
        if found is not None:
            return found
        if self._asked.get(index.fqn, 0) < _MANY:
            return _find_fragment(entry, index)
        if index.fqn not in self._numbers:
            # Of several at one offset, the largest counts: the others have no elements.
            order = np.argsort(entry.file_bytes, kind="stable").tolist()
            rows = np.ascontiguousarray(entry.offsets)
            self._numbers[index.fqn] = {rows[number].tobytes(): number for number in order}
        offset = np.array(_offset_of(entry, index), np.int64).tobytes()
        found = self._numbers[index.fqn].get(offset)
        return _find_fragment(entry, index) if found is None else found


def _offset_of(entry: TensorEntry, index: MetadataIndex) -> tuple[int, ...]:
    return tuple(index.offset) if index.offset is not None else (0,) * len(entry.global_shape)


def _hinted(entry: TensorEntry, index: MetadataIndex) -> int | None:
    """Returns the number that the plan names, if that fragment is at its offset and has elements.

    The plan's number counts the fragments in the metadata, which may list only some: it is only a hint.
    """
    hint = index.index
    if hint is None or hint >= len(entry.files) or entry.file_bytes[hint] == 0:
        return None
    return hint if tuple(entry.offsets[hint].tolist()) == _offset_of(entry, index) else None


def _find_fragment(entry: TensorEntry, index: MetadataIndex) -> int:
    """Returns the number of the stored fragment with elements at the offset that DCP's plan has."""
    offset = _offset_of(entry, index)
    found = np.flatnonzero((entry.offsets == np.array(offset, np.int64)).all(axis=1))
    if len(found) == 0:
        raise FormatError(f"tensor {index.fqn!r} has no stored fragment at {offset}")
    return int(found[entry.file_bytes[found].argmax()])
