"""Megatron's training loop once `--ckpt-format datastates` was given."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron_datastates.config import Options
from megatron_datastates.mcore.attach import attach_training
from megatron_datastates.pipeline.held import holding

logger = logging.getLogger(__name__)


_options = Options()  # those of the last call of enable_saving


def enable_saving(options: Options) -> None:
    """Makes saves in Megatron's training loop ours. Idempotent: arguments may be parsed twice.

    Raises:
        HookPointError: this release of Megatron lacks what we attach to.
    """
    from megatron_datastates.mcore import retention
    from megatron_datastates.pipeline.saver import saver_for

    global _options
    _options = options
    saver = saver_for(options)
    saver.warm_up()
    saver.reporter.listeners[:] = [_write_scalars]
    retention.install()
    attach_training()


def our_strategy(original: Callable[..., Any]) -> Callable[..., Any]:
    """For what makes the save strategy in `megatron.training.checkpointing`."""
    from megatron_datastates.mcore.strategy import TrainingSaveStrategy

    return lambda *args, **kwargs: TrainingSaveStrategy(options=_options)


def held(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `save_checkpoint`: all of it holds the trainer; a failure may be told to be only a warning."""
    from megatron_datastates.mcore import retention
    from megatron_datastates.mcore.request import SaveFailed

    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        with holding("save_checkpoint"), retention.saving(iteration):
            try:
                return original(iteration, *args, **kwargs)
            except SaveFailed as error:  # on every rank alike, so every rank goes on alike
                if _options.on_failure == "raise":
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
