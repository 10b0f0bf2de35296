"""Times that follow from several saves: intervals between them, and how long an iteration takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from megatron_datastates.reports.reading import Save

_AROUND = ("save_checkpoint", "save", "wait")  # parts that others lie in


def usual(saves: Sequence[Save]) -> list[Save]:
    """Returns the saves without failed ones and the first of each run, which prepares the later ones.

    Only the failed ones are left out if no others remain.
    """
    runs: set[str] = set()
    begun = {save.run for save in saves if save.ordinal == 1}  # not where only the last few are looked at
    published = [save for save in saves if not save.failed]
    later = []
    for save in published:
        if save.run in runs or save.run not in begun:
            later.append(save)
        runs.add(save.run)
    return later or published


def median(values: Iterable[float]) -> float:
    """Returns the median; 0 if there are no values."""
    found = list(values)
    return statistics.median(found) if found else 0.0


def intervals(saves: Sequence[Save]) -> list[float | None]:
    """Returns for each save the seconds until the next one of its run began; None where that is not known.

    It is not known either where the clock was set back in between.
    """
    following: Sequence[Save | None] = [*saves[1:], None]
    return [_seconds_between(save, later) for save, later in zip(saves, following, strict=False)]


def _seconds_between(save: Save, later: Save | None) -> float | None:
    if later is None or later.run != save.run:
        return None
    seconds = later.started_at - save.started_at
    return seconds if seconds > 0 else None


def iteration_seconds(saves: Sequence[Save]) -> float | None:
    """Returns the median time of an iteration between two saves, held time included; None if not known."""
    found = []
    for save, later, seconds in zip(saves, saves[1:], intervals(saves), strict=False):
        steps = (later.iteration or 0) - (save.iteration or 0)
        if seconds is not None and save.iteration is not None and steps > 0:
            found.append(seconds / steps)
    return median(found) if found else None


def held_shares(save: Save) -> dict[str, float]:
    """Returns the held time by part, counting what lies within another part once.

    A part that others lie in, such as save_checkpoint, is what these leave of the whole.
    """
    around = [name for name in _AROUND if name in save.held_parts_ms] or [_AROUND[0]]
    shares = {name: value for name, value in save.held_parts_ms.items() if name not in _AROUND}
    return {around[0]: max(save.held_ms - sum(shares.values()), 0.0), **shares}
