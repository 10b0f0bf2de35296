"""A tracker that names an older checkpoint than the newest that continues it: rank 0 says so after the load.

A job that was killed after it had published a save, and before it wrote the tracker, leaves such a one; so
does somebody who goes back by hand. What the tracker names is loaded all the same. Manifests say which
checkpoints continue it: those of a branch that was left (pipeline/runs/branches.py) do not.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

from megatron_datastates.errors import DataStatesError
from megatron_datastates.files import names_in, path_of
from megatron_datastates.format.directory import TRACKER_NAME, iteration_in_name, iteration_name
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.mcore.load import state
from megatron_datastates.mcore.training.arguments import run_arguments
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.runs.branches import known_point
from megatron_datastates.pipeline.runs.history import by_branch
from megatron_datastates.pipeline.runs.runs import is_published

logger = logging.getLogger(__name__)


def note_newer() -> None:
    """Logs, on rank 0, that the open load has resumed from an older checkpoint than it could have.

    Never raises. Lists the run once, and reads the manifests of at most three checkpoints, of the many that a
    rollback may have left.
    """
    args, directory = run_arguments(), state.current().directory
    if directory is None or getattr(args, "ckpt_step", None) or Collectives().rank != 0:
        return
    with contextlib.suppress(OSError, DataStatesError):  # the load has succeeded all the same
        loaded = path_of(directory)
        run, number = loaded.parent, iteration_in_name(loaded.name)
        # --ckpt-step chooses among those of --load only, not among non-persistent ones.
        if number is None or not getattr(args, "load", None) or run != path_of(args.load):
            return
        newer = newer_in(loaded, number)
        if newer is None:
            return
        published_at = (run / iteration_name(newer) / MANIFEST_NAME).stat().st_mtime
        is_set_back = published_at < (run / TRACKER_NAME).stat().st_mtime  # by hand: a job names the newest
        (logger.info if is_set_back else logger.warning)(
            "datastates: %s was loaded, as the tracker names it, although iteration %d, which continues it, "
            "is published there, too: to resume from that one, start again with --ckpt-step %d before this "
            "job saves",
            directory,
            newer,
            newer,
        )


def newer_in(loaded: Path, number: int) -> int | None:
    """Returns an iteration of a run that is known to continue the one that was loaded; None if none is.

    That is the newest published one or the next one: either may be of a branch that was left.

    Raises:
        OSError: the run cannot be listed.
    """
    run = loaded.parent
    found = (one for name in names_in(run) if (one := iteration_in_name(name)) is not None)
    newer = sorted(one for one in found if one > number)
    ends = _first_published(run, reversed(newer)), _first_published(run, newer)
    directories = {one: run / iteration_name(one) for one in ends if one is not None}
    base = known_point(loaded, number) if directories else None
    if base is None:
        return None
    for one in by_branch(run, directories, len(directories)):
        point = known_point(directories[one], one)
        if point is not None and point.follows(base) and not point.is_without_optimizer:
            return one
    return None


def _first_published(run: Path, iterations: Iterable[int]) -> int | None:
    return next((one for one in iterations if is_published(run / iteration_name(one))), None)
