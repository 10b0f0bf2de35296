"""Imports a model's folder of Hugging Face's as a run that training starts from.

Protocol: the checkpoint is converted to RUN/release, which appears only once it is complete; then Megatron's
tracker file is written, which names it. Megatron loads a release without its optimizer, at iteration 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from megatron_datastates.convert.hf.source import HuggingFaceSource
from megatron_datastates.convert.job import convert
from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.planning import Plan, plan_conversion
from megatron_datastates.convert.sinks.sink import Progress
from megatron_datastates.convert.trackers import write_tracker
from megatron_datastates.errors import StorageError
from megatron_datastates.format.directory import BACKEND, TRACKER_NAME
from megatron_datastates.pipeline.run_folders import tracked_name

RELEASE = "release"  # Megatron's name of a checkpoint that is nobody's iteration
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
        StorageError: the run has a tracker file, or one that cannot be read.
        what plan_conversion and convert raise.
    """
    if tracked_name(run) is not None or (run / TRACKER_NAME).exists():
        raise StorageError(f"{run} has a {TRACKER_NAME}: choose a new directory, or remove that file first")
    total = sum(source.fragment(*one).bytes for one in source.stored_by_rank()[0].fragments)
    ranks = max(1, math.ceil(total / _FILE_BYTES))
    plan = plan_conversion(source, run / RELEASE, format=format, ranks=ranks)
    convert(plan, limits, progress=start(plan))
    write_tracker(run / TRACKER_NAME, RELEASE.encode())
    return plan
