"""The environment switch MEGATRON_DATASTATES_ENABLE: `enable()` for programs that nobody can change.

It acts in each `dist_checkpointing.save` and not when Megatron is imported: until Megatron is complete, there
is nothing to attach to. Options come from the environment, too.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from megatron_datastates.config import SWITCH, is_switched_on
from megatron_datastates.mcore.hooks.calls import SAVES, parameters_of

logger = logging.getLogger(__name__)
# Our strategies, by those that they replace; one replaces all that programs leave to Megatron.
_replacements: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def wrap_save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `dist_checkpointing.save`: with the switch, or `enable`, what torch_dist would store is ours."""
    SAVES.calls += 1
    is_on = is_switched_on()
    if not is_on and not _is_enabled():
        return original(*args, **kwargs)
    parameters = parameters_of(original)
    call = parameters.of_call(args, kwargs)
    if is_on and "://" in str(call["checkpoint_dir"]):
        _warn_of_object_stores(str(call["checkpoint_dir"]))
        return original(*args, **kwargs)
    strategy = _ours(call.get("sharded_strategy"))
    args, kwargs = parameters.replaced(args, kwargs, "sharded_strategy", strategy)
    return original(*args, **kwargs)


def _is_enabled() -> bool:
    """Returns whether the program has called `enable`; strategies made before that are not ours yet."""
    programs = sys.modules.get("megatron_datastates.mcore.programs")
    return programs is not None and programs.is_enabled()


@functools.cache
def _warn_of_object_stores(directory: str) -> None:
    logger.warning(
        "%s is on but %s is an object store, which only --ckpt-format datastates saves to (in "
        "Megatron's training loop): Megatron saves there in its own format",
        SWITCH,
        directory,
    )


def _ours(strategy: Any) -> Any:
    """Returns what saves in place of torch_dist's strategy; any other strategy as it is."""
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    if strategy is None or strategy == ("torch_dist", 1):
        return _replacement_of(None)
    if not isinstance(strategy, FullyParallelSaveStrategyWrapper):
        return _replacement_of(strategy)
    inner = _replacement_of(strategy.base_strategy)
    if inner is not strategy.base_strategy:
        strategy.base_strategy, strategy.backend, strategy.version = inner, inner.backend, inner.version
    return strategy


def _replacement_of(strategy: Any) -> Any:
    from megatron_datastates.mcore import programs

    if strategy is not None and not programs.is_stock(strategy):
        return strategy
    key = programs if strategy is None else strategy
    if key not in _replacements:
        _replacements[key] = programs.enabled_strategy()()
    return _replacements[key]
