"""What each load cost on this rank: the report of a load, and the block that measures one.

The whole path of a report: `reported_load` -> Reporter.emit (report.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_datastates.config import Options
from megatron_datastates.errors import printable
from megatron_datastates.files import absolute, any_path
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.read_costs import ReadCosts
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.report import Reporter
from megatron_datastates.units import milliseconds

logger = logging.getLogger(__name__)


class LoadTracker:
    """The checkpoint that a load reads, once it is open, and what it had cost before the load.

    Attributes:
        slowest: the longest time of a rank for each part, and which rank's, where ranks load together.
    """

    def __init__(self) -> None:
        self.checkpoint: Checkpoint | None = None
        self.slowest: dict[str, tuple[float, int]] = {}
        self._before = ReadCosts()

    def follow(self, checkpoint: Checkpoint, *, was_open: bool = False) -> None:
        """Reports the costs of `checkpoint` from now on; all of its opening in any case.

        Args:
            was_open: an earlier load may have read from it already.
        """
        if self.checkpoint is checkpoint:
            return
        self.checkpoint = checkpoint
        self._before = dataclasses.replace(checkpoint.costs, opening=0.0) if was_open else ReadCosts()
        checkpoint.rounded.clear()

    @property
    def costs(self) -> ReadCosts:
        """Returns the costs of this load."""
        return self.checkpoint.costs.since(self._before) if self.checkpoint is not None else ReadCosts()


@contextlib.contextmanager
def reported_load(directory: str | os.PathLike[str], options: Callable[[], Options]) -> Iterator[LoadTracker]:
    """Measures the load that the block makes and reports it at its end, also if it raises.

    Communicates with no other rank. The block calls `follow` with the checkpoint that it opens; if it
    communicates itself, it may set `slowest`.

    Args:
        options: returns the options; called at the end of the load.
    """
    tracker, begin = LoadTracker(), time.perf_counter()
    failure: BaseException | None = None
    try:
        yield tracker
    except BaseException as error:  # DCP's exception for failed loads is no Exception
        failure = error
        raise
    finally:
        report = load_report(any_path(directory), tracker, time.perf_counter() - begin, failure)
        _reporter(options().report_file).emit(report["rank"], lambda: report)
        if failure is None and report["rank"] == 0:
            _warn_of_rounding(tracker.checkpoint)


_reporter = functools.lru_cache(maxsize=8)(Reporter)  # one of all loads: a file that hangs is waited for once


def _warn_of_rounding(checkpoint: Checkpoint | None) -> None:
    if checkpoint is None or not checkpoint.rounded:
        return
    key, dtypes = next(iter(checkpoint.rounded.items()))
    logger.warning(
        "%d of the tensors loaded from %s may have been rounded: %r, for one, was loaded from %s",
        len(checkpoint.rounded),
        checkpoint.directory,
        key,
        dtypes,
    )


def load_report(
    directory: Path, tracker: LoadTracker, seconds: float, failure: BaseException | None
) -> dict[str, Any]:
    """Returns the report of one load on this rank; docs/reports.md lists the fields."""
    costs, manifest = tracker.costs, tracker.checkpoint.manifest if tracker.checkpoint is not None else None
    world = Collectives()
    ranks_ms = {
        part: {"max": milliseconds(longest), "slowest_rank": rank}
        for part, (longest, rank) in tracker.slowest.items()
    }
    report = {
        "event": "load",
        "save_id": str(manifest.save_id) if manifest is not None else None,
        "directory": str(absolute(directory)),
        "iteration": manifest.iteration if manifest is not None else None,
        "started_at": round(time.time() - seconds, 3),
        "rank": world.rank,
        "state": "loaded" if failure is None else "failed",
        "error": None if failure is None else printable(f"{type(failure).__name__}: {failure}", keep="\n"),
        "ranks": world.size,
        "bytes": costs.bytes,
        "bytes_read": costs.bytes_read,
        "rounded_tensors": len(tracker.checkpoint.rounded) if tracker.checkpoint is not None else 0,
        "opening_ms": milliseconds(costs.opening),
        "planning_ms": milliseconds(costs.planning),
        "reading_ms": milliseconds(costs.reading),
        "total_ms": milliseconds(seconds),
        "read_mb_per_s": round(costs.bytes_read / costs.reading / 1e6, 1) if costs.reading > 0 else 0.0,
    }
    return report | ({"ranks_ms": ranks_ms} if ranks_ms else {})
