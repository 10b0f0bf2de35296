"""What the near tiers and the directory of a run hold, as a job finds them before its load."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from pathlib import Path

from megatron_datastates.engine.reader import read_small
from megatron_datastates.errors import (
    CorruptDataError,
    DataStatesError,
    FormatError,
    StorageError,
    UnsupportedFormatError,
    describe_error,
)
from megatron_datastates.files import (
    DOCUMENT_BYTES,
    INDEX_BYTES,
    OBJECT_BYTES,
    is_object,
    names_in,
    read_regular,
)
from megatron_datastates.format.directory import (
    BACKEND,
    METADATA_NAME,
    TRACKER_NAME,
    iteration_in_name,
    iteration_name,
)
from megatron_datastates.format.index import Index
from megatron_datastates.format.manifest import FileEntry, Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId, is_data_file_name, save_id_in_name
from megatron_datastates.pipeline.near.copying import is_unread, why_not_whole
from megatron_datastates.pipeline.near.nodes import nodes_in
from megatron_datastates.pipeline.near.places import manifest_in
from megatron_datastates.pipeline.runs.branches import Point, point_in, point_of
from megatron_datastates.pipeline.runs.history import by_branch
from megatron_datastates.pipeline.runs.jobs import JOBS_NAME, Job, jobs_in
from megatron_datastates.pipeline.runs.runs import complete_in, is_published, is_there
from megatron_datastates.pipeline.runs.tracker import require_tracked

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Held:
    """What one node's near tier holds of one checkpoint."""

    name: str  # of its directory
    save_id: SaveId
    point: Point | None  # in the history of its run; None without a manifest
    files: frozenset[str]  # data files
    copies: frozenset[str] = frozenset()  # those of them that are copies of other nodes' (replicas.py)


@dataclasses.dataclass(frozen=True)
class Far:
    """What the run's directory says; rank 0 alone asks. The others only check whether they can read there."""

    tracked: int | None = None  # iteration that would be resumed from
    point: Point | None = None  # the same in the history of the run; None if it is not known
    set_back: tuple[Point, ...] = ()  # newer checkpoints there which the tracker named before
    jobs: tuple[Job, ...] = ()
    has_wanted: bool = False  # the iteration that is to be loaded


@dataclasses.dataclass(frozen=True)
class Node:
    """What one rank says of its node."""

    node: int = 0  # 0: it has no near tier
    held: tuple[Held, ...] = ()
    jobs: tuple[Job, ...] = ()  # that have saved the run, as its near tier's list says
    far: Far = Far()
    error: str = ""  # why nobody knows what the run's directory says


def resumable(run: Path) -> int | None:
    """Returns the iteration that a load resumes from: the tracked one, or the newest complete one.

    The latter, if the tracker is damaged (mcore/training/tracker_recovery.py) or names what is not there.

    Raises:
        StorageError: the run's directory, or a checkpoint in it, is there and cannot be read.
    """
    with contextlib.suppress(FormatError):
        tracked = require_tracked(run / TRACKER_NAME)
        if tracked is None or is_there(run / iteration_name(tracked)):
            return tracked
    try:
        return next(iter(by_branch(run, complete_in(run))), None)
    except OSError as error:
        raise StorageError(f"{error.filename or run} cannot be looked at: {error.strerror}") from error


def require_readable_tracked(run: Path) -> None:
    """Looks at the tracker and at what it names. Raises StorageError: one of them cannot be read."""
    with contextlib.suppress(FormatError):
        tracked = require_tracked(run / TRACKER_NAME)
        if tracked is not None:
            is_there(run / iteration_name(tracked))


def far_in(run: Path, wanted: int | None) -> Far:
    """Returns what the run's directory says.

    Args:
        wanted: an iteration that is to be loaded whatever the tracker names.

    Raises:
        StorageError: it is there and cannot be read.
    """
    tracked, has_wanted = resumable(run), wanted is not None and is_there(run / iteration_name(wanted))
    try:
        jobs = named_jobs(run)
        if tracked is None:
            return Far(None, None, _set_back(run, 0), jobs, has_wanted)  # `release`, or no tracker
        point = point_in(run / iteration_name(tracked), tracked)
        return Far(tracked, point, _set_back(run, tracked), jobs, has_wanted)
    except OSError as error:
        raise StorageError(f"{error.filename or run} cannot be read: {error.strerror}") from error


