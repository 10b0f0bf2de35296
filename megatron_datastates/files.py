"""Opening files that others may have made: regular ones only, and no larger than such a file can honestly be.

Every file of a checkpoint is opened here (data files also by the native module, cuda/os/input_file.cc, which
does the same). A pipe or a device in its place is refused at once, where opening it would wait forever.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_MIB = 1 << 20
# The most bytes of each kind of file that is read whole.
TRACKER_BYTES = 4 << 10  # a number
DOCUMENT_BYTES = _MIB  # metadata.json, zarr's documents
MANIFEST_BYTES = 256 * _MIB  # 16,384 ranks have 3 MiB
INDEX_BYTES = 4 << 30  # a hundred bytes a fragment
METADATA_BYTES = 4 << 30  # DCP's
OBJECT_BYTES = 4 << 30  # common.pt


def open_regular(
    path: str | os.PathLike[str], most_bytes: int | None = None, buffering: int = -1
) -> BinaryIO:
    """Opens a file for reading, without waiting for anybody who would write to it.

    Raises:
        OSError: it cannot be opened, is no regular file, or has more than `most_bytes`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            kind = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
            raise OSError(kind, f"it is no regular file but {_kind(found.st_mode)}", os.fspath(path))
        if most_bytes is not None and found.st_size > most_bytes:
            text = f"it has {found.st_size} bytes, and no such file has more than {most_bytes}"
            raise OSError(errno.EFBIG, text, os.fspath(path))
        return os.fdopen(descriptor, "rb", buffering)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Reads all of a file. Raises OSError as `open_regular`."""
    with open_regular(path, most_bytes) as file:
        return file.read(size_of(file))


def size_of(file: BinaryIO) -> int:
    """Returns how many bytes an open file has."""
    return os.fstat(file.fileno()).st_size


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
