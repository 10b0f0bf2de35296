"""Reading data files: spans in parallel and verified, and headers, footers and small ranges one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from megatron_datastates.config import MIB, Options
from megatron_datastates.engine import native
from megatron_datastates.errors import FormatError, StorageError
from megatron_datastates.files import INDEX_BYTES, is_object, open_regular, read_regular, size_of
from megatron_datastates.format.footer import TRAILER_BYTES, Footer, decode_trailer
from megatron_datastates.format.header import HEADER_BYTES, Header
from megatron_datastates.plan.reads import ReadSpans

if TYPE_CHECKING:
    import torch

SLOT_BYTES = 4 * MIB  # the longest read
_ADVICE = "restore it, or load an older checkpoint"
# A footer has 4 bytes of checksum per block of 1 MiB, and a table of objects.
_DATA_PER_FOOTER_BYTE, _MOST_OF_OBJECTS = MIB // 8, 256 * MIB
_READ_AHEAD_BYTES = 64 << 10  # for small ranges that lie close together


@dataclasses.dataclass(frozen=True)
class ReadOutcome:
    """The result of a read."""

    bytes_read: int  # from files, including the rest of partly needed blocks
    bad_blocks: list[tuple[int, int]]  # (source, block) with a wrong checksum; not delivered


class Reader:
    """Reads with several threads, through staging memory of its own.

    The memory is one slot of SLOT_BYTES per thread (`read_threads`), or two if targets are on a device, for
    reads of any size. It lives as long as this object.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        with native.errors_for_users():
            self._native = native.Reader(
                direct=options.direct_io,
                threads=options.read_threads,
                slot_bytes=SLOT_BYTES,
                driver=options.driver,
                faults=options.faults,
                sysfs=options.sysfs,
            )

    def read(
        self,
        sources: Sequence[tuple[Path, Footer]],
        spans: ReadSpans,
        progress: Callable[[int], None] = lambda bytes_read: None,
        through_cache: Collection[int] = (),
    ) -> ReadOutcome:
        """Reads `spans`, whose `files` are indices of `sources`, in one pass over the files.

        The sources in `through_cache` are read through the page cache, also with direct I/O: that costs the
        processor more, and the disk less where other processes of this machine read the same.

        Every 0.1 seconds `progress` is called with the number of bytes read since its last call.

        Device targets are on the current device. Everything is delivered when this returns; if it raises, for
        an interrupt too, no target is written to afterwards.

        Raises:
            StorageError: a file cannot be read, or ends early.
            EngineError: there is no memory, thread or driver, or the device failed.
        """
        objects = np.array([is_object(path) for path, _ in sources], np.bool_)
        if not objects.any():
            return self._read_files(sources, spans, progress, through_cache)
        of_objects = objects[spans.files]
        found = ReadOutcome(0, [])
        if not of_objects.all():
            of_files = spans.take(np.flatnonzero(~of_objects))
            found = self._read_files(sources, of_files, progress, through_cache)
        bad_blocks = set(found.bad_blocks)

        from megatron_datastates.engine.fetching import read_through_windows  # takes 20 ms, of every command

        def deliver(path: Path, file: int, part: ReadSpans) -> None:
            outcome = self._read_files([(path, sources[file][1])], part, lambda bytes_read: None)
            bad_blocks.update((file, block) for _, block in outcome.bad_blocks)

        bytes_read = read_through_windows(
            [(path, footer.data_bytes) for path, footer in sources],
            spans.take(np.flatnonzero(of_objects)),
            deliver,
            progress,
        )
        return ReadOutcome(found.bytes_read + bytes_read, sorted(bad_blocks))

    def _read_files(
        self,
        sources: Sequence[tuple[Path, Footer]],
        spans: ReadSpans,
        progress: Callable[[int], None],
        through_cache: Collection[int] = (),
    ) -> ReadOutcome:
        checked = self._options.checksums
        files = [
            (str(path), f.data_bytes, f.block_checksums if checked else b"", number in through_cache)
            for number, (path, f) in enumerate(sources)
        ]
        start = functools.partial(
            self._native.start,
            sources=files,
            files=spans.files,
            offsets=spans.offsets,
            row_bytes=spans.row_bytes,
            rows=spans.rows,
            file_steps=spans.file_steps,
            targets=spans.targets,
            target_steps=spans.target_steps,
            flags=spans.on_device * np.uint8(native.DEVICE_FLAG),
            stream=_current_stream() if spans.on_device.any() else 0,
        )
        made: list[native.ReadJob] = []
        reported, is_over = 0, False
        try:
            with native.errors_for_users():  # before any file is opened
                # Started and noted without a step between: at an interrupt there, nobody would end the job.
                made.extend(itertools.starmap(start, [()]))
            (job,) = made
            while not is_over:
                is_over = job.wait(native.SLICE_SECONDS)
                bytes_read = job.result()[0]
                progress(bytes_read - reported)
                reported = bytes_read
        finally:
            for one in made:
                one.close()
        bytes_read, bad_blocks, error = job.result()
        if error is not None:
            raise native.error_of(error)
        return ReadOutcome(bytes_read, bad_blocks)


