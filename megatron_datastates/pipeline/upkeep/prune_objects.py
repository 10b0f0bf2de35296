"""Removes a checkpoint from an object store.

Which one: retention.py decides, by the same rules as for directories. A listing shows what there is to decide
about; what is complete, manifests and the objects that they name say, each asked for by its name. A store
that does not answer ends the call: silence is no answer.

Protocol, in place of that of prune.py, because a store has no renames and no directories:
  1. list the objects and read the manifest; then decide again: the tracker neither names the checkpoint nor
     is about to, it is of the same format, and nothing in it, uploads included, is younger than
     MIN_AGE_SECONDS that the manifest does not name;
  2. write what the manifest holds as REMOVAL_NAME: it shows the next call why the manifest is missing, and
     names what a late listing may not show;
  3. read the manifest again. If it is not the one that was read, a save has published meanwhile: remove
     REMOVAL_NAME, and keep the checkpoint. Otherwise remove the manifest: it is no checkpoint any more;
  4. remove what was listed or is named, REMOVAL_NAME last.
A kill leaves a complete checkpoint, or objects that a later call removes. Only a save that publishes between
the two requests of step 3 loses its manifest; its data objects stay.
"""

from __future__ import annotations

from megatron_datastates import stores
from megatron_datastates.engine.faults import Faults
from megatron_datastates.format.directory import METADATA_NAME, REMOVAL_NAME
from megatron_datastates.format.values import MANIFEST_NAME, is_own_file_name
from megatron_datastates.pipeline.publishing.presence import names_in_manifest
from megatron_datastates.pipeline.runs.runs import Iteration, format_answered
from megatron_datastates.pipeline.runs.tracker import read_tracker
from megatron_datastates.pipeline.upkeep.left_overs import (
    content_of,
    under_way,
    unfinished_uploads,
    unnamed_files,
)
from megatron_datastates.pipeline.upkeep.retention import TRACKED_NEXT, may_be_tracked_next


class ObjectRemoval:
    """Removes one checkpoint. Step 1 of the protocol is making this, but for the second decision."""

    def __init__(self, iteration: Iteration, faults: Faults | None = None) -> None:
        self._iteration, self._path, self._faults = iteration, iteration.path, faults or Faults("")
        self._names = {found.name for found in stores.all_below(iteration.path)}
        self._content = content_of(iteration.path / MANIFEST_NAME)
        self._names |= names_in_manifest(self._content)
        self._names |= names_in_manifest(content_of(iteration.path / REMOVAL_NAME))
        self._names.add(METADATA_NAME)
        self._names -= {MANIFEST_NAME, REMOVAL_NAME}

    def run(self, min_age_seconds: float) -> str | None:
        """Does the rest; returns why the checkpoint, or what is left of it, stays."""
        number, tracker = self._iteration.number, read_tracker(self._path.parent)
        if tracker.iteration == number:
            return "the tracker names it"
        marker, manifest = self._path / REMOVAL_NAME, self._path / MANIFEST_NAME
        if may_be_tracked_next(manifest, number, tracker, min_age_seconds):
            return TRACKED_NEXT
        if (format := format_answered(self._path)) != self._iteration.format:
            return f"its format is {format} now"
        uploads, _ = unfinished_uploads(self._path.parent)
        own = [upload for upload in uploads if upload.path.parent == self._path]
        if why := under_way([*unnamed_files(self._path), *own], min_age_seconds):
            return why
        if self._content is not None:
            self._faults.point("write removal")
            stores.write(marker, self._content)
        self._faults.point("remove manifest")
        if content_of(manifest) != self._content:
            stores.remove(marker)
            return "a save has published into it meanwhile"
        stores.remove(manifest)
        self._faults.point("remove file")
        own_names = [name for name in self._names if is_own_file_name(name)]
        stores.remove_all(self._path, sorted(self._names.difference(own_names)))
        self._faults.point("remove file")
        stores.remove_all(self._path, sorted(own_names))
        self._faults.point("remove directory")
        stores.remove(marker)
        return None
