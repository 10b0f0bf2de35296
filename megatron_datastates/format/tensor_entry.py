"""What the index has of one tensor: its dtype and global shape, and where its fragments lie.

Belongs here: the decoded form, which plans of reads use. Does not belong here: its bytes and checks of them
(stored_entries.py).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from megatron_datastates.format.tables import Words, column_count


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
