"""Checks the tails of data files: that index and footers agree, and that contents are what was saved.

Belongs here: what `verify` reports of entries and of content digests. Does not belong here: blocks, extents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from megatron_datastates.errors import CorruptDataError, FormatError, StorageError, UnsupportedFormatError
from megatron_datastates.format.codecs import NONE
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.tail import NOT_RECORDED, Kind, TailEntry, describe
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.format.values import BLOCK_BYTES, Extent
from megatron_datastates.pipeline.loading.decoding import resolve
from megatron_datastates.pipeline.loading.entries import Read, read_stream
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.runs.damage import touches
from megatron_datastates.plan.frames import FramedBox
from megatron_datastates.plan.reads import ScheduledRead, plan_bytes, plan_extent

_WINDOW_BYTES = 16 << 20  # whole blocks
Owners = Mapping[tuple[int, int], str]  # the keys of encoded fragments, by data file and number


def entry_faults(
    checkpoint: Checkpoint, tensors: Mapping[str, TensorEntry], usable: Collection[int]
) -> tuple[list[str], Owners]:
    """Returns where index and footers disagree, and which keys the encoded fragments have.

    Args:
        usable: data files whose footers have been read.
    """
    faults, owners = [], dict[tuple[int, int], str]()
    for file, what, key in _missing(checkpoint, usable):
        faults.append(f"{checkpoint.file_path(file)} does not hold {what} {key!r}")
    for key, entry in tensors.items():
        for fragment in np.flatnonzero(np.isin(entry.files, list(usable))).tolist() if entry.encoded else ():
            box = plan_bytes(entry, fragment, 0, 0)
            assert isinstance(box, FramedBox) and isinstance(box.entry, int)
            try:
                resolve(checkpoint, box)
            except (FormatError, UnsupportedFormatError) as error:
                faults.append(f"tensor {key!r}: {error}")
            other = owners.setdefault((box.file, box.entry), key)
            if other != key:
                faults.append(
                    f"{checkpoint.file_path(box.file)}: its encoded fragment {box.entry} belongs to both "
                    f"{other!r} and {key!r}"
                )
    return faults, owners


def _missing(checkpoint: Checkpoint, usable: Collection[int]) -> Iterator[tuple[int, str, str]]:
    """Yields (data file, what, key) for objects and streams that the footer of their data file lacks."""
    for key, file in checkpoint.index.objects.items():
        if file in usable and key not in checkpoint.footer(file).objects:
            yield file, "object", key
    for key, file in checkpoint.index.streams.items():
        if file in usable and key not in checkpoint.footer(file).streams:
            yield file, "stream", key


def entries_with_names(checkpoint: Checkpoint, file: int, owners: Owners) -> Iterator[tuple[str, TailEntry]]:
    """Yields the entries of a data file, each with the key of what it holds."""
    number = 0
    for entry in checkpoint.footer(file).entries:
        if entry.kind == Kind.FRAGMENT:
            yield owners.get((file, number), describe(entry)), entry
            number += 1
        else:
            yield entry.name, entry


def content_faults(
    checkpoint: Checkpoint, file: int, owners: Owners, bad_blocks: Collection[int]
) -> Iterator[str]:
    """Decodes all entries of a data file; yields those that are not what was saved.

    Args:
        bad_blocks: of the file; what lies in them is not decoded, since it has been reported.
    """
    path, reader = checkpoint.file_path(file), checkpoint.new_reader()
    bad = np.array(sorted(bad_blocks), np.int64)

    def read(reads: list[ScheduledRead]) -> None:
        checkpoint.read(reads, reader)

    for key, entry in entries_with_names(checkpoint, file, owners):
        if (entry.codec == NONE and entry.sha256 == NOT_RECORDED) or touches(
            entry.offset, entry.offset + entry.stored_bytes, bad
        ):
            continue
        try:
            for _ in read_stream(read, file, entry):
                pass
        except (CorruptDataError, FormatError, UnsupportedFormatError) as error:
            yield f"{path}: {key!r}: {error}"
        except StorageError:
            return  # the check of blocks reports it
    expected = checkpoint.manifest.files[file].content_sha256
    if expected and not bad_blocks:
        found = _content_sha256(checkpoint, file, read)
        if found != expected:
            yield f"{path}: the SHA-256 of its content is {found}, its manifest says {expected}"


def _content_sha256(checkpoint: Checkpoint, file: int, read: Read) -> str:
    """Returns the content digest of a data file, which is the same for equal state, whichever save wrote it.

    It is over the SHA-256s of the file's blocks, the first of which is without the header.
    """
    digest, end = hashlib.sha256(), checkpoint.footer(file).data_bytes
    window = np.empty(min(_WINDOW_BYTES, end), np.uint8)
    for begin in range(0, end, _WINDOW_BYTES):
        part = window[: min(_WINDOW_BYTES, end - begin)]
        read([ScheduledRead(plan_extent(Extent(file, begin, len(part))), part.ctypes.data)])
        for at in range(0, len(part), BLOCK_BYTES):
            first = at if begin + at else HEADER_BYTES
            digest.update(hashlib.sha256(part[first : at + BLOCK_BYTES]).digest())
    return digest.hexdigest()
