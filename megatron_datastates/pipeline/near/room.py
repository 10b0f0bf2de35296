"""Room in a near tier: what need not stay there is removed, and nothing that may be the only copy.

Belongs here: which saves of this job go, and files of those that failed. What earlier jobs have left:
earlier_jobs.py.
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
from megatron_datastates.format.directory import COMMON_FILE, METADATA_NAME
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.near.earlier_jobs import EarlierJobs
from megatron_datastates.pipeline.near.near_save import NearSave
from megatron_datastates.pipeline.near.places import published_in, save_ids_in
from megatron_datastates.pipeline.near.removal import remove_saves

logger = logging.getLogger(__name__)


class Room:
    """What one process removes from its near tier.

    Args:
        keep: as many of the newest saves stay.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._earlier_jobs = EarlierJobs()
        self._failed: deque[tuple[Path, SaveId, Callable[[], bytes]]] = deque()  # see note_failed
        self._has_published = False  # this job, near or far. Threads set it, and never take it back

    def begin(self, save: NearSave) -> None:
        """Notes a save that was just published near."""
        self.note_published()
        if save.near is not None:
            self._earlier_jobs.begin(save.near.parent, save.save_id.run_id)

    def note_published(self) -> None:
        """Records that a save of this job is published, wherever its files are."""
        self._has_published = True

    def note_far(self) -> None:
        """Records that a save of this job is far."""
        self.note_published()
        self._earlier_jobs.is_far = True

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
        if self._has_published:
            self._remove_failed()
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
        run_ids = {save.save_id.run_id for save in kept}
        return near is not None and self._earlier_jobs.waits_for_far(near.parent, run_ids)

    def _remove_failed(self) -> None:
        while self._failed:
            folder, save_id, withdraw = self._failed.pop()
            _remove(folder, {save_id}, withdraw())

    def _remove_of_others(self, kept: Sequence[NearSave]) -> None:
        """Removes what earlier jobs have left."""
        newest = kept[-1]
        if newest.near is not None:
            count = len(kept) - self._keep
            for folder, save_ids in self._earlier_jobs.removable(
                newest.near.parent,
                newest.far.parent,
                {save.save_id.run_id for save in kept},
                lambda published: max(published + count, 0),
                lambda: any(save.is_far for save in kept),
            ):
                _remove(folder, save_ids)


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
