"""Checks that a checkpoint is complete and undamaged: every checksum, every extent, every element.

A fault keeps a part of the checkpoint from being loaded as it was saved, or is a contradiction between files.
A note is about something that an undamaged checkpoint may have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from megatron_datastates.config import Options
from megatron_datastates.engine.reader import Reader, read_header, read_small
from megatron_datastates.errors import (
    CorruptDataError,
    DataStatesError,
    EngineError,
    NotACheckpointError,
    StorageError,
    UnsafeObjectError,
    some_of,
)
from megatron_datastates.files import DOCUMENT_BYTES, is_out_of_reach, names_in, status_of
from megatron_datastates.format.directory import (
    BACKEND,
    COMMON_FILE,
    COMMON_STATE_KEY,
    METADATA_NAME,
    iteration_in_name,
)
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.tables import Words
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer import optimizer_state
from megatron_datastates.pipeline.runs.damage import describe_in_file, readable_tensors
from megatron_datastates.pipeline.runs.opening import is_another, read_manifest
from megatron_datastates.pipeline.upkeep.verify_tail import (
    Owners,
    content_faults,
    entries_with_names,
    entry_faults,
)
from megatron_datastates.plan.coverage import coverage_faults
from megatron_datastates.plan.reads import gather_spans, plan_blocks
from megatron_datastates.providers.objects import check_stored
from megatron_datastates.threads import ThreadPool

_MOST_BLOCKS = 16  # of one file that are listed one by one
_UNFINISHED = "{} is {}: the save was killed when its manifest was in place. The checkpoint loads"
_FILE_THREADS = 8  # headers and footers are small, and a network file system answers late
Progress = Callable[[int], None]  # called with how many more bytes are done


@dataclasses.dataclass
class Verdict:
    """How much was checked, and what is wrong."""

    files: int = 0
    tensors: int = 0
    objects: int = 0
    bytes_checked: int = 0
    unchecked_files: int = 0  # saved without checksums
    faults: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)  # unusual, but no fault
    streams: int = 0
    uncovered: str = ""  # what these checks cannot find; empty if a checksum covers everything
    unread: list[str] = dataclasses.field(default_factory=list)  # what cannot be read now, damaged or not

    @property
    def good(self) -> bool:
        return not self.faults and not self.unread

    def add(self, error: Exception) -> None:
        """Adds an error as a fault or, if it shows no damage, to what cannot be read."""
        (self.unread if is_out_of_reach(error) else self.faults).append(str(error))


def verify(
    directory: str | os.PathLike[str],
    *,
    quick: bool = False,
    share: tuple[int, int] = (0, 1),
    progress: Progress = lambda bytes_done: None,
    options: Options | None = None,
) -> Verdict:
    """Finds all faults, not only the first.

    Args:
        quick: leaves out the data itself.
        share: (n, of how many): calls with all n together check everything, each other files and tensors.
        progress: called with how many more bytes have been checked.

    Raises:
        DataStatesError: the manifest or the index cannot be used at all; or the checkpoint was removed, or
            another was published in its place, while it was checked.
    """
    # What near tiers have of it would be read in place of the files that are to be checked.
    options = dataclasses.replace(options or Options.from_environment(), checksums=True, near="")
    checkpoint = Checkpoint.open(directory, options, reuse=False)
    verdict = verify_checkpoint(checkpoint, options, quick=quick, share=share, progress=progress)
    if verdict.faults:
        _require_unchanged(checkpoint)
    return verdict


def _require_unchanged(checkpoint: Checkpoint) -> None:
    """Raises DataStatesError if the checkpoint was removed or replaced: then faults show no damage."""
    path = checkpoint.directory
    try:
        found = read_manifest(path)
    except DataStatesError as error:
        with contextlib.suppress(OSError):
            if status_of(path / MANIFEST_NAME) is None:
                raise NotACheckpointError(f"{path} was removed while it was checked") from error
        return  # that it cannot be read now does not show that it has changed
    if is_another(found, checkpoint.manifest):
        raise StorageError(
            f"{path} was replaced by another save, or keys were removed from it, while it was checked: check "
            "it again",
            code=errno.ESTALE,
            path=str(path),
        )


def verify_checkpoint(
    checkpoint: Checkpoint,
    options: Options,
    *,
    quick: bool = False,
    share: tuple[int, int] = (0, 1),
    progress: Progress = lambda bytes_done: None,
) -> Verdict:
    """Verifies an open checkpoint, whose manifest need not be stored yet. Arguments as in `verify`."""
    index = checkpoint.index
    verdict = Verdict(
        len(checkpoint.manifest.files), len(index.tensors), len(index.objects), streams=len(index.streams)
    )
    nth, shares = share
    usable = _check_files(checkpoint, range(nth, verdict.files, shares), verdict)
    keys = list(index.tensors)[nth::shares]
    errors: dict[str, DataStatesError] = {}
    entries = dict(readable_tensors(index, errors))
    verdict.faults += [str(errors[key]) for key in keys if key in errors]
    faults, owners = entry_faults(checkpoint, entries, usable)
    verdict.faults += faults
    _check_extents(checkpoint, entries, owners, usable, verdict)
    for key in keys:
        if key in entries:
            verdict.faults += coverage_faults(key, entries[key])
    for other in checkpoint.manifest.others[nth::shares]:
        _check_other(checkpoint, other.name, options, verdict)
    if nth == 0:
        _check_surroundings(checkpoint, verdict)
        _check_optimizer_maps(checkpoint, verdict)
    if not quick:
        bad = _check_data(checkpoint, usable, verdict, progress, Reader(options))
        for file in usable:
            verdict.faults += content_faults(checkpoint, file, owners, bad[file])
        _check_objects(checkpoint, list(index.objects)[nth::shares], options, verdict)
    return verdict


# -- structure ------------------------------------------------------------------------------------------


def _check_files(checkpoint: Checkpoint, files: Sequence[int], verdict: Verdict) -> list[int]:
    """Returns the files whose data can be checked: those with a footer."""
    usable = []
    with ThreadPool(_FILE_THREADS, "checks data files") as pool:
        for file, own in zip(files, pool.map(lambda n: _check_file(checkpoint, n), files), strict=True):
            verdict.faults += own.faults
            verdict.unread += own.unread
            if checkpoint.has_footer(file):
                usable.append(file)
    return usable


def _check_file(checkpoint: Checkpoint, file: int) -> Verdict:
    manifest, path, verdict = checkpoint.manifest, checkpoint.file_path(file), Verdict()
    entry = manifest.files[file]
    try:
        footer = checkpoint.footer(file)
    except DataStatesError as error:
        verdict.add(error)
        return verdict
    if footer.world_size != manifest.world_size and footer.save_id == manifest.save_id:
        verdict.faults.append(
            f"{path} was saved by one of {footer.world_size} ranks, its manifest says {manifest.world_size}"
        )
    try:
        header = read_header(path, entry.bytes)
        if (header.save_id, header.rank, header.group) != (footer.save_id, footer.rank, footer.group):
            verdict.faults.append(f"{path}: header and footer are of different saves")
    except DataStatesError as error:
        verdict.add(error)
    return verdict


def _check_surroundings(checkpoint: Checkpoint, verdict: Verdict) -> None:
    """Checks the manifest as a whole, and what else is in the directory."""
    manifest, directory = checkpoint.manifest, checkpoint.directory
    _check_metadata(checkpoint, verdict)
    try:
        for name in extra_names(checkpoint):
            verdict.notes.append(f"{directory / name} does not belong to the checkpoint")
    except OSError as error:  # the directory was removed meanwhile, or a store does not answer
        found = verdict.unread if is_out_of_reach(error) else verdict.faults
        found.append(f"{directory} cannot be listed: {error.strerror}")
    named = iteration_in_name(directory.absolute().name)
    if named is not None and manifest.iteration not in (None, named):
        verdict.notes.append(f"{directory} holds iteration {manifest.iteration}, as its manifest says")


def extra_names(checkpoint: Checkpoint) -> list[str]:
    """Returns the names in its directory that do not belong to it."""
    known = {MANIFEST_NAME, METADATA_NAME, *checkpoint.manifest.names}
    return sorted(set(names_in(checkpoint.directory)) - known)


def _check_metadata(checkpoint: Checkpoint, verdict: Verdict) -> None:
    path = checkpoint.directory / METADATA_NAME
    try:
        content = read_small(path, DOCUMENT_BYTES)
        if not content:  # it may have been killed while it was written
            verdict.notes.append(_UNFINISHED.format(path, "empty"))
            return
        backend = json.loads(content)["sharded_backend"]
    except StorageError as error:
        if error.code != errno.ENOENT:
            verdict.add(error)
        elif _is_megatrons(checkpoint):
            verdict.notes.append(_UNFINISHED.format(path, "missing"))
    except (ValueError, LookupError, TypeError, RecursionError):
        verdict.faults.append(f"{path} is damaged: it names no sharded_backend")
    else:
        if backend != BACKEND:
            verdict.faults.append(f"{path} names the format {backend!r}, and the manifest is of {BACKEND!r}")


def _is_megatrons(checkpoint: Checkpoint) -> bool:
    """Returns whether it has Megatron's common state: no other program writes a metadata.json."""
    return COMMON_STATE_KEY in checkpoint.index.objects or COMMON_FILE in checkpoint.manifest.names


