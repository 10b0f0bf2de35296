"""Opens files that somebody else may have made: regular files only, up to a size limit for each kind.

Every file of a checkpoint is opened here; the native module opens data files by the same rules
(cuda/os/input_file.cc). A pipe or a device in a file's place is refused at once, where opening it could wait
forever. Objects of object stores are opened here, too (stores.py).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from megatron_datastates import stores
from megatron_datastates.errors import EngineError, StorageError, is_lack_of_memory
from megatron_datastates.stores import any_path as any_path
from megatron_datastates.stores import is_object as is_object
from megatron_datastates.stores import path_of as path_of

_MIB = 1 << 20
# Size limits, in bytes, of files that are read into memory whole.
TRACKER_BYTES = 4 << 10  # one number
DOCUMENT_BYTES = _MIB  # metadata.json, zarr's documents
MANIFEST_BYTES = 256 * _MIB  # 3 MiB at 16,384 ranks
INDEX_BYTES = 4 << 30  # about 100 bytes per fragment
METADATA_BYTES = 4 << 30  # DCP's
OBJECT_BYTES = 4 << 30  # common.pt
_SAMPLES = 16  # of a file, that say whether it is in memory
_OBJECT_BUFFER_BYTES = _MIB  # the shortest read of an object that is not at its end


def absolute(path: Path) -> Path:
    """Returns the same place whatever directory the program changes to later.

    A relative path stays one where the directory that this process is in was removed: nothing is there, and
    what uses the path says so.
    """
    try:
        return path.absolute()
    except FileNotFoundError:
        return path


def names_in(directory: str | os.PathLike[str]) -> list[str]:
    """Returns the names in a directory, in no order. Raises OSError."""
    return stores.names_below(path_of(directory)) if is_object(directory) else os.listdir(directory)


def folders_in(
    directory: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda name: True
) -> list[str]:
    """Returns the names of the directories, or links to them, in a directory. Raises OSError.

    Args:
        wanted: says of a name whether it is looked at.
    """
    if is_object(directory):
        return list(filter(wanted, stores.folders_below(path_of(directory))))
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries if wanted(entry.name) and entry.is_dir()]


def files_in(directory: str | os.PathLike[str]) -> list[str]:
    """Returns the names of the regular files, or links to them, in a directory. Raises OSError."""
    if is_object(directory):
        place = path_of(directory)
        return sorted({*stores.names_below(place)}.difference(stores.folders_below(place)))
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries if entry.is_file()]


def open_regular(
    path: str | os.PathLike[str], most_bytes: int | None = None, buffering: int = -1
) -> BinaryIO:
    """Opens a file for reading. Never waits for a writer, as opening a pipe would.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or has more than `most_bytes` bytes.
    """
    if is_object(path):
        return _open_object(path, most_bytes)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # a regular file, on which another process has a lease: see input_file.cc
        descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            kind = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
            raise OSError(kind, f"expected a regular file, found {_kind(found.st_mode)}", os.fspath(path))
        _check_size(path, found.st_size, most_bytes)
        return os.fdopen(descriptor, "rb", buffering)
    except BaseException:
        os.close(descriptor)
        raise


def _open_object(path: str | os.PathLike[str], most_bytes: int | None) -> BinaryIO:
    file = stores.ObjectFile(path_of(path))
    _check_size(path, file.size, most_bytes)
    return cast(BinaryIO, io.BufferedReader(file, _OBJECT_BUFFER_BYTES))


def _check_size(path: str | os.PathLike[str], size: int, most_bytes: int | None) -> None:
    if most_bytes is not None and size > most_bytes:
        text = f"expected at most {most_bytes} bytes, found {size}"
        raise OSError(errno.EFBIG, text, os.fspath(path))


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Reads a whole file. Raises OSError as `open_regular` does."""
    if is_object(path):
        place = path_of(path)
        _check_size(path, stores.size_of_object(place), most_bytes)
        return stores.read_whole(place)
    with open_regular(path, most_bytes) as file:
        return file.read(size_of(file))


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a file of any size, in hexadecimal digits. Raises OSError as `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest()


def size_of(file: BinaryIO) -> int:
    """Returns the size of an open file in bytes."""
    raw = getattr(file, "raw", None)
    if isinstance(raw, stores.ObjectFile):
        return raw.size
    return os.fstat(file.fileno()).st_size


def put_back(renamed: Path, path: Path) -> None:
    """Renames a file back to `path`, unless a newer one is there. Raises OSError."""
    try:
        os.link(renamed, path)  # which replaces nothing
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        if not path.exists():
            renamed.rename(path)
    renamed.unlink(missing_ok=True)


def is_in_memory(path: Path) -> bool:
    """Returns whether the page cache has a file, as far as samples show; False where that cannot be asked."""
    try:
        with open_regular(path, buffering=0) as file:
            step, byte = max(size_of(file) // _SAMPLES, 1), bytearray(1)
            return all(
                os.preadv(file.fileno(), [byte], at, os.RWF_NOWAIT) for at in range(0, size_of(file), step)
            )
    except (OSError, AttributeError):  # a page that is not there, or a system without this call
        return False


Status = tuple[int, int, int]  # inode, bytes, time of the last change in ns


def status_of(path: Path) -> Status | None:
    """Returns what shows that a file was not written to again; None if it is gone. Raises OSError."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def status_when_opened(path: Path) -> Status:
    """Returns what `status_of` does, of a regular file: a client of NFS asks the server. Raises OSError."""
    with open_regular(path) as file:
        return status_of_open(file)


def status_of_open(file: BinaryIO) -> Status:
    """Returns what `status_of` does, of an open file. Raises OSError."""
    found = os.fstat(file.fileno())
    return found.st_ino, found.st_size, found.st_mtime_ns


def changed_at(status: os.stat_result) -> float:
    """Returns when a file was written or, if it is in several directories, when it was linked last.

    So a file of an earlier save counts as new where a save that is under way has linked it just now.
    """
    return max(status.st_mtime, status.st_ctime) if status.st_nlink > 1 else status.st_mtime


_NOT_NOW = (
    *(errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),  # of this process or machine
)


def is_denied(error: Exception) -> bool:
    """Returns whether an error means that something cannot be read here and now, which shows no damage."""
    if isinstance(error, EngineError) or is_lack_of_memory(error):
        return True
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    return code in _NOT_NOW


def is_out_of_reach(error: Exception) -> bool:
    """Returns what `is_denied` does, but not of a disk's I/O error: that shows damage, a store's does not."""
    path = getattr(error, "path", "") or getattr(error, "filename", None) or ""
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    return is_denied(error) and (code != errno.EIO or is_object(path))


def real_path(path: Path) -> Path:
    """Returns a path without links. Unlike Path.resolve, raises nothing for links that lead to themselves."""
    return path if is_object(path) else Path(os.path.realpath(path))


def require_utf8(path: Path) -> None:
    """Raises StorageError if the name is not UTF-8, which native code and JSON output need."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        name, encoding = os.fsencode(path), sys.getfilesystemencoding()
        text = f"{name!r} is not UTF-8: rename it, or use a symbolic link"
        if encoding != "utf-8":
            text = f"{name!r}: Python reads names as {encoding} here, expected utf-8: set PYTHONUTF8=1"
        raise StorageError(text) from None


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Locks an open file or directory until it is closed; returns False if another holder has it.

    Returns True, too, where the file system has no locks.

    Args:
        wait: until the other holder has closed it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
