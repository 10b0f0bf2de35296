"""Saves in Megatron's training loop with `--ckpt-format datastates`."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_datastates.config import GIB, Options
from megatron_datastates.errors import HookPointError, OptionError, SaveFailedError
from megatron_datastates.format.directory import BACKEND
from megatron_datastates.mcore.hooks.attach import attach_saving, attach_training, replace
from megatron_datastates.mcore.hooks.calls import SAVES, parameters_of
from megatron_datastates.mcore.providers import find_functions, registered
from megatron_datastates.mcore.training.arguments import (
    adopt,
    is_converting,
    options_of,
    run_arguments,
    set_dependent_arguments,
    structure_as_given,
    uses_fsdp,
    validate_without_worker,
)
from megatron_datastates.mcore.training.checks import check_arguments
from megatron_datastates.pipeline.saving.held import trainer_held

if TYPE_CHECKING:
    from megatron_datastates.mcore.save.strategy import TrainingSaveStrategy

logger = logging.getLogger(__name__)
_LOOP = "megatron.training.training"
_LAST_CALL = "maybe_finalize_async_save"  # of `pretrain`, with terminate=True; called elsewhere, too
_DECISION = "checkpoint_and_decide_exit"  # of `train`, after each iteration
_SAVE = "save_checkpoint_and_time"  # which calls save_checkpoint
_SCALARS = (  # of a report, for TensorBoard and W&B
    *("held_ms", "fence_ms", "stream_wait_ms", "staging_ms", "writing_ms", "durable_ms", "published_ms"),
    *("write_mb_per_s", "bytes"),
)
_options: Options | None = None  # of the last call of enable_saving
_loops = 0  # calls of Megatron's `train` that have not returned
_skipped = 0  # saves
_failed = 0  # saves, as far as this rank writes to TensorBoard or W&B
_may_skip = False  # True while the loop makes the saves of an interval: no others are skipped


def enable_saving(options: Options) -> None:
    """Makes Megatron's training loop save in our format. Idempotent: arguments may be parsed twice.

    Raises:
        HookPointError: this release of Megatron lacks a hook point.
    """
    from megatron_datastates.mcore import fences  # which imports torch
    from megatron_datastates.pipeline.report import Listener
    from megatron_datastates.pipeline.saver_pool import saver_for

    global _options
    attach_saving()
    saver = saver_for(options)
    saver.warm_up(fences.stepped_bytes)
    writers = Listener(_write_scalars, _has_writers)
    if writers not in saver.reporter.listeners:
        saver.reporter.listeners.append(writers)
    attach_training()
    attach_to_train()
    _options = options


def attach_to_train() -> None:
    """Wraps Megatron's `train`. A program that has not imported its module runs a loop of its own."""
    loop = sys.modules.get(_LOOP)
    if loop is not None:
        replace(loop, "train", wrap_train)
        if hasattr(loop, _LAST_CALL):  # without it, object stores are drained when the interpreter ends
            replace(loop, _LAST_CALL, wrap_last_call)
        if hasattr(loop, _DECISION):
            replace(loop, _DECISION, wrap_decision)
        if hasattr(loop, _SAVE):
            from megatron_datastates.mcore.training.device_cache import wrap_save_and_time  # imports torch

            replace(loop, _SAVE, functools.partial(wrap_save_and_time, is_ours=_is_save_of_ours))


def is_training() -> bool:
    """Returns whether Megatron's own loop is running, where parameters change only in optimizer steps."""
    return _loops > 0


def wrap_train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `train`, Megatron's own loop.

    It starts with all state providers made, which may watch the training from its first step, and only with
    the data loader at its loaded position.
    """
    from megatron_datastates.mcore.training.device_cache import forget_saves  # imports torch
    from megatron_datastates.pipeline.saver_pool import agree, finish_objects

    global _loops
    if _options is not None:
        agree(_options)  # a load may have done so
        saves_position = bool(getattr(run_arguments(), "dataloader_save", None))
        registered(_options.providers, expects_loader=saves_position)
        _announce(_options)
    _require_restored_data(parameters_of(original).of_call(args, kwargs).get("train_data_iterator"))
    forget_saves()
    _loops += 1
    try:
        return original(*args, **kwargs)
    except SystemExit as end:  # as --exit-interval and signals end it
        finish_objects()
        if not end.code:  # others say more: those of the rerun state machine are for the launcher
            _require_last_save()
        raise
    finally:
        _loops -= 1


def _announce(options: Options) -> None:
    """Prints on rank 0, as Megatron prints what it does, that and how checkpoints are ours."""
    from megatron.training.checkpointing import print_rank_0

    how = "synchronously"
    if getattr(run_arguments(), "async_save", False):
        is_lazy = options.lazy
        when = "during the next forward and backward pass" if is_lazy else "before each save returns"
        how = f"asynchronously, copied {when}"
    memory = f"{options.staging_memory / GIB:.3g} GiB" if options.staging_memory else "at most a rank's shard"
    where = getattr(run_arguments(), "save", None)
    first = f", first to the near tier {options.near} of each node" if options.near else ""
    print_rank_0(
        f"  datastates: checkpoints are saved to {where} {how}{first}; pinned memory for staging: {memory}; "
        "--logging-level 20 logs a line for each save"
    )


def wrap_last_call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `maybe_finalize_async_save`: at the end of `pretrain`, object stores get what is left.

    Raises:
        SaveFailedError: the last save has failed, and nothing has been raised for it.
    """
    from megatron_datastates.pipeline.saver_pool import finish_objects

    if kwargs.get("terminate"):
        _say_what_is_awaited()
    result = original(*args, **kwargs)
    if kwargs.get("terminate") and not is_training():
        finish_objects()
        _require_last_save()
    return result


