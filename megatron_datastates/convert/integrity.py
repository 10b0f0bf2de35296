"""Checks checkpoints of other formats: what their files hold, and the checksums that they have.

What belongs here: checks that need only a source's interface. Those of our own format:
pipeline/upkeep/verify.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections.abc import Callable

import numpy as np

from megatron_datastates.convert.sinks.sink import Bytes, Progress, stream_fragments
from megatron_datastates.convert.sources.source import RankContents, Source
from megatron_datastates.convert.workers import Workers
from megatron_datastates.errors import CorruptDataError, DataStatesError, UntrustedClassError
from megatron_datastates.files import OBJECT_BYTES, read_regular
from megatron_datastates.format.directory import COMMON_FILE
from megatron_datastates.pipeline.upkeep.verify import Verdict
from megatron_datastates.plan.coverage import coverage_faults
from megatron_datastates.providers.objects import check_stored

_WINDOW_BYTES = 16 << 20  # of each thread


def data_bytes(source: Source) -> int:
    """Returns the size of all stored fragments, which `verify_source` reads."""
    return sum(
        source.fragment(key, number).bytes
        for contents in source.stored_by_rank()
        for key, number in contents.fragments
    )


def verify_source(
    source: Source, *, quick: bool = False, progress: Progress = lambda bytes_done: None
) -> Verdict:
    """Finds all faults of a checkpoint that was opened, not only the first.

    Args:
        quick: reads no tensors and no objects.
        progress: called with how many more bytes have been checked, from any thread.

    Raises:
        DataStatesError: its index does not say where its parts are.
    """
    verdict = Verdict(tensors=len(source.tensors), objects=len(source.objects), streams=len(source.streams))
    for key, entry in source.tensors.items():
        verdict.faults += coverage_faults(key, entry)
    ranks = source.stored_by_rank()
    verdict.files = len(ranks)
    try:
        source.require_files()
        verdict.notes += source.structure_notes()
    except (DataStatesError, OSError) as error:
        verdict.add(error)
    try:
        verdict.faults += source.structure_faults()
    except (DataStatesError, OSError) as error:
        verdict.add(error)
    verdict.uncovered = source.uncovered
    if not quick:
        workers = Workers(os.cpu_count() or 1, progress)
        for _, found in workers.run(range(len(ranks)), lambda n: _check(source, ranks[n], workers.progress)):
            verdict.faults += [fault for fault in found.faults if fault not in verdict.faults]
            verdict.unread += [text for text in found.unread if text not in verdict.unread]
            verdict.notes += found.notes
            verdict.bytes_checked += found.bytes_checked
        if COMMON_FILE in source.other_files:
            _check_object(
                lambda: read_regular(source.other_path(COMMON_FILE), OBJECT_BYTES), COMMON_FILE, verdict
            )
    return verdict


def _check(source: Source, contents: RankContents, progress: Progress) -> Verdict:
    """Reads everything that a rank has stored."""
    verdict, window, without = Verdict(), np.empty(_WINDOW_BYTES, np.uint8), 0
    for key, number in contents.fragments:
        try:
            size = source.fragment(key, number).bytes
            has_checksum = _check_fragment(source, key, number, window, progress)
            without += size > 0 and not has_checksum
            verdict.bytes_checked += size
        except (DataStatesError, OSError) as error:
            verdict.add(error)
    for key in contents.objects:
        _check_object(functools.partial(source.read_object, key), key, verdict)
    if without:
        verdict.notes.append(
            f"{without} of {len(contents.fragments)} fragments beside {contents.fragments[0][0]!r} have "
            "no checksum of their own: they can be read, and nothing more is known of them"
        )
    return verdict


def _check_object(read: Callable[[], bytes], key: str, verdict: Verdict) -> None:
    try:
        check_stored(read(), key)
    except UntrustedClassError as error:
        verdict.notes.append(str(error))
    except (DataStatesError, OSError) as error:
        verdict.add(error)


def _check_fragment(source: Source, key: str, number: int, window: Bytes, progress: Progress) -> bool:
    """Returns whether the fragment has a checksum. Raises DataStatesError if that is wrong."""
    expected, crc = source.fragment_crc(key, number), 0
    with contextlib.closing(stream_fragments(source, [(key, number)], window)) as parts:
        for part, data in parts:
            if expected is not None:
                crc = zlib.crc32(data, crc)
            progress(part.size)
    if expected is not None and crc != expected[0]:
        raise CorruptDataError(f"{expected[1]}: it has CRC-32 {crc:08x}, expected {expected[0]:08x}")
    return expected is not None
