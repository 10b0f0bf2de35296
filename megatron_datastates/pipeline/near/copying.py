"""Copies of data files from one tier to another: every block's checksum is compared on the way.

A copy gets its name when it is complete and durable, so a file with its name needs no second look.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatron_datastates.config import MIB, Options
from megatron_datastates.engine.atomic_files import appearing, opened
from megatron_datastates.engine.faults import Faults
from megatron_datastates.engine.reader import Reader, read_footer
from megatron_datastates.errors import DataStatesError, FailedCallError, StorageError
from megatron_datastates.files import is_object, open_regular
from megatron_datastates.flag import Flag
from megatron_datastates.format.footer import Footer
from megatron_datastates.format.manifest import FileEntry, Manifest
from megatron_datastates.format.values import Extent
from megatron_datastates.pipeline.near.uploading import address_of, upload_checked
from megatron_datastates.pipeline.runs.opening import check_identity
from megatron_datastates.plan.reads import gather_spans, plan_extent

PIECE_BYTES = 16 * MIB  # a multiple of a block's bytes
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
# Errors that show that a file is missing, or is no regular file; 0: its size or content shows it.
_NOT_THERE = (0, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL)


class SourceError(StorageError):
    """What is to be copied is missing or damaged: trying again does not help."""


class Limit:
    """A limit on bytes a second, shared by threads. 0: no limit."""

    def __init__(self, bytes_per_second: int) -> None:
        self._lock = threading.Lock()
        self._is_lifted = Flag()
        self.set(bytes_per_second)

    def set(self, bytes_per_second: int) -> None:
        """Sets another limit; 0 also releases the threads that wait."""
        with self._lock:
            self._rate, self._free_at = bytes_per_second, time.monotonic()
        if not bytes_per_second:
            self._is_lifted.set()
        elif self._is_lifted.is_set():
            self._is_lifted = Flag()

    def take(self, count: int) -> None:
        """Waits until `count` more bytes may be moved."""
        with self._lock:
            if not self._rate:
                return
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + count / self._rate
        self._is_lifted.wait(min(max(begin - time.monotonic(), 0.0), threading.TIMEOUT_MAX))


def is_whole(path: Path, manifest: Manifest, entry: FileEntry) -> bool:
    """Returns whether a data file is there, sealed, and the one that a manifest names; reads its footer."""
    return why_not_whole(path, manifest, entry) is None


def why_not_whole(path: Path, manifest: Manifest, entry: FileEntry) -> DataStatesError | None:
    """Returns the error if it is not; see `is_unread`."""
    try:
        check_identity(manifest, entry, read_footer(path, entry.bytes), path)
    except DataStatesError as error:
        return error
    return None


def is_unread(error: DataStatesError | None) -> bool:
    """Returns whether an error shows neither that a file is missing nor that it is damaged."""
    return isinstance(error, FailedCallError) and error.code not in _NOT_THERE


def read_extent(reader: Reader, path: Path, footer: Footer, extent: Extent, address: int) -> str:
    """Reads bytes of a data file to an address. Returns which blocks are damaged; empty if none is."""
    outcome = reader.read([(path, footer)], gather_spans([plan_extent(extent)], [address], [False]))
    blocks = ", ".join(str(block) for _, block in outcome.bad_blocks)
    return f"the checksum of block {blocks} (1 MiB) differs" if blocks else ""


class Copier:
    """Copies data files with one set of options. Thread-safe."""

    def __init__(self, options: Options, faults: Faults, limit: Limit) -> None:
        self._options = options
        self._faults = faults
        self._limit = limit

    def copy(
        self,
        source: Path,
        target: Path,
        manifest: Manifest,
        entry: FileEntry,
        moved: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Copies one data file, unless `target` is that file already.

        Args:
            moved: called with how many more bytes are written.

        Raises:
            SourceError: the file is missing, damaged, or another one than the manifest names.
            StorageError: it could not be read.
            OSError: the copy could not be written; nothing is left of it, but perhaps parts of an object
                (uploading.py).
        """
        if is_whole(target, manifest, entry):
            return
        footer, sealed = self._footer(source, manifest, entry)
        if is_object(target):
            self._upload(source, target, footer, sealed, moved)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with appearing(target, manifest.file_save_id(entry)) as temporary:
            self._write(source, temporary, footer, sealed, moved)
            self._faults.point("drain rename")

    def _upload(
        self, source: Path, target: Path, footer: Footer, sealed: bytes, moved: Callable[[int], None]
    ) -> None:
        reader = Reader(self._options)

        def read_into(at: int, view: memoryview) -> None:
            self._limit.take(len(view))
            data = view[: max(footer.data_bytes - at, 0)]
            if data:
                self._read_checked(reader, source, footer, Extent(0, at, len(data)), address_of(data))
            begin = max(at - footer.data_bytes, 0)
            view[len(data) :] = sealed[begin : begin + len(view) - len(data)]
            self._faults.point("drain write")
            moved(len(view))

        upload_checked(target, footer.data_bytes + len(sealed), read_into)

    def _read_checked(
        self, reader: Reader, source: Path, footer: Footer, extent: Extent, address: int
    ) -> None:
        self._faults.point("drain read")
        damage = read_extent(reader, source, footer, extent, address)
        if damage:
            raise SourceError(f"{source} is corrupt: {damage}")

    def _footer(self, source: Path, manifest: Manifest, entry: FileEntry) -> tuple[Footer, bytes]:
        """Returns the footer of a file, decoded and as it is stored."""
        try:
            with open_regular(source) as file:
                file.seek(entry.footer_offset)
                sealed = file.read(entry.bytes - entry.footer_offset + 1)
        except OSError as error:
            kind = SourceError if error.errno == errno.ENOENT else StorageError
            raise kind(f"{source} cannot be read: {error.strerror}") from error
        try:
            footer = Footer.decode(sealed, str(source))
            check_identity(manifest, entry, footer, source)
        except DataStatesError as error:
            raise SourceError(str(error)) from error
        return footer, sealed

    def _write(
        self,
        source: Path,
        temporary: Path,
        footer: Footer,
        sealed: bytes,
        moved: Callable[[int], None],
    ) -> None:
        reader = Reader(self._options)
        buffer = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8)  # begins at a page, for direct I/O
        address = buffer.ctypes.data
        with new_file(temporary) as write:
            for at in range(0, footer.data_bytes, PIECE_BYTES):
                size = min(PIECE_BYTES, footer.data_bytes - at)
                self._limit.take(size)
                self._read_checked(reader, source, footer, Extent(0, at, size), address)
                self._faults.point("drain write")
                write(memoryview(buffer[:size]), at)
                moved(size)
            for at in range(0, len(sealed), PIECE_BYTES):
                piece = sealed[at : at + PIECE_BYTES]
                buffer[: len(piece)] = np.frombuffer(piece, np.uint8)
                write(memoryview(buffer[: len(piece)]), footer.data_bytes + at)
                moved(len(piece))
            self._faults.point("drain sync")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Callable[[memoryview, int], None]]:
    """Makes a new file; yields a function that writes at an offset. Bypasses the page cache where possible.

    The file is durable at the end.
    """
    flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
    with opened(path, flags) as buffered, contextlib.ExitStack() as stack:
        descriptor = buffered
        with contextlib.suppress(OSError):
            descriptor = stack.enter_context(opened(path, os.O_WRONLY | os.O_DIRECT))

        def write(data: memoryview, offset: int) -> None:
            nonlocal descriptor
            while data:
                try:
                    count = os.pwrite(descriptor, data, offset)
                except OSError as error:
                    if error.errno not in _NO_DIRECT or descriptor == buffered:
                        raise
                    descriptor = buffered
                    continue
                data, offset = data[count:], offset + count

        yield write
        os.fsync(buffered)
