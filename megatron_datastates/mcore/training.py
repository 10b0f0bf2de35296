"""Megatron's training loop once `--ckpt-format datastates` was given."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from megatron_datastates.config import Options
from megatron_datastates.mcore.attach import replace
from megatron_datastates.pipeline.held import holding

logger = logging.getLogger(__name__)


def enable_saving(options: Options) -> None:
    """Replaces torch_dist's save strategy in Megatron's training loop. Idempotent."""
    import megatron.training.checkpointing as checkpointing

    from megatron_datastates.mcore import fences, request
    from megatron_datastates.mcore.strategy import TrainingSaveStrategy
    from megatron_datastates.pipeline.saver import saver_for

    request.on_failure = options.on_failure
    saver_for(options).warm_up()
    fences.install_witness()

    def make_strategy(*args: Any, **kwargs: Any) -> TrainingSaveStrategy:
        return TrainingSaveStrategy(options=options)

    checkpointing.TorchDistSaveShardedStrategy = make_strategy
    replace(checkpointing, "save_checkpoint", lambda original: _held(original, options))
    modules: list[Any] = list(sys.modules.values())
    for module in modules:
        # `from .checkpointing import save_checkpoint` has bound the original in other modules.
        name = getattr(module, "__name__", "")
        if name.startswith("megatron.training.") and hasattr(module, "save_checkpoint"):
            module.save_checkpoint = checkpointing.save_checkpoint


def _held(original: Callable[..., Any], options: Options) -> Callable[..., Any]:
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        from megatron_datastates.mcore.request import SaveFailed

        with holding("save_checkpoint"):
            try:
                return original(*args, **kwargs)
            except SaveFailed as error:  # on every rank alike, so every rank goes on alike
                if options.on_failure == "raise":
                    raise
                logger.warning("%s Training goes on (--datastates-on-failure warn).", error)
                return None

    return save_checkpoint
