"""Programs that use Megatron-Core without Megatron's argument parser: Megatron-Bridge, NeMo, own loops."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from megatron_datastates.config import Options
from megatron_datastates.mcore.hooks.attach import attach_saving
from megatron_datastates.mcore.save.strategy import DataStatesSaveStrategy, TrainingSaveStrategy
from megatron_datastates.pipeline.saver import saver_for

_STOCK = "megatron.core.dist_checkpointing.strategies.torch"
_NAME = "TorchDistSaveShardedStrategy"


class _AnyOfOurs(type(TrainingSaveStrategy)):  # type: ignore[misc]
    """Megatron's `save` replaces what is no instance of the class below: not a strategy of ours, too."""

    def __instancecheck__(cls, item: object) -> bool:
        return isinstance(item, DataStatesSaveStrategy)


def enable(**options: Any) -> None:
    """Makes every save of this process through Megatron's torch_dist strategy ours.

    Call it once on every rank, alike, before training starts; the program goes on asking for torch_dist.
    Everything is copied before a save returns, so the program may then swap weights, offload or unmap memory.
    Calling it again changes the options of later saves.

    Args:
        options: fields of megatron_datastates.config.Options, as values (`staging_memory=2 << 30`); the rest
            comes from the environment. `lazy=True` is a promise: Parameters, and the memory of optimizers,
            change and are given up in optimizer steps only, or after a call of
            `megatron_datastates.mcore.fence()`. Then they are copied while training goes on.
            `on_failure="warn"` concerns asynchronous saves only: a synchronous one raises SaveFailedError on
            every rank, for the program to catch.

    Raises:
        OptionError: an option that does not exist, or makes no sense.
        HookPointError: this Megatron-Core lacks what saving is attached to.
    """
    chosen = Options.from_environment(options, lazy=False)
    attach_saving()
    saver_for(chosen).warm_up()
    module = importlib.import_module(_STOCK)
    before = getattr(module, _NAME)

    class EnabledSaveStrategy(TrainingSaveStrategy, metaclass=_AnyOfOurs):
        """Takes the arguments of the strategy that it stands for, which say nothing to it."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(options=chosen, in_loop=lambda: chosen.lazy)

    for holder in list(sys.modules.values()):
        names = getattr(holder, "__dict__", {})
        if (
            not getattr(holder, "__name__", "").startswith("megatron_datastates")
            and names.get(_NAME) is before
        ):
            setattr(holder, _NAME, EnabledSaveStrategy)
