"""Deletion of old checkpoints by Megatron: its cleanup of non-persistent checkpoints, and its retention.

Unmodified Megatron keeps the non-persistent directories with the highest numbers, complete or not, and its
retention deletes the checkpoint that the tracker named before. With our hooks, these are never deleted:
  1. directories that a save of this process is writing, or is about to write;
  2. the checkpoint that the tracker in the same directory names;
  3. the newest complete ones. A directory is complete if a save of ours was published there, or if it has
     another format's metadata.json, which is written last.
(Megatron 0.16 deletes for retention without a hook point: there the rules hold for cleanup only.)
With --async-save, Megatron 0.17 and newer fork a process for each deletion. That holds the trainer for tens
of milliseconds, longer with more memory, and copies a process that has threads: ours are made by threads.
A deletion that is cut short must not leave what looks like a checkpoint: the manifest goes first.
Deletion runs concurrently with training; a save into a directory that is being deleted waits for that.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_datastates.files import is_object, path_of
from megatron_datastates.format.directory import TRACKER_NAME, iteration_name
from megatron_datastates.mcore.training import tracker_writing
from megatron_datastates.mcore.training.tracker_recovery import mend
from megatron_datastates.pipeline.near.removal import remove_folder, remove_manifest
from megatron_datastates.pipeline.runs.runs import find_iterations, is_complete, is_named_by_megatron
from megatron_datastates.pipeline.runs.tracker import read_tracked, tracked_iteration
from megatron_datastates.pipeline.saver_pool import directories_at_work

logger = logging.getLogger(__name__)
_TRACKER_SECONDS = 1.0  # to be whole
_about_to_save: list[int] = []  # the iteration of the running save_checkpoint, if any
# Used by any thread, in atomic operations.
_deletions: dict[Path, threading.Thread] = {}


class _Deletion(threading.Thread):
    """Stands in for the process that Megatron forks for a deletion."""

    pid = None  # Megatron logs it

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...], daemon: bool) -> None:
        # As for synchronous saves. The other arguments lower the priority of the process, here the trainer's.
        super().__init__(target=target, args=args[:3], daemon=daemon, name="datastates-retention")


class _Threads:
    """Stands in for `multiprocessing` in Megatron's checkpointing, which deletes in a forked process."""

    @staticmethod
    def get_context(method: str | None = None) -> Any:
        return types.SimpleNamespace(Process=_Deletion)

    def __getattr__(self, name: str) -> Any:  # releases to come may use more of it
        return getattr(multiprocessing, name)


_THREADS = _Threads()


@contextlib.contextmanager
def saving(iteration: int) -> Iterator[None]:
    """Wraps a `save_checkpoint` of that iteration: waits until its directory is not being deleted."""
    from megatron.training import checkpointing

    if getattr(checkpointing, "multiprocessing", None) is multiprocessing:
        checkpointing.multiprocessing = _THREADS
    args = checkpointing.get_args()
    name = iteration_name(iteration)
    for path, thread in list(_deletions.items()):
        if path.name == name and thread.ident is not None:  # an interrupt may have kept it from starting
            thread.join()
    finalize = getattr(checkpointing, "finalize_deletion_processes", None)  # 0.16 deletes by itself
    there = os.path.join(args.save, name)  # noqa: PTH118
    # Only rank 0 deletes. Path.exists would raise some errors, on it alone. With a near tier, the drain
    # deletes and writes the tracker (so it does for an object store), and --save may hang.
    if args.rank == 0 and not tracker_writing.saves_are_near():
        # Without any, --save is not asked: it may hang.
        deleting = getattr(checkpointing, "_deletion_processes", True)
        if finalize is not None and deleting and os.path.exists(there):  # noqa: PTH110
            finalize(blocking=True)  # deletions by retention with --async-save
        if getattr(args, "save_retain_interval", None) is not None and not is_object(args.save):
            mend(path_of(args.save) / TRACKER_NAME)
    _about_to_save.append(iteration)
    try:
        yield
    finally:
        _about_to_save.pop()


