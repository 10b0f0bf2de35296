"""Converts one checkpoint, on all threads and ranks that are available.

Protocol:
  1. what cannot be done is refused before anything is written (planning.py);
  2. everything is written to a directory beside the target, `.NAME.converting`, which is locked and emptied
     first (work_directory.py);
  3. each file is written by one thread of one process; once all are durable, each rank checks whether the
     source is still what it has opened, and rank 0 publishes them; then they are read again and compared if
     that was requested (verification.py);
  4. the directory is renamed to the target's name, and its parent is synced.
For a target in an object store, each process writes to a directory of its own for temporary files, and step 4
is an upload, with the manifest as the last object (uploads.py).
So a target is a complete checkpoint or does not exist. Under torchrun all ranks finish a step, or fail it,
before any begins the next.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from megatron_datastates.config import MIB
from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.planning import Plan
from megatron_datastates.convert.sinks.datastates import DataStatesSink, engine_options
from megatron_datastates.convert.sinks.sink import Progress, Sink
from megatron_datastates.convert.sinks.target import made_parents, named_as, sync_tree
from megatron_datastates.convert.sinks.torch_dist import TorchDistSink
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.convert.team import Team
from megatron_datastates.convert.uploads import publish_uploaded, upload_files
from megatron_datastates.convert.verification import verify_conversion
from megatron_datastates.convert.work_directory import (
    locked_work_directory,
    rename_to_target,
    require_claim,
)
from megatron_datastates.convert.workers import Workers
from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.errors import OptionError
from megatron_datastates.files import is_object, open_regular
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId


def no_progress(bytes_done: int) -> None:
    """Ignores progress."""


def convert(
    plan: Plan,
    limits: Limits,
    *,
    verify: bool = False,
    progress: Progress = no_progress,
    start_verification: Callable[[], Progress] = lambda: no_progress,
    team: Team | None = None,
) -> None:
    """Carries out a plan. Every rank of `team` has to call it.

    Args:
        verify: before the target appears, read everything again and compare it with the source; also check
            the checksums of the source that ordinary reading leaves unchecked.
        progress: called with the number of bytes that were written since the last call, from any thread.
        start_verification: called once all is written; returns what is called likewise with bytes compared.

    Raises:
        CorruptDataError: `verify` found a difference or a wrong checksum.
        DataStatesError, OSError: the conversion failed. In all cases there is no target.
    """
    team = team or Team()
    is_far = is_object(plan.target)
    if is_far and verify and team.size > 1:
        raise OptionError(
            f"--verify by several ranks, and {plan.target} in an object store: leave --verify out, and "
            "compare afterwards with `datastates diff`"
        )
    numbers = plan.files_of(team)
    workers, claim = Workers(limits.worker_count(len(numbers)), progress), ""
    with ExitStack() as held:
        if is_far:
            scratch = held.enter_context(tempfile.TemporaryDirectory(prefix="datastates-convert-"))
            plan = dataclasses.replace(plan, scratch=Path(scratch))
            plan.work_directory.mkdir()
        else:
            team.on_rank_zero(lambda: held.enter_context(made_parents(plan.target)))
            claim = team.on_rank_zero(
                lambda: held.enter_context(
                    locked_work_directory(plan.work_directory, plan.target, _other_names(plan.source))
                )
            )
        held.enter_context(named_as(plan.work_directory, plan.target))
        save_id = SaveId(team.on_rank_zero(lambda: secrets.randbits(63)), 1)
        sink = team.on_every_rank(lambda: _sink(plan, limits, save_id, workers.progress))
        try:
            parts = team.gather(
                lambda: workers.run(numbers, lambda n: sink.write(n, plan.files[n]), sink.close)
            )
            written = dict(pair for part in parts for pair in part)
            team.on_rank_zero(lambda: _copy_others(plan))
            team.on_every_rank(plan.source.require_unchanged)
            if not is_far:
                team.on_rank_zero(lambda: require_claim(plan.work_directory, plan.target, claim))
            team.on_rank_zero(lambda: sink.publish([written[n] for n in range(len(plan.files))]))
        finally:
            sink.close()
        if verify:
            window_bytes = limits.window_bytes(len(plan.files))
            readers = Workers(limits.worker_count(len(numbers)), start_verification())
            team.on_every_rank(lambda: verify_conversion(plan, window_bytes, numbers, readers))
        if is_far:
            _upload(plan, team)
        else:
            team.on_rank_zero(lambda: rename_to_target(plan.work_directory, plan.target, claim))


def _upload(plan: Plan, team: Team) -> None:
    folder, target = plan.work_directory, plan.target
    encoded = team.on_rank_zero(lambda: (folder / MANIFEST_NAME).read_bytes())
    manifest = Manifest.decode(encoded, MANIFEST_NAME)
    own = [manifest.files[n] for n in plan.files_of(team)]
    team.on_every_rank(lambda: upload_files(folder, target, manifest, own))
    team.on_rank_zero(lambda: publish_uploaded(folder, target, manifest))


def _sink(plan: Plan, limits: Limits, save_id: SaveId, progress: Progress) -> Sink:
    window, options = limits.window_bytes(len(plan.files)), engine_options(limits.staging_bytes)
    if plan.format == TorchDistSink.format:
        return TorchDistSink(plan.source, plan.work_directory, window, progress, options=options)
    return DataStatesSink(
        plan.source,
        plan.work_directory,
        window,
        progress,
        save_id=save_id,
        world_size=len(plan.files),
        options=options,
    )


def _copy_others(plan: Plan) -> None:
    """Copies the other files and directories of the source, durably."""
    for name in _other_names(plan.source):
        source, copy = plan.source.other_path(name), plan.work_directory / name
        if source.is_dir():
            _copy_directory(source, copy)
        else:
            _copy_regular(source, copy)
        sync_tree(copy)
    sync_directory(plan.work_directory)


def _copy_directory(source: Path, copy: Path) -> None:
    """Copies a directory, and what links in it name: planning has refused those without an end."""
    copy.mkdir()
    with os.scandir(source) as entries:
        for entry in entries:
            copy_one = _copy_directory if entry.is_dir() else _copy_regular
            copy_one(source / entry.name, copy / entry.name)
    shutil.copystat(source, copy)  # last: it may forbid to write


def _copy_regular(source: Path, copy: Path) -> None:
    """Copies a regular file. Raises OSError, also for a device or a pipe, which might have no end."""
    with open_regular(source) as opened, open(copy, "xb") as target:
        shutil.copyfileobj(opened, target, MIB)
    if not is_object(source):
        shutil.copymode(source, copy)


def _other_names(source: Source) -> list[str]:
    """Returns the names of files and directories that belong to the checkpoint but not to its format."""
    return [*source.other_files, *source.other_directories]
