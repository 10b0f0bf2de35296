"""Files that killed saves have left beside a checkpoint that is kept, and their removal.

Left-overs are in the directory of a complete checkpoint that is kept: data files, indexes and temporary
files of saves that its manifest does not name. They are removed if nothing of their run is younger than
MIN_AGE_SECONDS:
  1. read the manifest, then sync the directory: a crash must not bring back an older one that names them;
  2. right before each file is removed, check again that the manifest is the same, and how old the file is.
A save checks before and after it writes its manifest that all its files are there. So a save that was
silent for longer than MIN_AGE_SECONDS and continues just then fails rather than lose files unseen (except
between the check of step 2 and the removal). Ages are by this machine's clock and the file system's; where
this machine's is ahead, what is removed has to be older by as much.

In an object store, uploads in parts that have not ended are left-overs, too: they are aborted, wherever below
the run they are. A drain whose upload is aborted begins again. Parts of an upload count as files of its run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_datastates import stores
from megatron_datastates.engine.atomic_files import MIN_AGE_SECONDS, sync_directory
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import StorageError
from megatron_datastates.files import METADATA_BYTES, changed_at, is_object, read_regular
from megatron_datastates.format.directory import REMOVAL_NAME
from megatron_datastates.format.values import MANIFEST_NAME, is_own_file_name, save_id_in_name
from megatron_datastates.pipeline.publishing.presence import names_in_manifest


@dataclasses.dataclass(frozen=True)
class UnnamedFile:
    """A file in our format that no manifest names."""

    path: Path
    bytes: int
    age_seconds: float  # of the youngest file of its run in its directory, that no manifest names
    upload: stores.Upload | None = None  # that has not ended: there is no such object


def age_text(seconds: float) -> str:
    """Returns an age for people. An age below 0, by the clock of another machine, counts as 0 s."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 0.0):.0f} s"


def clock_ahead(directory: Path) -> float:
    """Returns by how many seconds this machine's clock is ahead of a file system's, if that can be seen.

    Less than a second counts as none: file systems take the time of the last tick.
    """
    if is_object(directory):
        return 0.0
    with contextlib.suppress(OSError):
        now = time.time()
        with tempfile.TemporaryFile(dir=directory) as file:  # without a name: nothing is left by a kill
            ahead = now - os.fstat(file.fileno()).st_mtime
        return ahead if ahead >= 1.0 else 0.0
    return 0.0


def unnamed_files(path: Path) -> list[UnnamedFile]:
    """Returns the files in our format that a directory's manifest does not name; all if it has none.

    REMOVAL_NAME is one of them only beside the manifest of a save into what a killed prune was removing. In
    an object store, a killed prune leaves both, too.
    """
    named = _named_by(path / MANIFEST_NAME)
    if is_object(path) or not named:
        named = {REMOVAL_NAME, *named}
    unnamed = {name: one for name, one in _own_files(path).items() if name not in named}
    last_change = _last_parts(path) if unnamed else {}
    for name, (_, at) in unnamed.items():
        last_change[_run_of(name)] = max(last_change.get(_run_of(name), 0.0), at)
    now = time.time()
    return [
        UnnamedFile(path / name, size, now - last_change[_run_of(name)])
        for name, (size, _) in sorted(unnamed.items())
    ]


def _run_of(name: str) -> int | str:
    """Returns whose files are as old as the youngest: a save may have linked files of earlier ones."""
    save = save_id_in_name(name)
    return name if save is None else save.run_id


def _last_parts(path: Path) -> dict[int | str, float]:
    """Returns, by run, when the last part of an upload to a directory came that has not ended."""
    if not is_object(path):
        return {}
    try:
        uploads = stores.uploads_below(path)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return {}
    uploads.sort(key=lambda upload: upload.changed_at)
    return {_run_of(upload.path.name): upload.changed_at for upload in uploads}