def _set_back(run: Path, tracked: int) -> tuple[Point, ...]:
    """Returns the newer checkpoints that were published before the tracker got what it says.

    A job writes the tracker after it has published, and names the newest: so somebody has set it back. A job
    that was noted in the list of jobs since then has resumed from what it liked. The same storage has stamped
    all these files. Raises OSError.
    """
    if is_object(run):
        return ()
    points: list[Point | None] = []
    try:
        since = (run / TRACKER_NAME).stat().st_mtime_ns
    except FileNotFoundError:
        return ()
    with contextlib.suppress(FileNotFoundError):
        if (run / JOBS_NAME).stat().st_mtime_ns > since:
            return ()
    for name in names_in(run):
        number = iteration_in_name(name)
        with contextlib.suppress(OSError):  # it has no manifest, or is a link to what is away
            if (number or 0) > tracked and (run / name / MANIFEST_NAME).stat().st_mtime_ns < since:
                points.append(point_in(run / name, number or 0))
    return tuple(filter(None, points))


def named_jobs(folder: Path) -> tuple[Job, ...]:
    """Returns the jobs that a folder's list names; none, with a warning, if the list cannot be used.

    Raises OSError: it cannot be read.
    """
    try:
        return tuple(jobs_in(folder))
    except (FormatError, UnsupportedFormatError) as error:
        logger.warning("which jobs have saved the run is not known from %s: %s", folder, error)
        return ()


def held_in(folder: Path) -> list[Held]:
    """Returns what a folder holds; nothing if it cannot be read."""
    try:
        return _found_in(folder)
    except OSError as error:
        logger.warning("%s in the near tier is left out: %s", folder, error)
        return []


def small_files_of(folder: Path, manifest: Manifest) -> tuple[bytes, dict[str, bytes]]:
    """Reads a checkpoint's index, and the other files that its manifest names; checks each.

    Raises:
        DataStatesError: one is missing or damaged.
    """
    index = read_small(folder / manifest.index.name, INDEX_BYTES)
    others = {other.name: read_small(folder / other.name, OBJECT_BYTES) for other in manifest.others}
    checked = [(entry.name, others[entry.name], entry.sha256) for entry in manifest.others]
    directory = index[: manifest.index.directory_bytes]
    for name, data, sha256 in [(manifest.index.name, directory, manifest.index.sha256), *checked]:
        if hashlib.sha256(data).hexdigest() != sha256:
            raise CorruptDataError(f"{folder / name} is not the file that was saved: its SHA-256 differs")
    decoded = Index.decode(index, str(folder / manifest.index.name), len(manifest.files))
    decoded.preload(decoded.tensors)  # which checks each part
    return index, others


def metadata_of(folder: Path) -> bytes:
    """Returns a checkpoint's metadata.json; nothing, with a warning, if it is damaged or cannot be read.

    It has no checksum. A checkpoint loads without it, but not with one that names another format.
    """
    path = folder / METADATA_NAME
    try:
        data = read_regular(path, DOCUMENT_BYTES)
        if json.loads(data)["sharded_backend"] == BACKEND:
            return data
        reason = f"it does not name {BACKEND} as the format"
    except FileNotFoundError:
        return b""
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        reason = describe_error(error)
    logger.warning("%s in the near tier is damaged, and is left out: %s", path, reason)
    return b""


def _may_be_whole(folder: Path, manifest: Manifest, file: FileEntry) -> bool:
    """Returns whether a data file is whole, or cannot be read now: who copies it notices that."""
    error = why_not_whole(folder / file.name, manifest, file)
    return error is None or is_unread(error)


def _found_in(folder: Path) -> list[Held]:
    """Returns what a folder holds, by save: there may be files of several.

    While an iteration is saved a second time, nodes have different manifests: each save may be complete with
    the files beside the other one's manifest.
    """
    iteration = iteration_in_name(folder.name)
    if iteration is None:
        return []
    manifest = manifest_in(folder)
    present = frozenset(filter(is_data_file_name, os.listdir(folder)))
    ids = {save_id for name in present if (save_id := save_id_in_name(name))}
    held = []
    if manifest is not None:
        held.append(_held_by(folder, manifest, iteration, present))
        ids.discard(manifest.save_id)
    elif is_published(folder):
        logger.warning("%s in the near tier is left out: its manifest cannot be read", folder)
    # Each may have files of earlier ones, too: a manifest says which.
    return held + [Held(folder.name, save_id, None, present) for save_id in ids]


def _held_by(folder: Path, manifest: Manifest, iteration: int, present: frozenset[str]) -> Held:
    """Returns what a folder holds of the save that its manifest names."""
    try:
        small_files_of(folder, manifest)
        point = point_of(manifest, iteration)
    except DataStatesError as error:
        logger.warning("the index in the near tier, %s, is not used: %s", folder, error)
        point = None
    files = [f for f in manifest.files if f.name in present and _may_be_whole(folder, manifest, f)]
    nodes = nodes_in(folder)
    own = {file.rank for file in files} if nodes is None else set(nodes.nodes[nodes.own].ranks)
    names, copies = ([f.name for f in files], [f.name for f in files if f.rank not in own])
    return Held(folder.name, manifest.save_id, point, frozenset(names), frozenset(copies))