def _require_last_save() -> None:
    """Raises the error of a run's last save, on all ranks: with `on_failure` "warn", it was only logged.

    Training does not continue after it, and who looks at the exit code alone would take the run for saved.
    """
    from megatron_datastates.mcore.errors import MegatronSaveFailedError
    from megatron_datastates.pipeline.saver_pool import saver_for

    if _options is None or _options.on_failure == "raise":  # what has failed has been raised
        return
    error = saver_for(_options).session.last_error
    if error:
        raise MegatronSaveFailedError(f"{error} It was the last save of the run, which ends with this error.")


def _say_what_is_awaited() -> None:
    """Prints on rank 0 which save holds the end of the run: whoever stopped it may think that it hangs."""
    from megatron.training.checkpointing import print_rank_0

    from megatron_datastates.pipeline.saver_pool import saver_for

    unfinished = None if _options is None else saver_for(_options).unfinished_save()
    if unfinished is not None:
        print_rank_0(f"  datastates: the run ends once the save to {unfinished}, and any after it, are over")


def wrap_decision(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `checkpoint_and_decide_exit`: where the run ends after a skipped save, it is made after all.

    What ends a run (a signal, the time, the iteration) is so the second time, too, on all ranks.
    """
    global _may_skip
    before = _skipped
    _may_skip = True
    try:
        is_over = original(*args, **kwargs)
    finally:
        _may_skip = False
    if not is_over or _skipped == before:
        return is_over
    if getattr(run_arguments(), "rank", 0) == 0:  # on all ranks alike
        logger.warning("datastates: the run ends here, so the save that was just skipped is made after all")
    return original(*args, **kwargs)


def _is_save_of_ours(call: Mapping[str, Any]) -> bool:
    chosen = run_arguments()
    return _saves_are_ours(chosen) and not _is_local(call, chosen)


def _require_restored_data(train_iterator: Any) -> None:
    # Only loaders of the script's own have a position: Megatron's go by the number of consumed samples.
    if getattr(run_arguments(), "dataloader_type", None) == "external":
        from megatron_datastates.mcore.dataloader import LOOP

        LOOP.require_restored(train_iterator)


def wrap_save_strategy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> TrainingSaveStrategy:
    """Wraps the function or class that `megatron.training.checkpointing` calls for a save strategy."""
    return _strategy()


def _strategy() -> TrainingSaveStrategy:
    from megatron_datastates.mcore.save.strategy import TrainingSaveStrategy
    from megatron_datastates.mcore.training import tracker_writing
    from megatron_datastates.mcore.training.origin import origin

    return TrainingSaveStrategy(
        _options,
        is_training,
        far_published=tracker_writing.far_published,
        origin=lambda: origin(in_loop=is_training()),
        is_kept=tracker_writing.is_kept,
    )


def wrap_validate_args(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Wraps `validate_args`."""
    if getattr(args, "dist_ckpt_format_deprecated", None) == BACKEND:
        raise OptionError("Megatron ignores --dist-ckpt-format: use --ckpt-format datastates")
    if not adopt(args) or is_converting(args):
        return original(args, *rest, **kwargs)
    result = validate_without_worker(original, args, *rest, **kwargs)
    options = check_arguments(args)
    set_dependent_arguments(args)
    find_functions(options.providers)  # a wrong name is an error now, not at the first save
    if getattr(args, "save", None):
        enable_saving(options)
    return result


def wrap_save_checkpoint(original: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Wraps `save_checkpoint`, in any format: a save that should be ours never uses another format.

    The trainer is held for the whole call. A failed save raises, or is logged with `on_failure` "warn".

    Raises:
        HookPointError: Megatron has saved in another format, as somebody has replaced what we had replaced.
    """
    chosen = run_arguments()
    if not _saves_are_ours(chosen):
        return original(iteration, *args, **kwargs)

    from megatron_datastates.mcore import dataloader
    from megatron_datastates.mcore.save import preparing  # which imports the native module
    from megatron_datastates.mcore.training import device_cache, fsdp, retention, tracker_writing

    call = parameters_of(original).of_call((iteration, *args), kwargs)
    assert _options is not None, "_saves_are_ours has called enable_saving"
    if _is_skipped(call, chosen, _options):
        return None
    is_ours, planned = not _is_local(call, chosen), uses_fsdp(chosen)
    held, calls = trainer_held("save_checkpoint"), SAVES.calls
    with (
        held,
        tracker_writing.saving(_options, is_release=bool(call.get("release"))),
        retention.saving(iteration),  # which asks whether saves are near
        dataloader.saving(is_ours=is_ours),
        device_cache.saving(is_ours=is_ours),
        contextlib.nullcontext() if is_ours else structure_as_given(chosen),
        preparing.saving(
            is_ours=is_ours and not planned,
            is_on=_options.prepared,
            is_constant=_is_constant(call, chosen),
        ),
    ):
        try:
            with fsdp.saving(_strategy()) if is_ours and planned else contextlib.nullcontext():
                result = original(iteration, *args, **kwargs)
        except SaveFailedError as error:  # on every rank, so all continue together
            if _options.on_failure == "raise":
                raise
            if getattr(chosen, "rank", 0) == 0 or not getattr(error, "is_agreed", False):
                logger.warning("%s Training continues (--datastates-on-failure warn).", error)
            return None
    # Megatron may also save nothing, as its main does with --freeze-all-layers.
    if is_ours and held.holder is None and SAVES.calls > calls:
        raise HookPointError(
            f"iteration {iteration} was not saved in the datastates format, but in another one: after "
            "megatron_datastates was attached to megatron.training.checkpointing, a program has reloaded "
            "that module, or replaced its save strategy"
        )
    return result


def _is_skipped(call: dict[str, Any], args: Any, options: Options) -> bool:
    """Returns whether a save is left out because another one is unfinished; on all ranks alike.

    Never the last one of a run: nothing would be saved later. So only saves of an interval are left out, and
    not those that precede an exit or a new phase. A step that the rerun state machine doubts is saved by
    `train` itself, under the number of the iteration before it. Whether a signal or --exit-duration-in-mins
    ends the run in that very iteration is not known yet (`wrap_decision`).
    """
    from megatron_datastates.pipeline.report import skip_report
    from megatron_datastates.pipeline.saver_pool import saver_for

    global _skipped
    is_asked = _may_skip and options.while_saving == "skip" and getattr(args, "async_save", False)
    if not is_asked or not is_training() or _is_local(call, args):
        return False
    iteration = call["iteration"]
    exit_interval = getattr(args, "exit_interval", None) or 0
    is_last = iteration >= (getattr(args, "train_iters", None) or 0)
    is_last |= exit_interval > 0 and iteration % exit_interval == 0
    intervals = [getattr(args, f"{kind}save_interval", None) for kind in ("", "non_persistent_")]
    is_due = any(interval and iteration % interval == 0 for interval in intervals)
    if is_last or not is_due:
        return False
    saver = saver_for(options)
    unfinished = saver.unfinished_save()
    if unfinished is None:
        return False
    _skipped += 1
    report, rank = skip_report(iteration, unfinished), getattr(args, "rank", 0)
    if rank == 0:  # all ranks skip it
        logger.warning(
            "datastates: iteration %d is not saved, because the save to %s is not finished "
            "(--datastates-while-saving skip; skipped so far: %d)",
            iteration,
            unfinished,
            _skipped,
        )
    saver.reporter.emit(rank, lambda: report, later=True)
    return True


def _is_local(call: Mapping[str, Any], args: Any) -> bool:
    """Returns whether a call of save_checkpoint saves to the node's own disk, which Megatron does itself."""
    local = getattr(args, "non_persistent_ckpt_type", None) == "local"
    return local and bool(call.get("non_persistent_ckpt"))


def _is_constant(call: dict[str, Any], args: Any) -> bool:
    """Returns whether Megatron takes the structure of the state for known, and exchanges nothing about it."""
    strategy = (call.get("checkpointing_context") or {}).get("save_strategy")
    is_constant = getattr(args, "ckpt_assume_constant_structure", False)
    return is_constant and strategy is not None


def _saves_are_ours(args: Any) -> bool:
    """Returns whether the arguments select our format; calls enable_saving if this process has not.

    Arguments may have been parsed and validated in another process (Ray's driver) or come from a file.

    Raises:
        OptionError, HookPointError: they select our format, and it is not available.
    """
    if not adopt(args) or is_converting(args):
        return False
    if _options is None:
        set_dependent_arguments(args)
        enable_saving(options_of(args))
    return True


def _has_writers() -> bool:
    """Returns whether Megatron writes to TensorBoard or W&B on this rank: on the last one only."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    return get_tensorboard_writer() is not None or get_wandb_writer() is not None


def _write_scalars(report: dict[str, Any]) -> None:
    """Writes to TensorBoard and W&B: how many saves have failed, and this rank's and the slowest's times."""
    global _failed
    if report["event"] != "save":
        return
    _failed += report["state"] != "published"
    if report["iteration"] is None:
        return
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    scalars = {"datastates/failed_saves": _failed}
    if report["state"] == "published":
        scalars |= {f"datastates/{name}": report[name] for name in _SCALARS}
        for name, spread in report["ranks_ms"].items():
            scalars[f"datastates/max_{name}_ms"] = spread["max"]
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, report["iteration"])
    if wandb is not None:  # W&B drops values for steps before its last one
        wandb.log(scalars, max(report["iteration"], getattr(run_arguments(), "curr_iteration", 0)))
