"""What this job has resumed from: its checkpoints name that, which distinguishes the branches of a run."""

from __future__ import annotations

from typing import Any

from megatron_datastates.files import path_of
from megatron_datastates.pipeline.branches import Origin, origin_in

_loaded: Origin | None = None  # None until a load


def note_load(directory: str | None, result: Any) -> None:
    """Takes note of a load that resumed a run.

    Args:
        directory: of the checkpoint; None if there was none.
        result: of Megatron's `load_checkpoint`, which begins with the iteration.
    """
    global _loaded
    from megatron_datastates.pipeline.agreement import Collectives

    iteration = result[0] if isinstance(result, tuple) else result
    if directory is None or not isinstance(iteration, int):
        _loaded = Origin()
    elif Collectives().rank == 0:  # which writes manifests
        _loaded = origin_in(path_of(directory), iteration)
    else:
        _loaded = Origin(iteration, None)


def origin() -> Origin | None:
    """Returns what the checkpoints of this job go on from; None if that is not known."""
    from megatron_datastates.mcore.training.loop import is_training

    return Origin() if _loaded is None and is_training() else _loaded
