"""The tracker in --save, which names only what is published there; and the near tier's retention.

Publishing an asynchronous save ends with writing the tracker, whole or not at all, on a thread of rank 0 (of
a near save: its drain's). Megatron would write it on the trainer's thread, which waits tens of milliseconds
for a file system that is being synced, and a kill would leave it empty. What Megatron writes goes to a file
in memory. Trackers of synchronous saves, of a `release`, of runs in which Megatron deletes what its tracker
named before, of those with `--verify-integrity`, and (without a near tier) of those that use the
multi-storage client are Megatron's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_datastates.config import Options
from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.files import is_object
from megatron_datastates.format.directory import TRACKER_NAME, iteration_in_name, iteration_name
from megatron_datastates.format.values import SaveId
from megatron_datastates.mcore.hooks import versions
from megatron_datastates.mcore.hooks.attach import replace, replaced
from megatron_datastates.mcore.training.arguments import msc_is_enabled, run_arguments
from megatron_datastates.pipeline.near.places import read_published, save_ids_in
from megatron_datastates.pipeline.near.removal import remove_folder
from megatron_datastates.pipeline.runs.history import has_later_save
from megatron_datastates.pipeline.runs.runs import is_complete, is_published
from megatron_datastates.pipeline.runs.tracker import read_tracked

logger = logging.getLogger(__name__)
_MODELOPT = "save_sharded_modelopt_state"  # is imported if nvidia-modelopt is installed
_NOTE = "on_save_checkpoint_success"  # Megatron's function that reports a checkpoint to W&B
# As of the last save: whether saves go to a near tier first, and whether we write the tracker, not Megatron.
_is_near = False
_is_ours = False
_memory_file: int | None = None  # descriptor
_unused: tempfile.TemporaryDirectory[str] | None = None
# In place of the client that `dist_checkpointing.save` looks into a directory with: it finds nothing there.
_NO_LOOK = types.SimpleNamespace(Path=lambda path: types.SimpleNamespace(iterdir=lambda: iter(())))
_numbers = itertools.count()  # of saves, in the order in which they began
# By run, of the save that its tracker names, if this process has written it: the number, and the save id.
_tracked: dict[Path, tuple[int, SaveId]] = {}


@contextlib.contextmanager
def saving(options: Options, *, is_release: bool = False) -> Iterator[None]:
    """Wraps a `save_checkpoint`, which begins whether its directory can be made or not.

    If the tracker is ours, Megatron is going to write another one.

    Args:
        is_release: it saves a `release`, of which the tracker does not name an iteration.
    """
    from megatron.training import checkpointing

    global _is_near, _is_ours
    args = checkpointing.get_args()
    _is_near = bool(options.near)
    if _is_near and hasattr(checkpointing, "wandb_utils"):
        replace(checkpointing.wandb_utils, _NOTE, wrap_on_save_checkpoint_success, everywhere=False)
    # args.enable_msc is True by default before 0.18, whether the client is installed or not.
    is_plain = getattr(args, "save_retain_interval", None) is None and not msc_is_enabled()
    # Megatron hashes the files after a save was published, and a tracker may name it only then.
    is_plain = is_plain and not getattr(args, "verify_integrity", False)
    _is_ours = not is_release and (_is_near or (bool(getattr(args, "async_save", False)) and is_plain))
    original, save = checkpointing.get_checkpoint_tracker_filename, args.save

    def get_checkpoint_tracker_filename(checkpoints_path: Any) -> Any:
        return _unused_tracker() if checkpoints_path == save else original(checkpoints_path)

    unused = (checkpointing, "get_checkpoint_tracker_filename", get_checkpoint_tracker_filename)
    with replaced(*unused) if _is_ours else contextlib.nullcontext(), _without_directory(save):
        yield


@contextlib.contextmanager
def _without_directory(save: str) -> Iterator[None]:
    """Lets a save begin without its directory in --save.

    Megatron makes it, and looks what is in it, on rank 0's trainer, which would wait for storage that hangs,
    and whose error, as on a full disk, would end the job. So it is left to what writes there: the drain, if
    the save is published near; else the threads of each rank that write files, and an error fails the save,
    on all ranks. In a synchronous save, rank 0 makes it first, for Megatron warns of what is in it; also for
    ModelOpt, which writes there at once. An object store is never asked: there is nothing to make.
    """
    from megatron.core.dist_checkpointing import serialization
    from megatron.training import checkpointing

    make, client = checkpointing.ensure_directory_exists, getattr(serialization, "maybe_msc", None)
    can_do_without = client is not None and not versions.installed().writes_common_file
    is_left = can_do_without and (_is_near or bool(getattr(checkpointing.get_args(), "async_save", False)))
    if is_left or (client is not None and is_object(save)):
        serialization.maybe_msc = _NO_LOOK

    def ensure_directory_exists(filename: Any, check_parent: bool = True) -> None:
        if check_parent:  # it is for a file of Megatron's own, as of a data loader's
            make(filename)
        elif not is_left:
            try:
                make(filename, check_parent=False)
            except OSError:
                if not can_do_without:
                    raise
                serialization.maybe_msc = _NO_LOOK

    with contextlib.ExitStack() as block:
        block.enter_context(replaced(checkpointing, "ensure_directory_exists", ensure_directory_exists))
        if is_left and hasattr(checkpointing, _MODELOPT):
            block.enter_context(replaced(checkpointing, _MODELOPT, _with_directory(checkpointing, make)))
        if client is not None:
            block.callback(setattr, serialization, "maybe_msc", client)
        yield


def _with_directory(checkpointing: Any, make: Callable[..., None]) -> Callable[..., Any]:
    """Returns Megatron's function that stores ModelOpt's state, which writes there on rank 0 at once."""
    original = getattr(checkpointing, _MODELOPT)

    def save_sharded_modelopt_state(model: Any, checkpoint_name: Any, *args: Any, **kwargs: Any) -> Any:
        if checkpointing.get_args().rank == 0:
            make(checkpoint_name, check_parent=False)
        return original(model, checkpoint_name, *args, **kwargs)

    return save_sharded_modelopt_state


def wrap_on_save_checkpoint_success(
    original: Callable[..., Any], checkpoint_path: str, tracker_filename: str, save_dir: str, iteration: int
) -> None:
    """Wraps what notes a checkpoint in W&B, which needs a tracker, and the directory, in --save.

    Of a near save these are not there yet. An error would be the last rank's alone; the others would wait.
    """
    if not _is_near:
        original(checkpoint_path, tracker_filename, save_dir, iteration)
        return
    try:
        with tempfile.TemporaryDirectory(prefix="datastates-") as folder:
            tracker = Path(folder, TRACKER_NAME)
            tracker.write_text(str(iteration))
            original(checkpoint_path, str(tracker), save_dir, iteration)
    except Exception as error:
        logger.warning("W&B has no note of %s: %r", checkpoint_path, error)


def saves_are_near() -> bool:
    """Returns whether saves of this process go to a near tier first."""
    return _is_near


def _unused_tracker() -> str:
    """Returns a dummy tracker file, which Megatron writes, on rank 0 only, where an error would end the job.

    It names iteration 0, of which Megatron's retention deletes nothing. It is in memory, but for the
    multi-storage client, which needs a directory, and where a sandbox refuses such files.
    """
    global _memory_file, _unused
    if _memory_file is None and not msc_is_enabled():
        with contextlib.suppress(OSError):
            _memory_file = os.memfd_create(TRACKER_NAME)
    if _memory_file is None or msc_is_enabled():
        _unused = _unused or tempfile.TemporaryDirectory(prefix="datastates-")
        path = Path(_unused.name, TRACKER_NAME)
        path.write_text("0")
        return str(path)
    os.pwrite(_memory_file, b"0", 0)
    os.ftruncate(_memory_file, 1)
    return f"/proc/self/fd/{_memory_file}"


def far_published(checkpoint: Path) -> Callable[[SaveId, bool], None] | None:
    """Returns what makes --save's tracker name a checkpoint; None if that is not ours to do.

    Raises OSError when called, with a save and whether it is called again then.
    """
    if not _is_ours:
        return None
    args = run_arguments()
    # As text: in each save, objects for the same paths would be made anew.
    run, name = os.path.split(os.path.abspath(checkpoint))  # noqa: PTH100
    iteration = iteration_in_name(name)
    if iteration is None or not args.save or run != os.path.abspath(args.save):  # noqa: PTH100
        return None
    interval = getattr(args, "save_retain_interval", None)
    number = next(_numbers)
    directory = checkpoint.absolute().parent  # the program may change its own meanwhile
    return lambda save_id, is_retried: _track(directory, iteration, save_id, interval, number, is_retried)


def is_kept(iteration: int | None) -> bool:
    """Returns whether `--save-retain-interval` is there and keeps the checkpoint of an iteration."""
    interval = getattr(run_arguments(), "save_retain_interval", None)
    return iteration is not None and bool(interval and iteration % interval == 0)


def _track(
    run: Path, iteration: int, save_id: SaveId, retain_interval: int | None, number: int, is_retried: bool
) -> None:
    """Makes the tracker name a save that was published, unless it names a later one.

    What is called for one run is called by one thread at a time.

    Raises:
        OSError: the tracker cannot be written; or, if this call `is_retried`, what it names cannot be read.
            Otherwise that says nothing: it fails no save that is published.
    """
    last, last_id = _tracked.get(run, (number, None))
    if last > number:
        return  # a save that was drained later than the one that followed it
    before, is_later, is_damaged = None, False, False
    with contextlib.nullcontext() if is_retried else contextlib.suppress(OSError):
        named = read_tracked(run / TRACKER_NAME)
        if named and named != iteration:
            directory = run / iteration_name(named)
            found = read_published(directory)
            is_later = found != last_id and has_later_save(directory, save_id)
            is_damaged = found is None and is_published(directory)
        before = named  # last: what could not be read may be later, and is not deleted
    if is_later:
        logger.warning(
            "the tracker in %s goes on naming iteration %s, not %s: that is of a later save",
            run,
            before,
            iteration,
        )
        return
    write_whole(run / TRACKER_NAME, str(iteration).encode(), Faults(""), save_id)
    _tracked[run] = number, save_id
    if is_damaged:
        logger.warning(
            "the tracker in %s names iteration %s now, not %s, whose manifest is damaged: that may be of a "
            "later save, and is not deleted",
            run,
            iteration,
            before,
        )
        return
    if retain_interval is not None and before and before != iteration and before % retain_interval:
        _delete(run / iteration_name(before), save_id)


def _delete(directory: Path, save_id: SaveId) -> None:
    """Deletes a checkpoint that the tracker named until this save was published."""
    if directory.is_symlink() or not is_complete(directory):
        return
    try:
        ids = save_ids_in(directory)
        if any(one.run_id == save_id.run_id and one.ordinal > save_id.ordinal for one in ids):
            return  # after a rollback, this job is saving that iteration again
        remove_folder(directory)
    except OSError as error:
        logger.warning("%s was not deleted (--save-retain-interval): %s", directory, error)
