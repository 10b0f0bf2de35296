"""Saves that were copied, until rank 0 has published them in their directories.

Belongs here: in which order they are published, and what becomes of one that cannot be. Copying them, and
when to look again: drain.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.files import is_object
from megatron_datastates.pipeline.near.near_save import NearSave
from megatron_datastates.pipeline.near.places import arrived_bytes
from megatron_datastates.pipeline.publishing.presence import holds_exactly, missing_data_files
from megatron_datastates.pipeline.runs.history import has_later_save

logger = logging.getLogger(__name__)
REPORTED_ATTEMPT = 3  # of what fails
_INSISTING_ATTEMPTS = 5  # the first one to write the tracker although what it names cannot be read


class PublishQueue:
    """Saves that wait for other nodes' files, or for another attempt to publish them.

    The drain's thread alone calls its methods.

    Args:
        pause_seconds: returns how long a save waits after that many failed attempts.
        before: called before saves are published: writes what must be known by then.
        published: called with each save that is published.
        progress: called when files have arrived since the last look.

    Attributes:
        saves: oldest first. Replaced as a whole: other threads read it without a lock.
    """

    def __init__(
        self,
        faults: Faults,
        pause_seconds: Callable[[int], float],
        *,
        before: Callable[[], None],
        published: Callable[[NearSave], None],
        progress: Callable[[], None],
    ) -> None:
        self.saves: list[NearSave] = []
        self._faults = faults
        self._pause_seconds = pause_seconds
        self._before = before
        self._published = published
        self._progress = progress

    def add(self, save: NearSave) -> None:
        """Adds a save whose files of this node are in its directory."""
        self.saves = [*self.saves, save]

    def publish_what_is_complete(self, *, looks_at_bytes: bool) -> None:
        """Publishes the saves whose files have all arrived.

        Args:
            looks_at_bytes: a file that grows is progress, too.
        """
        # With one that is tried again, all are, and older ones wait for it: else the tracker would name an
        # older one for a while, as if somebody had set it back (holdings.py).
        is_time = any(map(self._is_to_be_tried_again, self.saves))
        due = [save for save in self.saves if is_time or not save.attempts]
        # The newest is looked at first, so that files that arrive meanwhile cannot change the order.
        complete = [save for save in reversed(due) if self._is_complete(save, looks_at_bytes)]
        failed = max((n for n, save in enumerate(self.saves) if save.attempts), default=-1)
        complete = [save for save in complete if is_time or self.saves.index(save) > failed]
        if complete:
            self._before()
        for save in reversed(complete):
            try:
                self._publish(save)
            except Exception as error:
                self._note_failure(save, error)
                continue
            for older in self.saves[: self.saves.index(save)]:
                older.overtaken_by = save.name
            self._remove(save)
            if not save.is_superseded:
                self._published(save)

    def _remove(self, save: NearSave) -> None:
        self.saves = [one for one in self.saves if one is not save]

    def _is_complete(self, save: NearSave, looks_at_bytes: bool) -> bool:
        try:
            before = set(save.arrived)
            missing = missing_data_files(save.far, save.small_files.manifest, save.arrived)
            if not missing and before and not is_object(save.far):  # they may have been taken away since
                save.arrived -= before
                missing = missing_data_files(save.far, save.small_files.manifest, save.arrived)
            is_seen = looks_at_bytes and bool(missing)
            there = arrived_bytes(save.far, save.save_id, save.arrived) if is_seen else 0
        except Exception as error:
            self._note_failure(save, error)
            return False
        if (len(missing), there) != save.seen:
            save.seen = (len(missing), there)
            self._progress()
        if missing:
            save.attempts = 0
            self._abandon_if_overtaken(save)
        return not missing

    def _abandon_if_overtaken(self, save: NearSave) -> None:
        """Abandons a save that lacks files, if a newer one was complete.

        Each node copies its saves in order: what this one lacks never comes.
        """
        if not save.overtaken_by:
            return
        logger.warning(
            "%s is not published in %s: files are missing there, and %s is complete",
            save.name,
            save.far,
            save.overtaken_by,
        )
        self._remove(save)

    def _note_failure(self, save: NearSave, error: Exception) -> None:
        """Notes that a save could not be published. Others do not wait for its next attempt."""
        save.attempts, save.failed_at = save.attempts + 1, time.monotonic()
        if save.attempts == REPORTED_ATTEMPT:
            logger.error(
                "%s is not published in %s yet: %s; it is tried again, and %s stays until then",
                save.name,
                save.far,
                error,
                save.near or "what other nodes have of it",
            )

    def _is_to_be_tried_again(self, save: NearSave) -> bool:
        waited = time.monotonic() - save.failed_at
        return save.attempts > 0 and waited >= self._pause_seconds(save.attempts)

    def _publish(self, save: NearSave) -> None:
        """Publishes a save, and makes the tracker name it, unless a later save is there by now."""
        assert save.publisher is not None
        with save.publishing:  # a save of this process may go there directly
            save.is_superseded = has_later_save(save.far, save.save_id)
            if save.is_superseded:
                logger.warning("%s is not published in %s: a later save is there", save.name, save.far)
                return
            for name, content in save.others.items():
                if not holds_exactly(save.far / name, content):
                    write_whole(save.far / name, content, self._faults, save.save_id)
            save.publisher.publish()
            save.tracker_attempts += 1
            save.published(save.save_id, save.tracker_attempts < _INSISTING_ATTEMPTS)
