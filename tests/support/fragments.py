"""The fragments of an index, one by one."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.format.values import Extent, Fragment


def fragments_of(entry: TensorEntry, key: str = "") -> Iterator[tuple[Fragment, Extent]]:
    """Yields the fragments of a tensor that is not encoded, and their extents."""
    assert not entry.encoded, "only footers have the extents of encoded fragments"
    for i in range(len(entry.files)):
        offset, shape = tuple(entry.offsets[i].tolist()), tuple(entry.shapes[i].tolist())
        extent = Extent(int(entry.files[i]), int(entry.file_offsets[i]), int(entry.file_bytes[i]))
        yield Fragment(key, entry.dtype, entry.global_shape, offset, shape), extent
