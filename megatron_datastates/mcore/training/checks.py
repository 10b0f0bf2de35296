"""Checks of Megatron's arguments and of our options when a run starts.

What cannot work is an error. What may not be meant is a warning, which rank 0 logs.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from megatron_datastates import stores
from megatron_datastates.config import ENVIRONMENT_PREFIX, Options
from megatron_datastates.errors import DataStatesError, OptionError, StorageError
from megatron_datastates.files import is_object, path_of
from megatron_datastates.format.directory import TRACKER_NAME, iteration_in_name
from megatron_datastates.mcore.training.arguments import (
    default_near,
    given_options,
    msc_is_enabled,
    options_of,
    uses_fsdp,
)
from megatron_datastates.pipeline.near.places import near_root, resolve_run
from megatron_datastates.pipeline.runs.runs import has_file, is_published, stored_backend
from megatron_datastates.pipeline.saving.background import Answers

logger = logging.getLogger(__name__)
_PATIENCE_SECONDS = 5.0
_DEVICE = Path("/dev/nvidiactl")  # where there is a GPU, and not only a stand-in for torch.cuda
_IN_STORES = ("save", "load", "pretrained_checkpoint")  # arguments that may name object stores


def check_arguments(args: Any) -> Options:
    """Checks arguments that select our format, once Megatron has validated its own; returns our options.

    Raises:
        OptionError, StorageError: as the functions below.
    """
    check_object_stores(args)
    check_fsdp(args)
    options = options_of(args)
    check_fallback(options)
    warn_of_checkpoint_as_run(args)
    warn_of_deadline(args, options)
    warn_of_report_file(args, options)
    warn_of_shared_queue(args)
    if getattr(args, "save", None):
        check_near_options(args, options)
        if not options.near:  # else --save may be away
            warn_of_save(args)
    return options


def check_object_stores(args: Any) -> None:
    """Checks arguments that name object stores (`msc://PROFILE/PATH`), once Megatron has validated its own.

    Raises:
        OptionError: they need an option, are URLs of another kind, or the store cannot be used for what they
            name.
        StorageError: the store does not answer.
    """
    places = {name: _place(args, name) for name in _IN_STORES if getattr(args, name, None)}
    named = [name for name, place in places.items() if is_object(place)]
    if named and not msc_is_enabled():
        raise OptionError(
            f"{_flag(named[0])} {getattr(args, named[0])} is in an object store: give --enable-msc, too "
            "(before Megatron-Core 0.18: leave out --disable-msc), and install multi-storage-client with the "
            "extra of the store, such as multi-storage-client[boto3]"
        )
    place = getattr(args, "non_persistent_global_ckpt_dir", None)
    if getattr(args, "non_persistent_ckpt_type", None) == "global":
        place = place or getattr(args, "save", None)
    if is_object(place or ""):
        raise OptionError(
            f"non-persistent checkpoints are not saved to an object store ({place}): expected "
            "--non-persistent-global-ckpt-dir in a file system"
        )
    for name in named:
        _require_answer(name, places[name])
    if "save" in named and not given_options(args).near:
        near = default_near()  # on every rank: each node has its own
        if getattr(args, "rank", 0) == 0:
            logger.info(
                "--save is in an object store, so checkpoints are written to %s of each node first "
                "(--datastates-near names another directory)",
                near,
            )


def _place(args: Any, name: str) -> Path:
    try:
        return path_of(getattr(args, name))
    except OptionError as error:
        raise OptionError(f"{_flag(name)} {error}") from None


def _require_answer(name: str, place: Path) -> None:
    """Makes one request on each rank: an error on one alone would let the others wait for it."""
    try:
        stores.require_answer(place)
    except OSError as error:
        raise StorageError(
            f"{_flag(name)} {place} cannot be listed: {error.strerror}. Correct the profile, its bucket or "
            "its credentials, or start again once the store answers"
        ) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_fsdp(args: Any) -> None:
    """Checks arguments of a run with Megatron-FSDP that saves in our format.

    Raises:
        OptionError: it asks for checkpoints that Megatron could not resume from, in any format.
    """
    if uses_fsdp(args) and getattr(args, "non_persistent_ckpt_type", None) == "global":
        raise OptionError(
            "--non-persistent-ckpt-type global: with --use-megatron-fsdp, Megatron cannot resume from such "
            "checkpoints. Leave it out, and give a smaller --save-interval"
        )


def check_fallback(options: Options) -> None:
    """Checks the options for damaged checkpoints.

    Raises:
        OptionError: an older checkpoint is to be loaded, and none to be looked for.
    """
    if options.on_damage == "fallback" and not options.fallback:
        raise OptionError(
            "--datastates-on-damage fallback needs --datastates-fallback N, the number of older checkpoints "
            "that may be verified to find an undamaged one"
        )


def check_near_options(args: Any, options: Options) -> None:
    """Checks options of a near tier in a run that saves, and may have none.

    Raises:
        OptionError: the near tier is --save, or in it; or Megatron would hash files that are not in --save
            yet; or there is no near tier, and another option is an argument. In the environment, which many
            jobs may share, the latter is a warning.
    """
    if options.near and getattr(args, "verify_integrity", False):
        raise OptionError(
            f"--verify-integrity: Megatron hashes the files in --save {args.save} as soon as a checkpoint is "
            "published, when they are still in the near tier only (--datastates-near): leave it out. Loads "
            "compare the checksums of all that they read, and `datastates verify` those of whole checkpoints"
        )
    if options.near and not is_object(args.save):
        _require_apart(args.save, options.near)
    given = {
        "near_keep": options.near_keep != 1,
        "near_replicas": options.near_replicas > 0,
        "drain_every": options.drain_every != 1,
        "drain_limit": options.drain_limit > 0,
    }
    for name in (name for name, is_given in given.items() if is_given and not options.near):
        flag = _flag("datastates_" + name)
        if getattr(args, "datastates_" + name, None) is not None:
            raise OptionError(f"{flag} needs --datastates-near DIR")
        if getattr(args, "rank", 0) == 0:
            variable = ENVIRONMENT_PREFIX + name.upper()
            logger.warning("%s needs --datastates-near DIR: it is ignored", variable)


def _require_apart(save: str, option: str) -> None:
    """Raises OptionError if the near tier is --save, or in it, among the checkpoints of the run."""
    try:
        near = Path(os.path.realpath(near_root(option)))
    except OptionError:
        return  # it is none on this node: the first load or save says so, on all ranks
    run = resolve_run(Path(save))  # also for saves, should --save hang later
    if near.is_relative_to(run) and "$" not in str(near):  # a variable without a value is an error of its own
        raise OptionError(
            f"--datastates-near {near} is in --save {run}: expected a directory outside of it, on faster "
            "storage"
        )


def warn_of_deadline(args: Any, options: Options) -> None:
    """Logs a warning if a save may wait for longer than NCCL lets the other ranks wait for this one."""
    limits = [
        60 * (getattr(args, "distributed_timeout_minutes", None) or 0),
        getattr(args, "distributed_timeout_seconds_after_init", None) or 0,
    ]
    least = min((limit for limit in limits if limit), default=None)
    if least is not None and 2 * options.fence_deadline > least and getattr(args, "rank", 0) == 0:
        logger.warning(
            "--datastates-fence-deadline %g: a save may wait twice as long, at its start and at the next "
            "step, and process groups time out after %g s, which would end the job instead of the save: "
            "expected at most %g",
            options.fence_deadline,
            least,
            least / 2,
        )


def warn_of_shared_queue(args: Any) -> None:
    """Logs a warning on rank 0 if copies of asynchronous saves would take turns with the trainer's kernels.

    It is too late to change that: CUDA reads its environment when it starts.
    """
    is_one = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    is_shared = is_one and "CUDA_DEVICE_MAX_COPY_CONNECTIONS" not in os.environ
    is_asked = getattr(args, "async_save", False) and getattr(args, "rank", 0) == 0
    if is_shared and is_asked and _DEVICE.exists():
        logger.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=1: copies of a save share the kernels' queue, and the iteration "
            "after a save takes longer by more than half of their time. Set "
            "CUDA_DEVICE_MAX_COPY_CONNECTIONS=8 in the environment that starts Python: copies then have "
            "queues of their own, and kernels stay in order"
        )


def warn_of_report_file(args: Any, options: Options) -> None:
    """Logs a warning on rank 0 if reports cannot be written as things are: saves go on without."""
    folder = Path(options.report_file).absolute().parent
    if not options.report_file or getattr(args, "rank", 0) != 0:
        return
    if Path(options.report_file).is_dir():
        reason = "it is a directory"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"{folder} {'is not writable' if folder.exists() else 'does not exist'}"
    else:
        return
    logger.warning(
        "--datastates-report-file %s: no report can be written there now, as %s", options.report_file, reason
    )


def warn_of_save(args: Any) -> None:
    """Logs a warning on rank 0 if no checkpoint could be saved as things are, hours before the first one."""
    save = path_of(args.save)
    if getattr(args, "rank", 0) != 0 or is_object(save):
        return
    try:
        reason = Answers().get(lambda: _why_not_writable(save.absolute()), _PATIENCE_SECONDS)
    except OSError as error:  # or no answer in time
        reason = error.strerror or "it does not answer"
    if reason:
        logger.warning("--save %s: no checkpoint can be saved there now: %s", args.save, reason)


def _why_not_writable(directory: Path) -> str:
    """Returns why nothing can be made in a directory, which may not be there yet; empty if it can.

    Raises OSError.
    """
    there = directory
    while not there.exists():
        if there.is_symlink():
            return f"{there} is a link to {there.readlink()}, which does not exist"
        there = there.parent
    if not there.is_dir():
        return f"{there} is no directory"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


def warn_of_checkpoint_as_run(args: Any) -> None:
    """Logs a warning on rank 0 if --load is a checkpoint: Megatron finds no tracker in it, and goes on."""
    given = getattr(args, "load", None)
    if not given or getattr(args, "ckpt_step", None) or getattr(args, "rank", 0) != 0:
        return
    path = path_of(given)
    with contextlib.suppress(OSError, DataStatesError):  # a load says more
        if not (is_published(path) or stored_backend(path)) or has_file(path / TRACKER_NAME):
            return
        iteration = iteration_in_name(path.name)
        step = f"--load {path.parent} --ckpt-step {iteration}" if iteration else "the directory of its run"
        logger.warning(
            "--load %s is a checkpoint, and has no tracker: Megatron starts from random weights. Pass %s",
            given,
            step,
        )
