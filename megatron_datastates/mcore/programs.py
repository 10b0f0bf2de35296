"""For programs without Megatron's argument parser: Megatron-Bridge, NeMo, custom training loops."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.strategies import torch as stock
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_datastates.config import Options
from megatron_datastates.mcore import fences
from megatron_datastates.mcore.hooks.attach import attach_saving, rebind
from megatron_datastates.mcore.providers import Providers, register
from megatron_datastates.mcore.save.strategy import (
    DataStatesSaveStrategy,
    TrainingSaveStrategy,
    Transform,
    use_transform,
)
from megatron_datastates.option_calls import options_of_call
from megatron_datastates.pipeline.saver_pool import saver_for

logger = logging.getLogger(__name__)
_NAME = "TorchDistSaveShardedStrategy"
_made: weakref.WeakSet[TrainingSaveStrategy] = weakref.WeakSet()  # in place of torch_dist's


class _MatchesOurStrategies(type(TrainingSaveStrategy)):  # type: ignore[misc]
    """Makes every strategy of ours an instance: Megatron's `save` replaces strategies that are not."""

    def __instancecheck__(cls, item: object) -> bool:
        return isinstance(item, DataStatesSaveStrategy)


def enable(*, providers: Providers = (), transform: Transform | None = None, **options: Any) -> None:
    """Saves in the datastates format from now on, wherever this process uses Megatron's torch_dist strategy.

    Call it once on every rank, with the same options, before training starts; the program still asks for
    torch_dist. Each save copies everything before it returns, so the program may then swap weights, and
    offload or unmap memory. Another call changes the options of later saves.

    Args:
        providers: further state, which becomes part of every checkpoint and is restored by every load of one
            that has it: state providers by name, or with an attribute `name`
            (megatron_datastates.providers). Another call adds to them.
        transform: what each save makes of the provider of Megatron's state, such as
            `lambda state: Cast(state, torch.bfloat16, "*exp_avg*")`; None: nothing. It also holds for
            `--ckpt-format datastates`, whose other options come from the command line.
        options: fields of megatron_datastates.config.Options, as values (`staging_memory=2 << 30`); the
            others come from the environment. `lazy=True` is a promise: Parameters, and the memory of
            optimizers, are changed and freed only in optimizer steps, or after a call of
            `megatron_datastates.fence()`. They are then copied while training continues.
            `on_failure="warn"` applies to asynchronous saves only: a synchronous one raises SaveFailedError
            on every rank, for the program to catch.

    Raises:
        OptionError: an option does not exist, its value is invalid, or only Megatron's training loop has it.
        ProviderError: a provider has no name, or is no state provider.
        HookPointError: this release of Megatron-Core lacks a hook point for saving.
    """
    chosen = options_of_call(options, "enable", lazy=False)
    register(providers)
    use_transform(transform)
    how = "before a save returns"
    if chosen.lazy:
        how = "lazily: memory must not change before an optimizer's step or megatron_datastates.fence()"
    take_over(chosen, lambda: chosen.lazy, how)


def take_over(chosen: Options, in_loop: Callable[[], bool], how: str) -> None:
    """Puts a strategy of ours in place of torch_dist's, in every module that has imported it.

    Args:
        in_loop: returns whether a save made now may be copied lazily; see TrainingSaveStrategy.
        how: the same in words, for the log: "... is copied {how}".
    """
    attach_saving()
    saver_for(chosen).warm_up(fences.stepped_bytes)
    before = getattr(stock, _NAME)

    class EnabledSaveStrategy(TrainingSaveStrategy, metaclass=_MatchesOurStrategies):
        """Accepts and ignores the arguments of the strategy that it replaces."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(options=chosen, in_loop=in_loop)
            _made.add(self)

    for made in _made:  # programs keep a strategy for all their saves
        made.change(chosen, in_loop)
    holders = rebind(_NAME, before, EnabledSaveStrategy, besides="megatron_datastates")
    logger.info(
        "datastates: %s is replaced in %s: what it would store is in the datastates format from now on, "
        "and is copied %s",
        _NAME,
        ", ".join(sorted(holders)),
        how,
    )


def is_stock(strategy: object) -> bool:
    """Returns whether a strategy is torch_dist's own, made before `enable` was called."""
    return type(strategy) is TorchDistSaveShardedStrategy


def is_enabled() -> bool:
    """Returns whether our strategy is in place of torch_dist's."""
    return isinstance(getattr(stock, _NAME), _MatchesOurStrategies)


def enabled_strategy() -> Any:
    """Returns the class that saves in place of torch_dist's. Calls `enable()` if the program has not."""
    if not is_enabled():
        enable()
    return getattr(stock, _NAME)
