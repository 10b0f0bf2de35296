"""Room in a near tier: what need not stay there is removed, and nothing that may be the only copy.

Checkpoints that earlier jobs have left may be the only copies of what is not in --save. So they stay until a
save of this job is there, but for those that --save has, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.directory import COMMON_FILE, METADATA_NAME, iteration_in_name
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.near.near_save import NearSave
from megatron_datastates.pipeline.near.places import folders_of_run, published_in, run_ids_in, save_ids_in
from megatron_datastates.pipeline.near.removal import remove_saves
from megatron_datastates.pipeline.runs.history import by_branch
from megatron_datastates.pipeline.runs.runs import is_published

logger = logging.getLogger(__name__)
_Folder = tuple[Path, set[SaveId]]  # and whose files are in it


class Room:
    """What one process removes from its near tier.

    Args:
        keep: as many of the newest saves stay.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._failed: deque[tuple[Path, SaveId, Callable[[], bytes]]] = deque()  # see note_failed
        self._own_run_id = 0
        self._earlier = frozenset[int]()  # run ids of the jobs before
        # Threads set these, and never take them back.
        self._has_published = False  # this job, near or far
        self._is_far = False  # some save of this job

    def begin(self, save: NearSave) -> None:
        """Notes a save that was just published near; with the first one, which jobs had files there before.

        After a restart within the process, what it has saved before counts as another job's.
        """
        self.note_published()
        if save.near is not None and save.save_id.run_id != self._own_run_id:
            self._own_run_id = save.save_id.run_id
            self._earlier = run_ids_in(save.near.parent) - {self._own_run_id}

    def note_published(self, *, is_far: bool = False) -> None:
        """Records that a save of this job is published, wherever its files are."""
        self._has_published = True
        if is_far:
            self._is_far = True

    def note_failed(self, near: Path, save_id: SaveId, withdraw: Callable[[], bytes]) -> None:
        """Notes a failed save: its files in this folder go, once another one is published.

        Args:
            withdraw: waits until the save stores nothing more there, and returns the manifest that was there
                before: it is put back.
        """
        self._failed.append((near, save_id, withdraw))

    def make(
        self,
        kept: Sequence[NearSave],
        is_busy: Callable[[NearSave], bool],
        drain_now: Callable[[NearSave], None],
    ) -> list[NearSave]:
        """Removes all but the newest saves, once they are far; returns those of `kept` that are gone.

        Args:
            kept: the saves of this job that are near, oldest first.
            is_busy: returns whether a save is on its way.
            drain_now: called with a save that has to be far before another one may go.
        """
        while self._has_published and self._failed:
            folder, save_id, withdraw = self._failed.pop()
            _remove(folder, {save_id}, withdraw())
        if not kept:
            return []
        gone = []
        for number, save in enumerate(kept[: max(len(kept) - self._keep, 0)]):
            later = kept[number + 1 :]
            if is_busy(save) or (save.is_drained and not any(one.is_far for one in [save, *later])):
                continue
            if save.has_copies and not (
                any(one.has_copies for one in later) or any(one.is_far for one in [save, *later])
            ):
                # The loss of a node would cost all of the later ones; and there may be no room for copies
                # before this one goes.
                drain_now(later[-1])
                continue
            gone.append(save)
            if save.near is not None:
                _remove(save.near, {save.save_id})
            if save.publisher is not None and not save.is_drained:
                _remove_unused(save.far)
        self._remove_of_others(kept)  # also what they left in the folders of these
        return gone

    def waits_for_far(self, kept: Sequence[NearSave]) -> bool:
        """Returns whether what earlier jobs left may go once one of these saves is known to be far."""
        near = kept[-1].near if kept else None
        return near is not None and not self._is_far and any(self._left_folders(near.parent, kept))

    def _remove_of_others(self, kept: Sequence[NearSave]) -> None:
        """Removes what earlier jobs have left and nobody needs any more."""
        near, far = kept[-1].near, kept[-1].far.parent
        if near is None:
            return
        published, others = self._left_folders(near.parent, kept)
        if not published and not others:
            return
        if not self._is_far and any(save.is_far for save in kept):
            self._is_far = True
        if self._is_far:  # of what has no manifest here, another node may have it
            for folder, save_ids in others:
                _remove(folder, save_ids)
        count = len(published) + len(kept) - self._keep
        if count > 0:
            for folder, save_ids in self._not_needed(published, near.parent, far)[:count]:
                _remove(folder, save_ids)

    def _left_folders(self, near: Path, kept: Sequence[NearSave]) -> tuple[dict[int, _Folder], list[_Folder]]:
        """Returns folders with files of earlier jobs: published ones by iteration, and others.

        Folders with a file of any other job are not among them: it may still be running. Nor are those of
        saves of this process before a restart, which it removes itself.
        """
        earlier = self._earlier.difference(save.save_id.run_id for save in kept)
        published: dict[int, _Folder] = {}
        others: list[_Folder] = []
        with contextlib.suppress(OSError):
            for folder in folders_of_run(near):
                iteration, ids = iteration_in_name(folder.name), save_ids_in(folder)
                # One without files may belong to a save that has just begun.
                if ids and all(save_id.run_id in earlier for save_id in ids):
                    if iteration is not None and is_published(folder):
                        published[iteration] = folder, ids
                    else:
                        others.append((folder, ids))
        return published, others

    def _not_needed(self, published: dict[int, _Folder], near: Path, far: Path) -> list[_Folder]:
        """Returns what no load needs any more, in the order in which it may be removed."""
        paths = {n: path for n, (path, _) in published.items()}
        if not self._is_far:
            paths = {n: path for n, path in paths.items() if _are_same(path, far / path.name)}
        return [published[n] for n in reversed(by_branch(near, paths, len(paths)))]


def _are_same(near: Path, far: Path) -> bool:
    own = published_in(near)
    return own is not None and own == published_in(far)


def _remove(folder: Path, save_ids: Collection[SaveId], replaced: bytes = b"") -> None:
    """Removes saves' files from a folder, and the folder if no other save has any.

    Args:
        replaced: the manifest of another save, in whose place is that of these, if that save is still there.
    """
    try:
        if replaced and published_in(folder) in save_ids:
            _put_back(folder, replaced)
        remove_saves(folder, save_ids)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s was not removed from the near tier: %s", folder, error)


def _put_back(folder: Path, manifest: bytes) -> None:
    with contextlib.suppress(DataStatesError):  # it is damaged
        save_id = Manifest.decode_save_id(manifest, str(folder))
        if save_id in save_ids_in(folder):
            write_whole(folder / MANIFEST_NAME, manifest, Faults(""), save_id)


def _remove_unused(directory: Path) -> None:
    """Removes what Megatron made for a save that stayed near, unless there is more than that."""
    with contextlib.suppress(OSError):
        names = os.listdir(directory)  # once: another job may begin to save there
        if set(names) <= {COMMON_FILE, METADATA_NAME}:
            for name in names:
                (directory / name).unlink()
            directory.rmdir()