def _own_files(path: Path) -> dict[str, tuple[int, float]]:
    """Returns the bytes, and the time of the last change, of files in our format."""
    if is_object(path):
        listed = stores.objects_below(path)
        return {one.name: (one.bytes, one.changed_at) for one in listed if is_own_file_name(one.name)}
    files = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if is_own_file_name(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    files[entry.name] = status.st_size, changed_at(status)
    return files


def unfinished_uploads(run: Path) -> tuple[list[UnnamedFile], str]:
    """Returns the uploads of files in our format, to a run's directories, that have not ended.

    Also returns a note if this kind of store does not show them. Raises OSError.
    """
    now = time.time()
    try:
        uploads = stores.uploads_below(run)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return [], (
            f"{run}: unfinished uploads can be listed only in S3; add a lifecycle rule to the bucket that "
            "aborts them after some days"
        )
    return [
        UnnamedFile(one.path, one.bytes, now - one.changed_at, one)
        for one in uploads
        if is_own_file_name(one.path.name) and one.path.parent.parent == run
    ], ""


def under_way(unnamed: Sequence[UnnamedFile], min_age_seconds: float) -> str | None:
    """Returns why a directory with these files is kept, or None if they are old enough."""
    young = min(unnamed, key=lambda file: file.age_seconds, default=None)
    if young is None or young.age_seconds >= min_age_seconds:
        return None
    which = "no manifest names" if is_own_file_name(young.path.name) else "is newer than its index"
    if young.upload:
        which = "is being uploaded"
    return (
        f"a save into it may be under way: {young.path.name}, which {which}, is "
        f"{age_text(young.age_seconds)} old"
    )


def _named_by(manifest: Path) -> set[str]:
    try:
        return names_in_manifest(content_of(manifest))
    except OSError:
        if is_object(manifest):
            raise  # a store that does not answer has not said that there is none
        return set()


def content_of(path: Path) -> bytes | None:
    """Returns the bytes of a regular file; None if it is missing. Raises OSError."""
    try:
        return read_regular(path, METADATA_BYTES)
    except FileNotFoundError:
        return None


def is_gone(directory: Path) -> bool:
    """Returns whether somebody has removed a checkpoint; not whether its storage does not answer."""
    if is_object(directory):
        return False
    try:
        os.lstat(directory)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return bool(os.listdir(directory.parent))  # the newest one stays: an empty root is a lost mount
    except OSError:
        pass
    return False


def remove_left_overs(
    left_overs: Sequence[UnnamedFile],
    min_age_seconds: float = MIN_AGE_SECONDS,
    *,
    gone: list[UnnamedFile] | None = None,
    faults: str = "",
) -> list[UnnamedFile]:
    """Removes what `PrunePlan.left_overs` lists, unless it has changed since; returns what it has removed.

    What somebody else removes meanwhile is left out.

    Args:
        gone: the list that is returned; after an error, too, it has what was removed.

    Raises:
        StorageError: something cannot be removed. What was removed before stays so.
    """
    points, gone = Faults(faults), [] if gone is None else gone
    for directory in dict.fromkeys(file.path.parent for file in left_overs):
        files = [file for file in left_overs if file.path.parent == directory]
        least_age = min_age_seconds + clock_ahead(directory)
        try:
            _abort([file for file in files if file.upload], min_age_seconds, points, gone)
            if all(file.upload for file in files):
                continue
            manifest = content_of(directory / MANIFEST_NAME)
            named = names_in_manifest(manifest)  # what looked for names may have failed to read it
            still = {file.path for file in unnamed_files(directory) if file.age_seconds >= least_age}
            if not is_object(directory):
                sync_directory(directory)
            for file in files:
                if not file.upload and file.path in still and file.path.name not in named:
                    points.point("look at left-over")
                    if _may_go(file.path, manifest, least_age):
                        points.point("remove left-over")
                        with contextlib.suppress(FileNotFoundError):
                            file.path.unlink()
                            gone.append(file)
        except OSError as error:
            if is_gone(directory):
                continue
            raise StorageError(f"left-overs were not removed from {directory}: {error}") from error
    return gone


def _abort(
    uploads: Sequence[UnnamedFile], min_age_seconds: float, points: Faults, gone: list[UnnamedFile]
) -> None:
    """Ends uploads unless parts of them have come meanwhile; adds those that are over to `gone`."""
    if not uploads:
        return
    now = time.time()
    young = {
        one.upload_id
        for one in stores.uploads_below(uploads[0].path.parent)
        if now - one.changed_at < min_age_seconds
    }
    for file in uploads:
        if file.upload is not None and file.upload.upload_id not in young:
            points.point("remove left-over")
            stores.abort(file.upload)
            gone.append(file)


def _may_go(path: Path, manifest: bytes | None, min_age_seconds: float) -> bool:
    """Returns, right before a removal, whether the manifest is unchanged and the file is old enough."""
    if manifest is None or content_of(path.parent / MANIFEST_NAME) != manifest:
        return False
    try:
        changed = max(changed_at(path.lstat()), _last_parts(path.parent).get(_run_of(path.name), 0.0))
        return time.time() - changed >= min_age_seconds
    except FileNotFoundError:
        return False