def _check_optimizer_maps(checkpoint: Checkpoint, verdict: Verdict) -> None:
    """Checks that state in buckets can be read by parameter, and notes parameters with state in part only."""
    try:
        states = optimizer_state(checkpoint)
    except (StorageError, CorruptDataError):
        return  # the checks of files and of their blocks report it
    except DataStatesError as error:
        if str(error) not in verdict.faults:
            verdict.add(error)
        return
    partial = [key for key, state in states.items() if state.stored_elements < math.prod(state.global_shape)]
    if partial:
        verdict.notes.append(
            f"{some_of([repr(key) for key in partial], 1)} is stored in part: the rest has no optimizer "
            "state, as when layers are frozen"
        )


def _check_extents(
    checkpoint: Checkpoint,
    entries: dict[str, TensorEntry],
    owners: Owners,
    usable: list[int],
    verdict: Verdict,
) -> None:
    plain = {key: entry for key, entry in entries.items() if not entry.encoded}
    keys, parts = list(plain), [(e.files, e.file_offsets, e.file_bytes) for e in plain.values()]
    for file in usable:
        for key, one in entries_with_names(checkpoint, file, owners):
            keys.append(key)
            place = np.array([[one.offset], [one.stored_bytes]], np.uint64)
            parts.append((np.array([file], np.uint32), place[0], place[1]))
    if not parts:
        return
    numbers = np.repeat(np.arange(len(parts)), [len(files) for files, _, _ in parts])
    files, starts, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
    ends = starts + sizes
    order = np.lexsort((numbers, ends, starts, files))
    bounds = np.searchsorted(files[order], np.arange(len(checkpoint.manifest.files) + 1))
    for file in usable:
        mine = order[bounds[file] : bounds[file + 1]]
        _check_order(checkpoint, file, starts[mine], ends[mine], (keys[n] for n in numbers[mine]), verdict)


