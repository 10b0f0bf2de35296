"""Whether a checkpoint is whole: every checksum, every extent, every element."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable

import numpy as np

from megatron_datastates.config import Options
from megatron_datastates.engine.reader import Reader, read_header
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.index import Index, TensorEntry
from megatron_datastates.format.tables import Words
from megatron_datastates.format.values import BLOCK_BYTES, Extent
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.plan.coverage import coverage_faults
from megatron_datastates.plan.reads import gather_runs, plan_extent

_STEP_BYTES = 64 * BLOCK_BYTES  # read at a time


@dataclasses.dataclass
class Verdict:
    """What was looked at and what is wrong with it."""

    files: int = 0
    tensors: int = 0
    objects: int = 0
    bytes_checked: int = 0
    unchecked_files: int = 0  # saved without checksums
    faults: list[str] = dataclasses.field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.faults


def verify(
    directory: str | os.PathLike[str],
    *,
    quick: bool = False,
    progress: Callable[[int], None] = lambda bytes_done: None,
    options: Options | None = None,
) -> Verdict:
    """Looks for all faults, not only the first. `quick` leaves out the data itself.

    Raises:
        DataStatesError: the manifest or the index cannot be used at all.
    """
    options = dataclasses.replace(options or Options.from_environment(), checksums=True)
    checkpoint = Checkpoint.open(directory, options, share=False)
    verdict = Verdict(
        len(checkpoint.manifest.files), len(checkpoint.index.tensors), len(checkpoint.index.objects)
    )
    usable = [file for file in range(verdict.files) if _check_file(checkpoint, file, verdict)]
    entries = _read_entries(checkpoint.index, verdict)
    _check_extents(checkpoint, entries, usable, verdict)
    for key, entry in entries.items():
        verdict.faults += coverage_faults(key, entry)
    for other in checkpoint.manifest.others:
        _check_other(checkpoint, other.name, verdict)
    reader = Reader(options)
    for file in usable if not quick else []:
        _check_data(checkpoint, file, verdict, progress, reader)
    return verdict


def _check_file(checkpoint: Checkpoint, file: int, verdict: Verdict) -> bool:
    """Whether the file's data can be looked at: that takes its footer."""
    try:
        footer = checkpoint.footer(file)
    except DataStatesError as error:
        verdict.faults.append(str(error))
        return False
    try:
        header = read_header(checkpoint.file_path(file), checkpoint.manifest.files[file].bytes)
        if (header.save_id, header.rank) != (footer.save_id, footer.rank):
            verdict.faults.append(f"{checkpoint.file_path(file)}: header and footer are of different saves")
    except DataStatesError as error:
        verdict.faults.append(str(error))
    return True


def _read_entries(index: Index, verdict: Verdict) -> dict[str, TensorEntry]:
    """All that can be read."""
    with contextlib.suppress(DataStatesError):  # told below, with what else there is
        index.preload(index.tensors)
    entries = {}
    for key in index.tensors:
        try:
            entries[key] = index.tensors[key]
        except DataStatesError as error:
            verdict.faults.append(str(error))
    return entries


def _check_extents(
    checkpoint: Checkpoint, entries: dict[str, TensorEntry], usable: list[int], verdict: Verdict
) -> None:
    keys, parts = list(entries), [(e.files, e.file_offsets, e.file_bytes) for e in entries.values()]
    known = set(usable)
    for key, file in checkpoint.index.objects.items():
        if file not in known:
            continue
        extent = checkpoint.footer(file).objects.get(key)
        if extent is None:
            verdict.faults.append(f"{checkpoint.file_path(file)} does not hold object {key!r}")
        else:
            keys.append(key)
            place = np.array([[extent.offset], [extent.bytes]], np.uint64)
            parts.append((np.array([file], np.uint32), place[0], place[1]))
    if not parts:
        return
    owners = np.repeat(np.arange(len(parts)), [len(files) for files, _, _ in parts])
    files, starts, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
    ends = starts + sizes
    order = np.lexsort((owners, ends, starts, files))
    bounds = np.searchsorted(files[order], np.arange(len(checkpoint.manifest.files) + 1))
    for file in usable:
        mine = order[bounds[file] : bounds[file + 1]]
        _check_order(checkpoint, file, starts[mine], ends[mine], (keys[n] for n in owners[mine]), verdict)


def _check_order(
    checkpoint: Checkpoint, file: int, starts: Words, ends: Words, keys: Iterable[str], verdict: Verdict
) -> None:
    """Extents of one file in its order: each begins where those before have ended."""
    path, data_bytes = checkpoint.file_path(file), checkpoint.footer(file).data_bytes
    reached = np.maximum.accumulate(np.append(np.uint64(HEADER_BYTES), ends))[:-1]
    if (ends <= data_bytes).all() and ((starts >= reached) | (ends == starts)).all():
        return
    at, previous = HEADER_BYTES, "the header"
    for start, end, key in zip(starts.tolist(), ends.tolist(), keys, strict=True):
        if end > data_bytes:
            verdict.faults.append(f"{path}: {key!r} lies behind the end of the data")
        if start < at and end > start:
            verdict.faults.append(f"{path}: {key!r} overlaps {previous!r}")
        if end > at:
            at, previous = end, key


def _check_other(checkpoint: Checkpoint, name: str, verdict: Verdict) -> None:
    try:
        checkpoint.read_other(name)
    except DataStatesError as error:
        verdict.faults.append(str(error))


def _check_data(
    checkpoint: Checkpoint, file: int, verdict: Verdict, progress: Callable[[int], None], reader: Reader
) -> None:
    footer = checkpoint.footer(file)
    if not footer.block_checksums:
        verdict.unchecked_files += 1
        return
    sink = np.empty(min(_STEP_BYTES, footer.data_bytes), np.uint8)
    for start in range(0, footer.data_bytes, _STEP_BYTES):
        stretch = Extent(file, start, min(_STEP_BYTES, footer.data_bytes - start))
        if not _check_stretch(checkpoint, stretch, sink, verdict, reader):
            return
        verdict.bytes_checked += stretch.bytes
        progress(stretch.bytes)


def _check_stretch(
    checkpoint: Checkpoint, stretch: Extent, sink: np.ndarray, verdict: Verdict, reader: Reader
) -> bool:
    path = checkpoint.file_path(stretch.file)
    runs = gather_runs([plan_extent(dataclasses.replace(stretch, file=0))], [sink.ctypes.data], [False])
    try:
        outcome = reader.read([(path, checkpoint.footer(stretch.file))], runs)
    except DataStatesError as error:
        verdict.faults.append(str(error))
        return False
    for _, block in outcome.bad_blocks:
        keys = ", ".join(checkpoint.keys_in_blocks(stretch.file, [block])[:4]) or "no tensor"
        verdict.faults.append(
            f"{path}: the block at byte offset {block * BLOCK_BYTES} is corrupt; it holds data of {keys}"
        )
    return True