def is_on_current_device(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is in memory of this thread's current CUDA device."""
    import torch  # here, so that commands that only look need none

    return tensor.is_cuda and tensor.get_device() == torch.cuda.current_device()


def _current_stream() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


def read_small(path: Path, most_bytes: int) -> bytes:
    """Reads a whole file. Raises StorageError, also if it has more than `most_bytes`."""
    with _reading(f"cannot read {path}", path):
        data = read_regular(path, most_bytes)
    return data


def read_ranges(path: Path, expected_bytes: int, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Yields ranges (offset, bytes) of a file, all within `expected_bytes`; fastest in ascending order.

    Raises:
        StorageError: the file cannot be read.
        FormatError: its size is not `expected_bytes`.
    """
    text = f"cannot read {path}"
    with _reading(text, path):
        file = open_regular(path, INDEX_BYTES, _READ_AHEAD_BYTES)
        size = size_of(file)
    with file:
        if size != expected_bytes:
            raise FormatError(f"{path} is damaged: it has {size} bytes, its manifest says {expected_bytes}")
        for offset, count in ranges:
            with _reading(text, path):
                file.seek(offset)
                data = file.read(count)
            yield data


def read_footer(path: Path, expected_bytes: int) -> Footer:
    """Reads the footer of a data file, which the trailer in its last bytes locates.

    Raises:
        StorageError: the file is missing, or its size is not `expected_bytes`, or not what its trailer says.
        FormatError: it was never sealed, or is damaged.
    """
    with _open(path, expected_bytes) as file:
        file.seek(expected_bytes - TRAILER_BYTES)
        offset, total, _ = decode_trailer(file.read(TRAILER_BYTES), str(path))
        if offset + total != expected_bytes:
            raise StorageError(
                f"data file {path} has {expected_bytes} bytes, and its footer says {offset + total}: "
                f"it was truncated or replaced; {_ADVICE}"
            )
        if total > _MOST_OF_OBJECTS + offset // _DATA_PER_FOOTER_BYTE:
            raise FormatError(
                f"{path} is damaged: a footer of {total} bytes is too large for {offset} of data"
            )
        file.seek(offset)
        return Footer.decode(file.read(total), str(path))


def read_header(path: Path, expected_bytes: int) -> Header:
    """Reads the header of a data file. Raises the same errors as read_footer."""
    with _open(path, expected_bytes) as file:
        return Header.decode(file.read(HEADER_BYTES), str(path))


@contextlib.contextmanager
def _open(path: Path, expected_bytes: int) -> Iterator[BinaryIO]:
    """Opens a data file and checks its size; an OSError in the body becomes a StorageError."""
    with _reading(f"data file {path} cannot be opened", path):
        file = open_regular(path)
    with file, _reading(f"data file {path} cannot be read", path):
        size = size_of(file)
        if size != expected_bytes:
            raise StorageError(
                f"data file {path} has {size} bytes, its manifest says {expected_bytes}: "
                f"it was truncated or replaced; {_ADVICE}"
            )
        yield file


@contextlib.contextmanager
def _reading(text: str, path: Path) -> Iterator[None]:
    """Raises a StorageError that begins with `text` in place of an OSError."""
    try:
        yield
    except OSError as error:
        advice = f"; {_ADVICE}" if error.errno == errno.ENOENT else ""
        raise StorageError.of(error, path, f"{text}: {error.strerror}{advice}", "read") from error
