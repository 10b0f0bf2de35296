"""Compares a converted checkpoint with its source, byte for byte, before it is published."""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import zlib
from collections.abc import Sequence

import numpy as np

from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.planning import Plan
from megatron_datastates.convert.sinks.sink import Progress, stream_fragments
from megatron_datastates.convert.sources.source import RankContents, Source
from megatron_datastates.convert.workers import Workers
from megatron_datastates.errors import CorruptDataError
from megatron_datastates.files import OBJECT_BYTES, read_regular
from megatron_datastates.format.directory import COMMON_FILE
from megatron_datastates.providers.members import corrupt_member


def verify_conversion(plan: Plan, window_bytes: int, numbers: Sequence[int], workers: Workers) -> None:
    """Reads files `numbers` of the plan again, source and result, and compares them.

    Also checks the checksums of the source that ordinary reading leaves unchecked.

    Raises:
        CorruptDataError: they differ, or the source does not match its own checksums.
    """
    written = open_source(plan.work_directory)
    _compare_tensors(plan.source, written)
    workers.run(
        numbers, lambda n: _compare(plan.source, written, plan.files[n], window_bytes, workers.progress)
    )
    for name in plan.source.other_files:
        if not filecmp.cmp(plan.source.other_path(name), plan.work_directory / name, shallow=False):
            raise _difference(f"file {name!r}")
        if name == COMMON_FILE:
            _check_object(read_regular(plan.source.other_path(name), OBJECT_BYTES), f"file {name!r}")


def _difference(what: str) -> CorruptDataError:
    return CorruptDataError(
        f"{what} differs from its source when read back, so nothing was published: check the disk, and "
        "that nothing else writes to the source, and convert again"
    )


def _compare_tensors(source: Source, written: Source) -> None:
    """Compares keys, dtypes and shapes, also of tensors that have no fragment in any file."""
    before, after = (
        {key: (entry.dtype, entry.global_shape) for key, entry in one.tensors.items()}
        for one in (source, written)
    )
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            raise _difference(f"tensor {key!r}")


def _compare(
    source: Source, written: Source, contents: RankContents, window_bytes: int, progress: Progress
) -> None:
    _compare_fragments(source, written, contents, window_bytes, progress)
    for key in contents.objects:
        data = source.read_object(key)
        if data != written.read_object(key):
            raise _difference(f"object {key!r}")
        _check_object(data, f"object {key!r}")
    for key in contents.streams:
        if _digest(source, key) != _digest(written, key):
            raise _difference(f"stream {key!r}")


def _compare_fragments(
    source: Source, written: Source, contents: RankContents, window_bytes: int, progress: Progress
) -> None:
    # Of several at one offset, DCP's index has one: those without elements are perhaps not there.
    fragments = [one for one in contents.fragments if source.fragment(*one).bytes]
    result = [(key, _find_fragment(source, written, key, number)) for key, number in fragments]
    windows = (np.empty(window_bytes, np.uint8), np.empty(window_bytes, np.uint8))
    expected: tuple[int, str] | None = None  # the fragment's CRC-32, and where it lies
    crc = 0
    with (
        contextlib.closing(stream_fragments(source, fragments, windows[0])) as first,
        contextlib.closing(stream_fragments(written, result, windows[1])) as second,
    ):
        for (part, before), (_, after) in zip(first, second, strict=True):
            if part.begin == 0:
                expected, crc = source.fragment_crc(part.key, part.fragment), 0
            if expected is not None:
                crc = zlib.crc32(before, crc)
                if part.begin + part.size == source.fragment(part.key, part.fragment).bytes:
                    _check_crc(crc, *expected)
            if not np.array_equal(before, after):
                raise _difference(f"tensor {part.key!r}")
            progress(part.size)


def _digest(source: Source, key: str) -> bytes:
    digest = hashlib.sha256()
    for buffer in source.open_stream(key):
        digest.update(buffer)
    return digest.digest()


def _check_crc(found: int, expected: int, where: str) -> None:
    if found != expected:
        raise CorruptDataError(
            f"{where}: the source has CRC-32 {found:08x}, expected {expected:08x}, so it is corrupt and "
            "nothing was published: convert another checkpoint"
        )


def _check_object(data: bytes, what: str) -> None:
    if name := corrupt_member(data):
        raise CorruptDataError(
            f"{what}: the CRC-32 of its {name} differs in the source, so it is corrupt and nothing was "
            "published: convert another checkpoint"
        )


def _find_fragment(source: Source, written: Source, key: str, number: int) -> int:
    """Returns the number of the same fragment in `written`. Raises CorruptDataError if it is not there."""
    fragment, entry = source.fragment(key, number), written.tensors[key]
    same = (entry.offsets == np.array(fragment.offset, np.int64)).all(axis=1) & (
        entry.shapes == np.array(fragment.shape, np.int64)
    ).all(axis=1)
    found = np.flatnonzero(same)
    if not len(found) or (entry.dtype, entry.global_shape) != (fragment.dtype, fragment.global_shape):
        raise CorruptDataError(
            f"tensor {key!r} was written without its fragment {fragment.shape} at {fragment.offset}, so "
            "nothing was published: please report this as a bug"
        )
    return int(found[0])
