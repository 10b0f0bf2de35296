"""A file that a program may read anywhere, of which each kind knows only how to read a part."""

from __future__ import annotations

import errno
import io
import os
from typing import Any


class SeekableReads(io.RawIOBase):
    """An unbuffered file of known size.

    Attributes:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._at = 0

    def read_at(self, offset: int, target: memoryview) -> int:
        """Reads a part that is within the file. Returns how many bytes were read, at least one."""
        raise NotImplementedError  # each kind has its own

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self.size - self._at, 0)]
        got = self.read_at(self._at, view) if view else 0
        self._at += got
        return got

    def readall(self) -> bytes:
        """Reads the rest, in as few parts as `read_at` takes: RawIOBase would ask for 8 kB at a time."""
        data = bytearray(max(self.size - self._at, 0))
        done = 0
        while done < len(data):
            got = self.readinto(memoryview(data)[done:])
            if got == 0:
                break
            done += got
        del data[done:]
        return bytes(data)
