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

logger = logging.getLogger(__name__)


def with_fallback(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `read_metadata`. Every rank reads the same files, so all fall back alike."""

    def read_metadata(tracker_filename: str) -> Any:
        iteration = _fallback(Path(tracker_filename))
        if iteration is None:
            return original(tracker_filename)
        # The original also agrees with the other ranks; it is given what the tracker should have said.
        with tempfile.TemporaryDirectory() as directory:
            stand_in = Path(directory) / tracker_filename.rsplit("/", 1)[-1]
            stand_in.write_text(str(iteration))
            return original(str(stand_in))

    return read_metadata


def _fallback(tracker: Path) -> int | None:
    """The newest published iteration, if the tracker says nothing and there is one."""
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if text.isdigit() or text == "release":
        return None
    from megatron_datastates.pipeline.load import find_published

    published = find_published(tracker.parent)
    if not published:
        return None
    iteration = max(published)
    logger.warning(
        "%s is damaged: it says %r. Falling back to the newest published checkpoint, iteration %d (%s).",
        tracker, text, iteration, published[iteration],
    )  # fmt: skip
    return iteration
