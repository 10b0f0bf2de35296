"""Recovery from a damaged tracker file (Megatron's latest_checkpointed_iteration.txt).

Megatron opens it with mode 'w'. A kill at that moment leaves it empty, and unmodified Megatron then exits
with code 0, untrained. We fall back to the newest complete checkpoint in its directory, with a warning; after
a rollback, to the newest one of the branch that was saved last. If somebody has written the name of a
directory into it, that one counts.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_datastates.files import TRACKER_BYTES, any_path, read_regular
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.runs.runs import complete_in, has_file
from megatron_datastates.pipeline.runs.tracker import is_read_by_megatron, iteration_named

logger = logging.getLogger(__name__)
# In the corrected tracker of a rank that cannot look at the checkpoints: each release of Megatron reads it as
# iteration 0, and some refuse a "0". Training saves no such iteration.
_UNKNOWN = "release"


def wrap_read_metadata(original: Callable[..., Any], tracker_filename: str, *args: Any, **kwargs: Any) -> Any:
    """Wraps `read_metadata`. Every rank reads the same files, so all fall back to the same checkpoint."""
    tracker = any_path(tracker_filename)
    text = _damaged_text(tracker)
    error = None
    try:
        fallback = None if text is None else _fallback(tracker, text)
        believed = None if fallback is None else str(fallback)
    except OSError as raised:  # the other ranks wait for this one in the original
        believed, error = _UNKNOWN, raised
    if believed is None:
        return original(tracker_filename, *args, **kwargs)
    # The original also communicates with the other ranks, so it is called with a corrected tracker. It
    # returns the highest iteration that any rank has found.
    with tempfile.TemporaryDirectory() as directory:
        corrected = Path(directory) / tracker_filename.rsplit("/", 1)[-1]
        corrected.write_text(believed)
        found = original(str(corrected), *args, **kwargs)
    if error is None:
        return found
    iteration, _ = found
    if not iteration:
        raise error
    logger.warning("%s is damaged; the other ranks fall back to iteration %d (%s)", tracker, iteration, error)
    return iteration, False


def mend(tracker: Path) -> None:
    """Repairs a damaged tracker, on which Megatron's retention would fail. Never raises.

    The tracker then names the checkpoint that a load falls back to, which retention may delete once a newer
    one exists. It may be ours or of torch_dist. If none is complete, the tracker is deleted.
    """
    from megatron_datastates.engine.atomic_files import replace_file  # which imports the native module

    try:
        if (text := _damaged_text(tracker)) is not None:
            iteration = _fallback(tracker, text, needs_ours=False)
            if iteration is None:
                tracker.unlink()
            else:
                replace_file(tracker, str(iteration).encode())
    except OSError as error:
        logger.warning("%s is damaged and could not be repaired: %s", tracker, error)


def _damaged_text(tracker: Path) -> bytes | None:
    """Returns the text of a tracker that Megatron cannot read; None if it can, or if it is not there.

    None also if it cannot be read: Megatron raises that error.
    """
    if not tracker.is_file():
        return None
    try:
        text = read_regular(tracker, TRACKER_BYTES)
    except OSError:
        return None
    return None if is_read_by_megatron(text) else text


def _fallback(tracker: Path, text: bytes, *, needs_ours: bool = True) -> int | None:
    """Returns the iteration to fall back to from a damaged tracker; None if none is complete.

    It may be in another format: loads detect the format of its directory.

    Args:
        needs_ours: return None also if none was saved in our format.

    Raises:
        OSError: a checkpoint cannot be looked at: it may be the newest.
    """
    # Not needed, nor the native module that it imports, by runs in other formats.
    from megatron_datastates.pipeline.runs.history import by_branch

    found = complete_in(tracker.parent)
    if not found or (needs_ours and not any(has_file(path / MANIFEST_NAME) for path in found.values())):
        return None
    if (named := iteration_named(text)) is not None:
        if _logs():
            logger.warning(
                "%s holds the name of a directory, %r: taken for iteration %d", tracker, text, named
            )
        return named
    (iteration,) = by_branch(tracker.parent, found)
    if _logs():
        logger.warning(
            "%s is damaged: expected an iteration, found %r. "
            "Falling back to the newest complete checkpoint%s, iteration %d (%s).",
            tracker,
            text.decode(errors="replace"),
            "" if iteration == max(found) else " of the branch that was saved last",
            iteration,
            found[iteration],
        )
    return iteration


def _logs() -> bool:
    """Returns whether this rank logs what the ranks of its node find; so early, the environment says it."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
