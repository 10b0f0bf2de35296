"""Reads and writes one tensor in an archive of torch.save (an uncompressed zip file), in parts.

What belongs here: where the bytes of its elements are. What does not: which archive holds which tensor.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import mmap
import os
import types
import zipfile
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from megatron_datastates.convert.sources.tensor_records import dump_tensor_record, load_tensor_record
from megatron_datastates.errors import DataStatesError, FormatError, StorageError
from megatron_datastates.format.values import element_bytes
from megatron_datastates.plan.boxes import contiguous_strides
from megatron_datastates.providers.members import Member, find_members
from megatron_datastates.providers.tensors import dtype_name
from megatron_datastates.seekable import SeekableReads

Bytes = npt.NDArray[np.uint8]
_WHOLE_BYTES = 256 << 10  # archives up to this size are read in one go


@dataclasses.dataclass(frozen=True)
class Archive:
    """A tensor in an open file."""

    file: BinaryIO
    data_offset: int  # of the first element, in bytes from the start of the file
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    where: str
    crc: int | None  # CRC-32 of its bytes in row-major order, if the archive has that
    flipped: tuple[int, ...] = ()  # bytes of an element that hold signs of a conjugated or negated view

    def read_into(self, begin: int, target: Bytes) -> None:
        """Reads bytes [begin, begin + len(target)) of the tensor, whole elements in row-major order."""
        item = element_bytes(self.dtype)
        if self.strides == contiguous_strides(self.shape) or math.prod(self.shape) <= 1:
            read_exactly(self.file, self.data_offset + begin, target, self.where)
        else:
            with self._mapped() as memory:
                found = _elements(self._view(memory), begin // item, (begin + len(target)) // item)
            target[:] = found.view(np.uint8)
        self._flip(target.view(f"V{item}"))

    def read_box(self, begin: Sequence[int], target: np.ndarray) -> None:
        """Reads the box at element `begin` into `target`, which has the box's shape and void elements."""
        if self.strides != contiguous_strides(self.shape) or not _is_contiguous(target.shape, self.shape):
            box = tuple(slice(b, b + n) for b, n in zip(begin, target.shape, strict=True))
            with self._mapped() as memory:
                target[...] = self._view(memory)[box]
            self._flip(target)
            return
        data = target if target.flags.c_contiguous else np.empty_like(target, order="C")
        at = sum(b * stride for b, stride in zip(begin, self.strides, strict=True)) * target.itemsize
        self.read_into(at, data.reshape(-1).view(np.uint8))
        if data is not target:
            target[...] = data

    def _flip(self, elements: np.ndarray) -> None:
        """Changes signs of what is stored to those of the values."""
        for byte in self.flipped:
            elements[..., None].view(np.uint8)[..., byte] ^= np.uint8(0x80)

    def _mapped(self) -> mmap.mmap:
        """Maps the file: pages of a mapping, unlike a buffer, can be dropped by the system."""
        return mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)

    def _view(self, memory: mmap.mmap) -> np.ndarray:
        """Returns the tensor as an array on the mapping, which cannot be closed while the array exists."""
        item = element_bytes(self.dtype)
        strides = [stride * item for stride in self.strides]
        return np.ndarray(self.shape, f"V{item}", memory, self.data_offset, strides)


def _is_contiguous(lengths: Sequence[int], shape: Sequence[int]) -> bool:
    """Returns whether a box of a tensor in row-major order is contiguous."""
    rest = list(itertools.dropwhile(lambda pair: pair[0] == 1, zip(lengths, shape, strict=True)))
    return all(length == size for length, size in rest[1:])


