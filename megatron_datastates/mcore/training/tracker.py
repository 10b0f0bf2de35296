"""Megatron's tracker file (latest_checkpointed_iteration.txt) when a crash has truncated it.

Megatron opens it with 'w'. A kill in that moment leaves it empty, and stock Megatron then exits with
code 0, untrained. We fall back, loudly, to the newest published checkpoint beside it.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_datastates.files import TRACKER_BYTES, read_regular
from megatron_datastates.pipeline.runs import find_iterations, is_published, tracked_iteration

logger = logging.getLogger(__name__)


def wrap_read_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `read_metadata`. Every rank reads the same files, so all fall back alike."""

    def read_metadata(tracker_filename: str, *args: Any, **kwargs: Any) -> Any:
        iteration = _fallback(Path(tracker_filename))
        if iteration is None:
            return original(tracker_filename, *args, **kwargs)
        # The original also agrees with the other ranks; it is given what the tracker should have said.
        with tempfile.TemporaryDirectory() as directory:
            stand_in = Path(directory) / tracker_filename.rsplit("/", 1)[-1]
            stand_in.write_text(str(iteration))
            return original(str(stand_in), *args, **kwargs)

    return read_metadata


def mend(tracker: Path) -> None:
    """Gives a damaged tracker its meaning back, before Megatron's retention stumbles over it.

    It then names the newest published checkpoint, which retention may delete once there is a newer one; with
    no such checkpoint it is removed, as if this were the first save. Never raises.
    """
    try:
        if _is_damaged(tracker):
            iteration = _fallback(tracker)
            if iteration is None:
                tracker.unlink()
            else:
                stand_in = tracker.with_name(tracker.name + ".mended")
                stand_in.write_text(str(iteration))
                stand_in.replace(tracker)
    except OSError as error:
        logger.warning("%s is damaged and was not mended: %s", tracker, error)


def _is_damaged(tracker: Path) -> bool:
    if not tracker.is_file() or tracked_iteration(tracker) is not None:
        return False
    return _text(tracker).strip() != "release"


def _text(tracker: Path) -> str:
    """What it says; nothing where it cannot be read."""
    try:
        return read_regular(tracker, TRACKER_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _fallback(tracker: Path) -> int | None:
    """The newest complete iteration, if the tracker says nothing and any of them was saved in our format.

    It may be in another format: what is loaded is decided by what lies in its directory.
    """
    if not _is_damaged(tracker):
        return None
    found = {one.number: one.path for one in find_iterations(tracker.parent) if one.complete}
    if not any(map(is_published, found.values())):
        return None
    iteration = max(found)
    logger.warning(
        "%s is damaged: it says %r. Falling back to the newest complete checkpoint, iteration %d (%s).",
        tracker, _text(tracker), iteration, found[iteration],
    )  # fmt: skip
    return iteration