def _check_order(
    checkpoint: Checkpoint, file: int, starts: Words, ends: Words, keys: Iterable[str], verdict: Verdict
) -> None:
    """Checks that extents of one file, in its order, do not overlap and stay within the data."""
    path, data_bytes = checkpoint.file_path(file), checkpoint.footer(file).data_bytes
    reached = np.maximum.accumulate(np.append(np.uint64(HEADER_BYTES), ends))[:-1]
    if (ends <= data_bytes).all() and ((starts >= reached) | (ends == starts)).all():
        return
    at, previous = HEADER_BYTES, "the header"
    for start, end, key in zip(starts.tolist(), ends.tolist(), keys, strict=True):
        if end > data_bytes:
            verdict.faults.append(f"{path}: {key!r} lies beyond the end of the data")
        if start < at and end > start:
            verdict.faults.append(f"{path}: {key!r} overlaps {previous!r}")
        if end > at:
            at, previous = end, key


def _check_other(checkpoint: Checkpoint, name: str, options: Options, verdict: Verdict) -> None:
    try:
        data = checkpoint.read_other(name)
    except DataStatesError as error:
        verdict.add(error)
        return
    if name == COMMON_FILE:
        _check_object(data, name, options, verdict)


def _check_objects(checkpoint: Checkpoint, keys: Sequence[str], options: Options, verdict: Verdict) -> None:
    """Checks that a load would accept the objects."""
    for key in keys:
        try:
            data = checkpoint.read_object_bytes(key)
        except EngineError as error:
            verdict.unread.append(f"object {key!r}: {error}")
            continue
        except DataStatesError:
            continue  # the checks of files, of extents and of blocks report it
        _check_object(data, key, options, verdict)


