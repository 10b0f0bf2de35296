"""Removes old checkpoints of a run, and files that killed saves left. retention.py decides which.

Protocol, for each directory, oldest first:
  1. list it and read its manifest; then decide again whether it may be removed. A save that begins after
     that has files that are not on the list; the second decision sees the files of one that began before;
  2. rename the manifest to REMOVAL_NAME. If it is not the one that was read, a save has published
     meanwhile: put it back (never in place of a newer one), and keep the directory;
  3. sync the directory: from now on it is not a checkpoint, and REMOVAL_NAME shows the next call why;
  4. remove what is on the list, REMOVAL_NAME last, then the directory itself (what a crash brings back of
     it, a later call removes). If a save has begun meanwhile, its files, the directory and files of others
     are kept; if it has published, also what it shares with the old checkpoint.
A kill leaves a complete checkpoint, or an incomplete directory that a later call removes. Only a kill (or
a crash of the machine) within step 2, while a save publishes at that moment, loses what that save has
published: its files are kept until they are MIN_AGE_SECONDS old, and `repair` rebuilds its manifest.

Left-overs in directories that are kept: left_overs.py.
tests/model/ searches all interleavings of these protocols with saves of ours.

Checkpoints of other formats go by the same protocol, with the format's index (`.metadata`) in place of the
manifest. Their saves give files the same names again, as ours do with files of Megatron's, so step 4 stops at
a file that is not the one that was listed.

Object stores: the same rules, for checkpoints of ours; the protocol is prune_objects.py's.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import DataStatesError, StorageError, describe_error
from megatron_datastates.files import Status, is_object, put_back, status_of
from megatron_datastates.format.directory import REMOVAL_NAME, TORCH_DIST_INDEX
from megatron_datastates.format.values import MANIFEST_NAME, is_own_file_name
from megatron_datastates.pipeline.publishing.presence import files_in_manifest
from megatron_datastates.pipeline.runs.runs import Iteration
from megatron_datastates.pipeline.upkeep.left_overs import content_of, is_gone
from megatron_datastates.pipeline.upkeep.prune_objects import ObjectRemoval
from megatron_datastates.pipeline.upkeep.retention import (
    NO_OTHERS,
    OtherFormats,
    PrunePlan,
    RetentionRules,
    plan_prune,
)


def prune(
    root: str | os.PathLike[str],
    rules: RetentionRules,
    others: OtherFormats = NO_OTHERS,
    *,
    progress: Callable[[Iteration], None] = lambda removed: None,
    stays: Callable[[Iteration, str], None] = lambda iteration, why: None,
    fails: Callable[[Iteration, StorageError], None] | None = None,
    faults: str = "",
) -> list[Iteration]:
    """Removes the checkpoints that `plan_prune` returns; reports each to `progress`; returns those gone.

    What is to be kept since the plan was made, because a save has begun to write to it, for example, is
    reported to `stays`, with the reason; what cannot be removed to `fails`, and the next one is tried.

    Raises:
        StorageError: something cannot be removed, and there is no `fails`. What was removed before stays so.
        DataStatesError: as `plan_prune`, before anything is removed or without `fails`.
    """
    points, gone = Faults(faults), []
    plan = last = plan_prune(root, rules, others)
    if plan.removed:
        rules = rules.by_clock_of(plan.removed[0].path.parent)
    for iteration in plan.removed:
        index_name = TORCH_DIST_INDEX if iteration.format in others else MANIFEST_NAME
        try:
            if is_object(iteration.path):
                why = ObjectRemoval(iteration, points).run(rules.min_age_seconds)
            else:
                removal = _Removal(iteration.path, index_name, points)
                last = plan_prune(root, rules, others, (iteration, last))
                if iteration in last.removed:
                    why = removal.run()
                elif (why := _why_kept(iteration, last)) is None:
                    continue
        except DataStatesError as error:  # of the second decision
            if fails is None:
                raise
            fails(iteration, StorageError(f"{iteration.path} was not removed: {error}"))
            continue
        except OSError as error:
            if is_gone(iteration.path):
                continue  # another call, or the training, has removed it meanwhile
            why_not, state = describe_error(error), _state(iteration.path / index_name)
            failure = StorageError(f"{iteration.path} was not removed: {why_not}. {state}")
            if fails is None:
                raise failure from error
            fails(iteration, failure)
            continue
        if why is not None:
            stays(iteration, why)
            continue
        gone.append(iteration)
        progress(iteration)
    return gone


def _why_kept(iteration: Iteration, again: PrunePlan) -> str | None:
    """Returns why a second decision does not remove one; None if somebody else has removed it."""
    reasons = {seen.path: why for seen, why in again.kept}
    changed = {seen.path: "it has changed since the plan was made" for seen in again.removed}
    return (reasons | changed).get(iteration.path)


def _state(index: Path) -> str:
    try:
        is_there = content_of(index) is not None
    except OSError:
        return "Whether it is still complete cannot be seen now: run `datastates verify`"
    return "It is still complete" if is_there else "It is not a checkpoint any more"


class _Removal:
    """Removes one directory. Step 1 of the protocol is making this.

    Args:
        index_name: the file without which the directory is no checkpoint: our manifest, or DCP's index.
    """

    def __init__(self, path: Path, index_name: str, faults: Faults) -> None:
        self._path, self._index, self._faults = path, path / index_name, faults
        self._is_ours = index_name == MANIFEST_NAME
        self._listed = _listed(path)
        self._content = content_of(self._index)
        self._seen = {*self._listed, REMOVAL_NAME}
        self._published: tuple[Status | None, set[str]] = (None, set())

    def run(self) -> str | None:
        """Does steps 2 to 4 for what was listed and read in step 1; returns why the rest stays."""
        run = self._path.parent
        if not os.access(run, os.W_OK, effective_ids=True):  # only the last step would fail, the files gone
            code = errno.EROFS if os.statvfs(run).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code), str(run))
        self._faults.point("remove manifest")
        if _rename(self._index) and content_of(self._path / REMOVAL_NAME) != self._content:
            _put_back(self._index)
            return "a save has published into it meanwhile"
        self._faults.point("sync removal of manifest")
        sync_directory(self._path)
        for name in [name for name in self._listed if name not in (self._index.name, REMOVAL_NAME)]:
            self._faults.point("remove file")
            if self._is_overwritten(name):
                return "the old checkpoint is gone; a save into it has begun meanwhile"
            if self._is_ours and is_own_file_name(name):
                may_go = name not in self._published_meanwhile()  # by a save that has linked it again
            else:
                may_go = not self._has_begun()
            if may_go:
                _remove_entry(self._path / name)
        if REMOVAL_NAME in self._listed or self._content is not None:
            self._faults.point("remove file")
            _remove_entry(self._path / REMOVAL_NAME)
        self._faults.point("remove directory")
        try:
            self._path.rmdir()
        except OSError:
            if self._has_begun():
                return "the old checkpoint is gone; a save into it has begun meanwhile"
            raise
        return None

    def _is_overwritten(self, name: str) -> bool:
        """Returns whether a file, whose name a save uses again, is another one by now.

        All of another format's are; of ours those of Megatron, which writes them before our first file.
        """
        return status_of(self._path / name) not in (None, self._listed[name])

    def _published_meanwhile(self) -> set[str]:
        """Returns what a manifest names that a save has published since the old one was set aside."""
        status = status_of(self._index)
        if status != self._published[0]:
            self._published = status, files_in_manifest(self._index)
        return self._published[1]

    def _has_begun(self) -> bool:
        """Returns whether a save has made files since the directory was listed; they have new names."""
        names = set(os.listdir(self._path))
        if self._index.name in names:
            return True
        return any(is_own_file_name(name) or not self._is_ours for name in names - self._seen)


def _listed(path: Path) -> dict[str, Status | None]:
    """Returns the names to remove, in order; none if another call has removed the directory."""
    try:
        # Our files last: as long as anything is left, they show the next call that it may be removed.
        names = sorted(os.listdir(path), key=lambda name: (is_own_file_name(name), name))
        return {name: status_of(path / name) for name in names}
    except FileNotFoundError:
        return {}


def _rename(index: Path) -> bool:
    try:
        index.rename(index.with_name(REMOVAL_NAME))
    except FileNotFoundError:
        return False
    return True


def _put_back(index: Path) -> None:
    put_back(index.with_name(REMOVAL_NAME), index)
    sync_directory(index.parent)


def _remove_entry(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
