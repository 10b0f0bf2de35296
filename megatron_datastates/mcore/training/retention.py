"""Which old checkpoints Megatron may delete, and when: cleanup of non-persistent ones, retention.

Stock Megatron keeps the non-persistent directories with the highest numbers, complete or not, and retention
deletes what the tracker named before, whoever needs it. Kept here, whatever Megatron asks for:
  1. what a save of this process is writing, or is about to;
  2. the checkpoint that the tracker beside it names;
  3. the newest complete ones. A directory is complete if a save of ours was published there, or if
     another format's metadata.json, which is written last, is there.
(0.16 deletes by itself what retention is to delete: there only 1 to 3 of cleanup hold.)
Deletion runs beside the trainer; a save into a directory that is being deleted waits for that first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_datastates.format.directory import TRACKER_NAME, iteration_name
from megatron_datastates.mcore.training.tracker import mend
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.runs import find_iterations, is_complete, tracked_iteration

logger = logging.getLogger(__name__)
_under_way: list[Publication] = []  # the trainer's thread's alone, as is _about_to_save
_about_to_save: list[int] = []  # the iteration of the open save_checkpoint, if one is
# Any thread's, one atomic operation at a time: a lock could be held when retention forks.
_deletions: dict[Path, threading.Thread] = {}


def note(publication: Publication) -> None:
    """Takes note of a save that goes on behind the trainer."""
    _under_way[:] = [*_pending(), publication]


def _pending() -> list[Publication]:
    return [save for save in _under_way if save.outcome is Outcome.PENDING]


@contextlib.contextmanager
def saving(iteration: int) -> Iterator[None]:
    """Around a `save_checkpoint` of that iteration: makes sure that its directory is not being deleted."""
    from megatron.training import checkpointing

    args = checkpointing.get_args()
    name = iteration_name(iteration)
    for path, thread in list(_deletions.items()):
        if path.name == name:
            thread.join()
    finalize = getattr(checkpointing, "finalize_deletion_processes", None)  # 0.16 deletes by itself
    # Not pathlib's: some errors would raise there, on one rank alone.
    if finalize is not None and os.path.exists(Path(args.save, name)):  # noqa: PTH110
        finalize(blocking=True)  # those of retention with --async-save
    if getattr(args, "save_retain_interval", None) is not None and args.rank == 0:
        mend(Path(args.save, TRACKER_NAME))
    _about_to_save.append(iteration)
    try:
        yield
    finally:
        _about_to_save.pop()


def deletable(root: Path, leave: int) -> list[Path]:
    """What cleanup may delete right under `root`, oldest first: see the module's rules.

    Incomplete directories go once a newer complete one is there: a crash left them.
    """
    found = [one for one in find_iterations(root) if not one.path.is_symlink()]
    complete = [one.number for one in found if one.complete]
    if not complete:
        return []
    kept = {*complete[-leave:], tracked_iteration(root / TRACKER_NAME)}
    return [
        one.path
        for one in found
        if one.number not in kept
        and one.number < complete[-1]
        and not _is_being_written(one.path, one.number)
    ]


def _is_being_written(path: Path, iteration: int) -> bool:
    if iteration in _about_to_save:
        return True
    return path.absolute() in [save.save.context.directory for save in _pending()]


def wrap_cleanup_old_non_persistent_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `cleanup_old_non_persistent_checkpoint`."""

    def cleanup_old_non_persistent_checkpoint(
        save_dir: str, leave_ckpt_num: int = 1, do_async: bool = False
    ) -> None:
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_rank() != 0:
            return
        try:
            directories = deletable(Path(save_dir), leave_ckpt_num)
        except OSError as error:
            logger.warning("non-persistent checkpoints in %s were not looked at: %s", save_dir, error)
            return
        if not directories:
            return
        logger.info("non-persistent checkpoints to be removed: %s", ", ".join(map(str, directories)))
        thread = threading.Thread(target=_delete, args=(directories,), name="datastates-cleanup")
        for directory in directories:
            _deletions[directory] = thread
        thread.start()
        if not do_async:
            thread.join()

    return cleanup_old_non_persistent_checkpoint


def _delete(directories: list[Path]) -> None:
    """What cannot be deleted stays, and is told: rank 0 alone must not fail because of it."""
    for directory in directories:
        try:
            shutil.rmtree(directory)
        except OSError as error:
            logger.warning("a non-persistent checkpoint was not removed: %s", error)
        _deletions.pop(directory, None)


def wrap_async_delete_checkpoint_impl(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `_async_delete_checkpoint_impl`, which retention runs in a thread or a forked process."""

    def _async_delete_checkpoint_impl(
        save_path: str, iteration_to_delete: int, *args: Any, **kwargs: Any
    ) -> None:
        root = Path(save_path)
        directory = root / iteration_name(iteration_to_delete)
        _deletions[directory] = threading.current_thread()  # before the looks: a save waits, or was seen
        try:
            tracked = tracked_iteration(root / TRACKER_NAME)
            if tracked == iteration_to_delete:
                logger.warning("%s is not deleted: it is the latest checkpoint there", directory)
            elif tracked is None or not is_complete(root / iteration_name(tracked)):
                logger.warning("%s is not deleted: what the tracker names instead is not complete", directory)
            elif _is_being_written(directory, iteration_to_delete):
                logger.warning("%s is not deleted: a save is writing to it", directory)
            else:
                original(save_path, iteration_to_delete, *args, **kwargs)
        finally:
            _deletions.pop(directory, None)

    return _async_delete_checkpoint_impl
