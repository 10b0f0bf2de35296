"""Samples of host tensors that are transformed, which find changes that came before the bytes were read.

Belongs here: what the native engine's tripwire (cuda/engine/sampling.h) does for tensors that it copies.
Tensors on a device have no samples: reading one would wait for the device.
"""

from __future__ import annotations

import ctypes
import random

import torch

SAMPLE_BYTES = 64
_places = random.Random()  # not the program's generator, whose state is saved


class Samples:
    """64 bytes of each part of a contiguous host tensor, at places chosen anew. Does not hold the tensor.

    Args:
        part_bytes: of each part but the last.
    """

    def __init__(self, tensor: torch.Tensor, part_bytes: int) -> None:
        total, address = tensor.nbytes, tensor.data_ptr()
        self._size = min(SAMPLE_BYTES, total)
        # The trainer waits for this: half a microsecond for each part.
        self._addresses = [
            address + _place(begin, min(begin + part_bytes, total) - self._size)
            for begin in range(0, total, part_bytes)
        ]
        self._found = [ctypes.string_at(at, self._size) for at in self._addresses]

    def are_same(self, part: int) -> bool:
        """Returns whether the sample of a part is what it was. Call it once the part's bytes were read."""
        return ctypes.string_at(self._addresses[part], self._size) == self._found[part]


def _place(first: int, last: int) -> int:
    """Returns a place from `first` to `last`; `last` if a part is shorter than a sample."""
    return last if last <= first else first + int(_places.random() * (last - first + 1))
