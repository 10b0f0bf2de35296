"""The reports of a run in a few numbers, for programs that watch it; docs/reports.md lists them."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from megatron_datastates.reports.reading import Save, Skip
from megatron_datastates.reports.timing import median, usual


def summary(saves: Sequence[Save], skips: Sequence[Skip]) -> dict[str, Any]:
    """Returns what JSON can have. Times are over the saves that advice looks at (timing.usual)."""
    failed = [save for save in saves if save.failed]
    published = [save for save in saves if not save.failed]
    there = [save for save in published if not save.near or save.far_ms is not None]
    later = saves[saves.index(published[-1]) + 1 :] if published else saves
    held = [save.held_ms for save in usual(saves) if save.mode != "dcp"]  # of those, it is not measured
    return {
        "saves": len(saves),
        "published": len(published),
        "failed": len(failed),
        "skipped": len(skips),
        "failed_since_published": len(later),
        "last_error": failed[-1].error if failed else None,
        "last_published": _checkpoint(published[-1], published[-1].published_ms) if published else None,
        "last_in_directory": _checkpoint(there[-1], there[-1].far_ms) if there else None,
        "held_ms": {"median": median(held), "max": max(held)} if held else None,
        "written_bytes": sum(save.written_bytes for save in published),
        "slowest_rank": _slowest_rank(usual(saves)),
    }


def _checkpoint(save: Save, after_ms: float | None) -> dict[str, Any]:
    seconds = (after_ms if after_ms is not None else save.published_ms or 0.0) / 1000
    return {
        "iteration": save.iteration,
        "save_id": save.save_id,
        "published_at": save.started_at + seconds,
    }


def _slowest_rank(saves: Sequence[Save]) -> dict[str, int] | None:
    """Returns the rank that was the slowest to write in most saves, and in how many; None if not known."""
    spreads = [save.spreads["writing"] for save in saves if "writing" in save.spreads and save.ranks > 1]
    counts = collections.Counter(spread.slowest_rank for spread in spreads).most_common(1)
    return {"rank": counts[0][0], "saves": counts[0][1]} if counts else None
