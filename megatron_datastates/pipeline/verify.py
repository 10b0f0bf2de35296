"""Whether a checkpoint is whole: every checksum, every extent, every element."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from megatron_datastates.config import Options
from megatron_datastates.engine.reader import Reader, read_header
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.header import HEADER_BYTES
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
    share: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] = lambda bytes_done: None,
    options: Options | None = None,
) -> Verdict:
    """Looks for all faults, not only the first. `quick` leaves out the data itself.

    `share` is (n, of how many): such calls together look at everything, each at other files and tensors.

    Raises:
        DataStatesError: the manifest or the index cannot be used at all.
    """
    options = dataclasses.replace(options or Options.from_environment(), checksums=True)
    checkpoint = Checkpoint.open(directory, options)
    verdict = Verdict(
        len(checkpoint.manifest.files), len(checkpoint.index.tensors), len(checkpoint.index.objects)
    )
    nth, shares = share
    usable = [file for file in range(nth, verdict.files, shares) if _check_file(checkpoint, file, verdict)]
    _check_extents(checkpoint, usable, verdict)
    for key in list(checkpoint.index.tensors)[nth::shares]:
        verdict.faults += coverage_faults(key, checkpoint.index.tensors[key])
    for other in checkpoint.manifest.others[nth::shares]:
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


def _check_extents(checkpoint: Checkpoint, usable: list[int], verdict: Verdict) -> None:
    extents: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for key, entry in checkpoint.index.tensors.items():
        for file, offset, size in zip(entry.files, entry.file_offsets, entry.file_bytes, strict=True):
            extents[int(file)].append((int(offset), int(offset) + int(size), key))
    for key, file in checkpoint.index.objects.items():
        if file not in usable:
            continue
        extent = checkpoint.footer(file).objects.get(key)
        if extent is None:
            verdict.faults.append(f"{checkpoint.file_path(file)} does not hold object {key!r}")
        else:
            extents[file].append((extent.offset, extent.offset + extent.bytes, key))
    for file in usable:
        _check_order(checkpoint, file, sorted(extents[file]), verdict)


def _check_order(
    checkpoint: Checkpoint, file: int, extents: list[tuple[int, int, str]], verdict: Verdict
) -> None:
    at, previous = HEADER_BYTES, "the header"
    for start, end, key in extents:
        if end > checkpoint.footer(file).data_bytes:
            verdict.faults.append(f"{checkpoint.file_path(file)}: {key!r} lies behind the end of the data")
        if start < at and end > start:
            verdict.faults.append(f"{checkpoint.file_path(file)}: {key!r} overlaps {previous!r}")
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