def _check_object(data: bytes, key: str, options: Options, verdict: Verdict) -> None:
    try:
        check_stored(data, key)
    except CorruptDataError as error:
        verdict.faults.append(str(error))
    except UnsafeObjectError as error:
        (verdict.notes if options.trust_objects else verdict.faults).append(str(error))
    except MemoryError:
        verdict.unread.append(f"object {key!r}: there is not enough memory")


# -- data -----------------------------------------------------------------------------------------------


def _check_data(
    checkpoint: Checkpoint, files: Sequence[int], verdict: Verdict, progress: Progress, reader: Reader
) -> dict[int, list[int]]:
    """Checks all blocks in one pass; if a file cannot be read, checks each file alone.

    Returns the corrupt blocks by file.
    """
    bad: dict[int, list[int]] = defaultdict(list)
    checked = [file for file in files if checkpoint.footer(file).block_checksums]
    verdict.unchecked_files += len(files) - len(checked)
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        progress(more)

    try:
        _check_blocks(checkpoint, checked, verdict, count, reader, bad)
    except StorageError:
        progress(-done)
        for file in checked:
            try:
                _check_blocks(checkpoint, [file], verdict, progress, reader, bad)
            except StorageError as error:
                verdict.add(error)
    return bad


def _check_blocks(
    checkpoint: Checkpoint,
    files: Sequence[int],
    verdict: Verdict,
    progress: Progress,
    reader: Reader,
    bad: dict[int, list[int]],
) -> None:
    """Adds what is corrupt to `verdict`, and its blocks to `bad`."""
    sources = [(checkpoint.file_path(file), checkpoint.footer(file)) for file in files]
    reads = [plan_blocks(place, footer.data_bytes) for place, (_, footer) in enumerate(sources)]
    sinks = [np.empty(read.rows, np.uint8) for read in reads]
    spans = gather_spans(reads, [sink.ctypes.data for sink in sinks], [False] * len(reads))
    outcome = reader.read(sources, spans, progress)
    verdict.bytes_checked += outcome.bytes_read
    for place, block in outcome.bad_blocks:
        bad[files[place]].append(block)
    for file in dict.fromkeys(files[place] for place, _ in outcome.bad_blocks):
        path, blocks = checkpoint.file_path(file), bad[file]
        listed = blocks[:_MOST_BLOCKS]
        for block in listed:
            verdict.faults.append(describe_in_file(checkpoint, file, [block]))
        if len(blocks) > len(listed):
            verdict.faults.append(f"{path}: {len(blocks) - len(listed)} more of its blocks are corrupt")
