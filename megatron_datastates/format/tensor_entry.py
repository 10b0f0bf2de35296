"""What the index has of one tensor: its dtype and global shape, and where its fragments lie.

Belongs here: the decoded form, which plans of reads use. Does not belong here: its bytes and checks of them
(stored_entries.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megatron_datastates.format.tables import Words, column_count
from megatron_datastates.format.values import Extent, Fragment


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One global tensor of d dimensions, and its n stored fragments."""

    dtype: str
    global_shape: tuple[int, ...]
    offsets: npt.NDArray[np.int64]  # (n, d), elements
    shapes: npt.NDArray[np.int64]  # (n, d), elements
    files: npt.NDArray[np.uint32]  # (n,), positions in the manifest's list
    file_offsets: npt.NDArray[np.uint64]  # (n,), bytes; if encoded, numbers of entries of the file's footer
    file_bytes: npt.NDArray[np.uint64]  # (n,), decoded
    encoded: bool = False

    def fragments(self, key: str) -> Iterator[tuple[Fragment, Extent]]:
        """Yields the fragments and their extents, one by one. Only of a tensor that is not encoded."""
        assert not self.encoded, "only footers have the extents of encoded fragments"
        for i in range(len(self.files)):
            offset, shape = tuple(self.offsets[i].tolist()), tuple(self.shapes[i].tolist())
            extent = Extent(int(self.files[i]), int(self.file_offsets[i]), int(self.file_bytes[i]))
            yield Fragment(key, self.dtype, self.global_shape, offset, shape), extent

    def take(self, numbers: npt.NDArray[np.intp]) -> TensorEntry:
        """Returns the tensor with some of its fragments, in this order."""
        names = ("offsets", "shapes", "files", "file_offsets", "file_bytes")
        return dataclasses.replace(self, **{name: getattr(self, name)[numbers] for name in names})

    def columns(self) -> Words:
        """Returns the fragments as the columns of a section."""
        dims = len(self.global_shape)
        columns = np.empty((column_count(dims), len(self.files)), np.uint64)
        columns[:dims], columns[dims : 2 * dims] = self.offsets.T, self.shapes.T
        columns[-2], columns[-1] = self.files, self.file_offsets
        return columns
