"""Uploads of data files to object stores: every block's checksum is compared as the client reads it.

The client cuts large files into parts, sends several at once, and sends again what failed (its own settings
say how). An object appears when all its parts are there, so a killed upload leaves no object; the parts that
it does leave in the store, `datastates prune` removes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from megatron_datastates import stores
from megatron_datastates.config import MIB
from megatron_datastates.errors import DataStatesError
from megatron_datastates.seekable import SeekableReads

ReadInto = Callable[[int, memoryview], None]  # an offset, and what its bytes go to
_BUFFER_BYTES = 8 * MIB  # the shortest read, where a client asks for less
_LONGEST_BYTES = 64 * MIB  # of one read: what a client that asks for everything gets


class _Checked(SeekableReads):
    """A data file as a client reads it: any bytes, each of them checked.

    Attributes:
        error: the first one that reading met; the client hides it in one of its own.
    """

    def __init__(self, size: int, read_into: ReadInto) -> None:
        super().__init__(size)
        self.error: Exception | None = None
        self._read_into = read_into

    def read_at(self, offset: int, target: memoryview) -> int:
        view = target[:_LONGEST_BYTES]
        try:
            self._read_into(offset, view)
        except Exception as error:
            self.error = self.error or error
            raise
        return len(view)


def upload_checked(target: Path, size: int, read_into: ReadInto) -> None:
    """Makes an object of `size` bytes, which `read_into` reads and checks, in any order of the client.

    Raises:
        DataStatesError, OSError: what `read_into` raised; the object is not made.
        OSError: the store did not take it.
    """
    source = _Checked(size, read_into)
    try:
        stores.upload(target, cast(BinaryIO, io.BufferedReader(source, _BUFFER_BYTES)))
    except OSError:
        if source.error is not None:
            raise source.error from None
        raise
    if source.error is not None:  # a client that went on without the rest
        raise source.error
    found = stores.size_of_object(target)
    if found != size:
        raise DataStatesError(f"{target} has {found} bytes after its upload, expected {size}")


def address_of(view: memoryview) -> int:
    """Returns the address of a writable buffer."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
