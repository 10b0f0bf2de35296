"""Branches of a run: what a job resumed from, and which of two checkpoints follows the other.

A job that resumes from an older iteration than the newest one begins a branch. Each manifest names what its
job resumed from, and the jobs before it (its ancestors), so a checkpoint is known to follow another one
without a look at any clock.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import msgspec

from megatron_datastates.errors import DataStatesError
from megatron_datastates.files import MANIFEST_BYTES, read_regular
from megatron_datastates.format.manifest import Ancestor, Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId

MOST_ANCESTORS = 1000  # that a manifest names; the oldest ones are left out

_UNKNOWN = Ancestor(0)  # there are others before, which nobody knows


def _last_of(ancestors: tuple[Ancestor, ...] | None) -> SaveId | None:
    return SaveId.parse(ancestors[-1].save_id) if ancestors else None


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a job resumed from.

    Attributes:
        iteration: 0 if it began anew.
        ancestors: of its checkpoints, oldest first; None if they are not known.
    """

    iteration: int = 0
    ancestors: tuple[Ancestor, ...] | None = ()

    @property
    def resumed(self) -> SaveId | None:
        """That save; None if it is not known, or was in another format."""
        return _last_of(self.ancestors)


@dataclasses.dataclass(frozen=True)
class Point:
    """A checkpoint's place in the history of its run.

    Attributes:
        save_id: of the training, also if the checkpoint was rewritten since; None if it is not known then, or
            if the checkpoint is in another format.
        ancestors: None if they are not known.
        is_without_optimizer: whether the optimizer's state was removed since, so that no job resumes from it.
    """

    iteration: int
    save_id: SaveId | None
    ancestors: tuple[Ancestor, ...] | None
    is_without_optimizer: bool = False

    @property
    def origin(self) -> int:
        """Iteration that its job resumed from; the one before it, if that is not known."""
        if self.ancestors is None:
            return max(self.iteration - 1, 0)
        return self.ancestors[-1].iteration if self.ancestors else 0

    @property
    def resumed(self) -> SaveId | None:
        """Save that its job resumed from; None if that is not known, or was in another format."""
        return _last_of(self.ancestors)

    @property
    def knows_its_ancestors(self) -> bool:
        """Whether `ancestors` has all of them, with their save ids."""
        ancestors = self.ancestors
        return ancestors is not None and len(ancestors) < MOST_ANCESTORS and all(a.save_id for a in ancestors)

    def follows(self, other: Point) -> bool:
        """Returns whether the job of this checkpoint, or one before it, has passed through the other one."""
        if other.save_id is None:
            return any(not one.save_id and one.iteration == other.iteration for one in self.ancestors or ())
        if self.save_id is not None and self.save_id.run_id == other.save_id.run_id:
            return self.save_id.ordinal > other.save_id.ordinal
        reached = self.reached.get(other.save_id.run_id)
        return reached is not None and reached >= other.save_id.ordinal

    def is_apart_from(self, other: Point) -> bool:
        """Returns whether two checkpoints are known to be on different branches that leave one ancestor.

        Ancestors that are not known are older than all known ones.
        """
        is_in_line = self.save_id == other.save_id or self.follows(other) or other.follows(self)
        return not is_in_line and not self.reached.keys().isdisjoint(other.reached)

    @functools.cached_property  # each of a run's points may be asked about each of its jobs
    def reached(self) -> dict[int, int]:
        """The ordinals of its ancestors, by run id; of two saves of one job, that of the older one."""
        ids = (SaveId.parse(ancestor.save_id) for ancestor in reversed(self.ancestors or ()))
        return {save_id.run_id: save_id.ordinal for save_id in ids if save_id is not None}


def point_of(manifest: Manifest, iteration: int) -> Point:
    """Returns where the checkpoint of a manifest stands."""
    ancestors = None if manifest.ancestors is msgspec.UNSET else manifest.ancestors
    # Before there was this field, a drop left only its own save id, which no job names as an ancestor.
    is_lost = manifest.is_without_optimizer and manifest.rewritten is msgspec.UNSET
    save_id = None if is_lost else manifest.original_save_id
    return Point(iteration, save_id, ancestors, manifest.is_without_optimizer)


def point_in(directory: Path, iteration: int) -> Point | None:
    """Returns where the checkpoint in a directory stands, in any format; None if its manifest is damaged.

    Raises:
        OSError: it cannot be read.
    """
    try:
        data = read_regular(directory / MANIFEST_NAME, MANIFEST_BYTES)
        return point_of(Manifest.decode(data, str(directory)), iteration)
    except (FileNotFoundError, NotADirectoryError):
        return Point(iteration, None, None)
    except DataStatesError:
        return None


def known_point(directory: Path, iteration: int) -> Point | None:
    """Returns where a checkpoint stands, as `point_in`; None, too, if its manifest cannot be read."""
    try:
        return point_in(directory, iteration)
    except OSError:
        return None


def origin_in(directory: Path, iteration: int) -> Origin:
    """Returns the origin of a job that has loaded the checkpoint in a directory."""
    return origin_from(known_point(directory, iteration), iteration)


def origin_from(point: Point | None, iteration: int) -> Origin:
    """Returns the origin of a job that has loaded the checkpoint at a point; None if that is not known."""
    if point is None:
        return Origin(iteration, None)
    name = "" if point.save_id is None else str(point.save_id)
    before = point.ancestors
    if before is None:
        before = (_UNKNOWN,) if name else ()
    return Origin(iteration, (*before, Ancestor(iteration, name))[-MOST_ANCESTORS:])
