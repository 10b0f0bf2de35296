"""What this job has resumed from: its checkpoints name that, which distinguishes the branches of a run."""

from __future__ import annotations

from typing import Any

from megatron_datastates.files import any_path
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.runs.branches import Origin, origin_from, origin_in, point_of

_loaded: Origin | None = None  # None until a load


def note_load(directory: str | None, result: Any, manifest: Manifest | None) -> None:
    """Notes a load that resumed a run.

    Args:
        directory: of the checkpoint; None if there was none, or Megatron has not said which.
        result: of Megatron's `load_checkpoint`, which begins with the iteration.
        manifest: that the load has read, if it is of our format.
    """
    global _loaded
    iteration = result[0] if isinstance(result, tuple) else result
    if not isinstance(iteration, int):
        _loaded = Origin()
    elif directory is None:
        _loaded = Origin(iteration, None) if iteration else Origin()
    elif Collectives().rank != 0:  # which writes manifests
        _loaded = Origin(iteration, None)
    elif manifest is not None:
        _loaded = origin_from(point_of(manifest, iteration), iteration)
    else:
        _loaded = origin_in(any_path(directory), iteration)


def origin(*, in_loop: bool) -> Origin | None:
    """Returns what this job has resumed from; None if that is not known.

    Args:
        in_loop: Megatron's own loop is running, which has loaded whatever it was to load.
    """
    return Origin() if _loaded is None and in_loop else _loaded