def _elements(view: np.ndarray, first: int, last: int) -> np.ndarray:
    """Copies elements [first, last) in row-major order, and no others."""
    if view.ndim <= 1:
        return view[first:last].copy()
    row = math.prod(view.shape[1:])
    begin, end = -(-first // row), last // row  # of whole rows
    if end < begin:  # within one row
        return _elements(view[end], first - end * row, last - end * row)
    parts = [view[begin:end].flatten()]  # a copy, as the mapping is closed
    if first < begin * row:
        parts.insert(0, _elements(view[begin - 1], first - (begin - 1) * row, row))
    if end * row < last:
        parts.append(_elements(view[end], 0, last - end * row))
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def open_archive(file: BinaryIO, offset: int, size: int, where: str) -> Archive:
    """Opens the archive in bytes [offset, offset + size) of a file.

    Raises:
        FormatError: it is damaged or compressed, or is not an archive of one plain tensor.
        StorageError: the file ends within the archive.
    """
    file_bytes = os.fstat(file.fileno()).st_size
    if file_bytes < offset + size:
        raise StorageError(
            f"{where}: the file is truncated: it has {file_bytes} bytes, expected at least {offset + size}"
        )
    stream: BinaryIO = _View(file, offset, size)  # type: ignore[assignment]
    if size <= _WHOLE_BYTES:
        stream = io.BytesIO(stream.read())
    try:
        return _parse(find_members(stream), stream, file, offset, where)
    except DataStatesError as error:
        raise error if str(error).startswith(where) else FormatError(f"{where}: {error}") from error


def _parse(members: dict[str, Member], stream: BinaryIO, file: BinaryIO, offset: int, where: str) -> Archive:
    record = load_tensor_record(_read_member(members["data.pkl"], stream, "data.pkl"), where)
    order = members.get("byteorder")
    if order is not None and _read_member(order, stream, "byteorder") != b"little":
        raise FormatError("it was written on a machine with another byte order, expected little-endian")
    member, dtype = members.get(f"data/{record.storage.name}"), dtype_name(record.dtype)
    item = element_bytes(dtype)
    reach = sum((n - 1) * stride for n, stride in zip(record.shape, record.strides, strict=True))
    needed = (record.storage_offset + reach + 1) * item if math.prod(record.shape) else 0
    if member is None or member.size < needed:
        raise FormatError(f"its storage has {member.size if member else 0} bytes, expected at least {needed}")
    first = offset + member.offset + record.storage_offset * item
    is_whole = record.storage_offset == 0 and member.size == math.prod(record.shape) * item
    in_order = record.strides == contiguous_strides(record.shape)
    # The zip file has the CRC of the storage, not of the tensor.
    crc = member.crc if is_whole and in_order and not record.flipped else None
    return Archive(file, first, dtype, record.shape, record.strides, where, crc, record.flipped)


def _read_member(member: Member, stream: BinaryIO, name: str) -> bytes:
    stream.seek(member.offset)
    data = stream.read(member.size)
    member.check(data, name)
    return data


def read_exactly(file: BinaryIO, offset: int, target: Bytes, where: str) -> None:
    """Reads bytes [offset, offset + len(target)) of a file. Raises StorageError if it ends before."""
    view, at = memoryview(target), offset
    while view:
        got = os.preadv(file.fileno(), [view], at)
        if got == 0:
            raise StorageError(f"{where}: the file is truncated within the tensor's data")
        view, at = view[got:], at + got


class _View(SeekableReads):
    """Part of a file, presented as a file."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        super().__init__(size)
        self._file, self._offset = file, offset

    def read_at(self, offset: int, target: memoryview) -> int:
        return os.preadv(self._file.fileno(), [target], self._offset + offset)


class Appendable(Protocol):
    """What an archive is written to."""

    def write(self, data: Any, /) -> int: ...

    def flush(self) -> None: ...


def write_archive(file: Appendable, dtype: str, shape: Sequence[int], data: Iterable[Bytes]) -> None:
    """Appends the archive that torch.save would write of a contiguous tensor, whose bytes come in order."""
    # In what cannot tell or seek, offsets count from the archive's start, and checksums follow the data, as
    # torch.save writes them, too.
    appended = types.SimpleNamespace(write=file.write, flush=file.flush)
    with zipfile.ZipFile(appended, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), dump_tensor_record(dtype, shape))
        archive.writestr(zipfile.ZipInfo("archive/byteorder"), b"little")
        entry = zipfile.ZipInfo("archive/data/0")
        entry.file_size = math.prod(shape) * element_bytes(dtype)
        with archive.open(entry, "w") as stream:
            for part in data:
                stream.write(part.data)
        archive.writestr(zipfile.ZipInfo("archive/version"), b"3\n")