def deletable(root: Path, leave: int) -> list[Path]:
    """Returns the directories in `root` that cleanup may delete, oldest first: see the module's rules.

    An incomplete directory older than a complete one was left by a crash, and is deleted.

    Raises:
        OSError: the directory cannot be listed, or its tracker not be read: what it names may be the one to
            resume from.
    """
    iterations = [one for one in find_iterations(root) if is_named_by_megatron(one.path)]
    found = [one for one in iterations if not one.path.is_symlink()]
    complete = [one.number for one in found if one.complete]
    if not complete:
        return []
    kept = {*complete[-leave:], read_tracked(root / TRACKER_NAME)}
    return [
        one.path
        for one in found
        if one.number not in kept
        and one.number < complete[-1]
        and not _is_being_written(one.path, one.number)
    ]


def _is_being_written(path: Path, iteration: int) -> bool:
    return iteration in _about_to_save or path.absolute() in directories_at_work()


def wrap_cleanup_old_non_persistent_checkpoint(
    original: Callable[..., Any], save_dir: str, leave_ckpt_num: int = 1, do_async: bool = False
) -> None:
    """Wraps `cleanup_old_non_persistent_checkpoint`: replaces it by a cleanup that follows the rules."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    try:
        directories = deletable(path_of(save_dir), leave_ckpt_num)
    except FileNotFoundError:
        return  # nothing has been saved there yet
    except OSError as error:
        logger.warning("non-persistent checkpoints in %s were not cleaned up: %s", save_dir, error)
        return
    if not directories:
        return
    logger.info("deleting non-persistent checkpoints: %s", ", ".join(map(str, directories)))
    thread = threading.Thread(target=_delete, args=(directories,), name="datastates-cleanup")
    for directory in directories:
        _deletions[directory] = thread
    try:
        thread.start()
    except RuntimeError:  # there is no thread: rank 0 must not fail alone
        _delete(directories)
        return
    if not do_async:
        thread.join()


def _delete(directories: list[Path]) -> None:
    """Deletes directories, and logs those that it cannot delete: rank 0 must not fail alone."""
    for directory in directories:
        try:
            remove_folder(directory)
        except OSError as error:
            logger.warning("the non-persistent checkpoint %s was not deleted: %s", directory, error)
        _deletions.pop(directory, None)


def wrap_async_delete_checkpoint_impl(
    original: Callable[..., Any], save_path: str, iteration_to_delete: int, *args: Any, **kwargs: Any
) -> None:
    """Wraps `_async_delete_checkpoint_impl`, which retention runs in a thread or a forked process."""
    root = path_of(save_path)
    directory = root / iteration_name(iteration_to_delete)
    # Noted before the checks: a later save waits, an earlier one is seen.
    _deletions[directory] = threading.current_thread()
    try:
        if tracker_writing.saves_are_near():
            return  # the drain deletes, once a newer checkpoint is published there (tracker_writing.py)
        tracked = _tracked_soon(root / TRACKER_NAME)
        if tracked == iteration_to_delete:
            logger.warning("%s is not deleted: it is the latest checkpoint there", directory)
        elif directory.is_symlink():  # Megatron deletes no link, but the manifest would go
            logger.warning("%s is not deleted: it is a link", directory)
        elif tracked is None or not is_complete(root / iteration_name(tracked)):
            logger.warning(
                "%s is not deleted: the checkpoint that the tracker names is not complete", directory
            )
        elif _is_being_written(directory, iteration_to_delete):
            logger.warning("%s is not deleted: a save is writing to it", directory)
        else:
            with contextlib.suppress(OSError):  # Megatron's own attempt says why it failed
                remove_manifest(directory)
            _collecting(original)(save_path, iteration_to_delete, *args, **kwargs)
    finally:
        _deletions.pop(directory, None)


def _collecting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Megatron's function without what switches the garbage collector off while it runs.

    That was meant for a process of its own. In the trainer's, memory would grow for as long as storage takes.
    """
    is_in_context = getattr(original, "__globals__", {}).get("__name__") == contextlib.__name__
    return getattr(original, "__wrapped__", original) if is_in_context else original


def _tracked_soon(tracker: Path) -> int | None:
    """Returns what a tracker names. Megatron empties the file before it writes to it: waits for a second."""
    deadline = time.monotonic() + _TRACKER_SECONDS
    while (tracked := tracked_iteration(tracker)) is None and time.monotonic() < deadline:
        time.sleep(_TRACKER_SECONDS / 20)
    return tracked
