"""Megatron's training loop once `--ckpt-format datastates` was given."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron_datastates.config import Options
from megatron_datastates.errors import HookPointError
from megatron_datastates.mcore.attach import replace
from megatron_datastates.pipeline.held import holding

logger = logging.getLogger(__name__)


def enable_saving(options: Options) -> None:
    """Replaces torch_dist's save strategy in Megatron's training loop. Idempotent."""
    import megatron.training.checkpointing as checkpointing

    from megatron_datastates.mcore import fences, request, retention, versions
    from megatron_datastates.mcore.strategy import TrainingSaveStrategy
    from megatron_datastates.pipeline.saver import saver_for

    request.on_failure = options.on_failure
    saver = saver_for(options)
    saver.warm_up()
    saver.reporter.listeners[:] = [_write_scalars]

    def make_strategy(*args: Any, **kwargs: Any) -> TrainingSaveStrategy:
        return TrainingSaveStrategy(options=options)

    name = versions.installed().training_strategy
    if not hasattr(checkpointing, name):
        raise HookPointError(f"megatron.training.checkpointing has no {name} that saves could be given to")
    setattr(checkpointing, name, make_strategy)
    retention.install(checkpointing)
    replace(checkpointing, "save_checkpoint", lambda original: _held(original, options, checkpointing))
    replace(checkpointing, "load_checkpoint", fences.before_load)  # other formats load in other ways


def _held(original: Callable[..., Any], options: Options, checkpointing: Any) -> Callable[..., Any]:
    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        from megatron_datastates.mcore import retention
        from megatron_datastates.mcore.request import SaveFailed

        with holding("save_checkpoint"), retention.saving(iteration, checkpointing):
            try:
                return original(iteration, *args, **kwargs)
            except SaveFailed as error:  # on every rank alike, so every rank goes on alike
                if options.on_failure == "raise":
                    raise
                logger.warning("%s Training goes on (--datastates-on-failure warn).", error)
                return None

    return save_checkpoint


def _write_scalars(report: dict[str, Any]) -> None:
    """To TensorBoard and W&B, with this rank's times; Megatron gives writers to the last rank alone."""
    if report["state"] != "published" or report["iteration"] is None:
        return
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    names = ("held_ms", "fence_ms", "staging_ms", "writing_ms", "write_mb_per_s", "bytes")
    scalars = {f"datastates/{name}": report[name] for name in names}
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, report["iteration"])
    if wandb is not None:  # it drops what belongs to an earlier step than the last
        wandb.log(scalars, max(report["iteration"], getattr(get_args(), "curr_iteration", 0)))
