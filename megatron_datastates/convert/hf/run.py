"""Imports a Hugging Face model folder as a run that training starts from.

Protocol: the checkpoint is converted to RUN/release, which appears only once it is complete; then Megatron's
tracker file is written, which names it, unless a training has begun to save in RUN meanwhile. Megatron loads
a release without its optimizer, at iteration 0.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

from megatron_datastates.convert.hf.source import HuggingFaceSource
from megatron_datastates.convert.job import convert
from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.planning import Plan, plan_conversion
from megatron_datastates.convert.sinks.sink import Progress
from megatron_datastates.convert.trackers import one_at_a_time
from megatron_datastates.engine.atomic_files import replace_file
from megatron_datastates.errors import StorageError
from megatron_datastates.format.directory import BACKEND, RELEASE_NAME, TRACKER_NAME
from megatron_datastates.pipeline.runs.run_folders import checkpoint_directories
from megatron_datastates.pipeline.runs.runs import is_complete
from megatron_datastates.pipeline.runs.tracker import tracked_name

_FILE_BYTES = 4 << 30


def import_model(
    source: HuggingFaceSource,
    run: Path,
    *,
    format: str = BACKEND,
    limits: Limits = Limits(),  # noqa: B008 - immutable
    start: Callable[[Plan], Progress],
) -> Plan:
    """Writes RUN/release and the tracker file; returns what was written.

    Args:
        run: directory of a run; it may exist, but not have checkpoints.
        start: called with the plan before anything is written; returns the function to report progress to.

    Raises:
        StorageError: the run has checkpoints or a tracker file, or got some meanwhile, or cannot be read.
        what plan_conversion and convert raise.
    """
    _refuse_checkpoints(run)
    total = sum(source.fragment(*one).bytes for one in source.stored_by_rank()[0].fragments)
    ranks = max(1, math.ceil(total / _FILE_BYTES))
    plan = plan_conversion(source, run / RELEASE_NAME, format=format, ranks=ranks)
    convert(plan, limits, progress=start(plan))
    with one_at_a_time(run):
        _refuse_others(run)
        replace_file(run / TRACKER_NAME, RELEASE_NAME.encode())
    return plan


def _refuse_others(run: Path) -> None:
    """Raises StorageError if a training has begun to save here: the tracker would set it back."""
    others = [path.name for path in checkpoint_directories(run) if path.name != RELEASE_NAME]
    if others or tracked_name(run) is not None or (run / TRACKER_NAME).exists():
        raise StorageError(
            f"{run} has {others[-1] if others else TRACKER_NAME}, which another program wrote during the "
            f"import, so no tracker was written: remove {run / RELEASE_NAME}, and import to a new directory"
        )


def _refuse_checkpoints(run: Path) -> None:
    tracker = run / TRACKER_NAME
    if tracked_name(run) is not None or tracker.exists():
        raise StorageError(f"{run} has a {TRACKER_NAME}: choose a new directory, or remove that file first")
    names = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = [path.name for path in checkpoint_directories(run)]
    if names == [RELEASE_NAME] and is_complete(run / RELEASE_NAME):  # an import was killed at its last step
        raise StorageError(
            f"{run / RELEASE_NAME} is complete, and only {tracker} is missing: write the word {RELEASE_NAME} "
            f"into that file, or remove {run / RELEASE_NAME} to import again"
        )
    iterations = [name for name in names if name != RELEASE_NAME]
    if iterations:
        raise StorageError(f"{run} has checkpoints, such as {iterations[-1]}: choose a new directory")
