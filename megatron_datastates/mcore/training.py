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
    saver_for(options).warm_up()

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
