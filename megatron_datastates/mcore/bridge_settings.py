"""Wrappers of Megatron-Bridge's functions: settings of its `CheckpointConfig` that select our format.

Two do: `ckpt_format="datastates"`, and `custom_manager_class` with the name of our CheckpointManager
(mcore/bridge.py). Bridge itself knows only torch_dist's sharded state: it refuses any other name of a format
for asynchronous saves, and would save unsharded state for it in a synchronous one, which no run could
resume. So our name becomes "torch_dist" wherever Bridge would read it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megatron_datastates.config import Options
from megatron_datastates.errors import OptionError
from megatron_datastates.format.directory import BACKEND
from megatron_datastates.mcore.hooks.calls import parameters_of

MANAGER = "megatron_datastates.mcore.bridge.CheckpointManager"
_SAVE = "save_checkpoint_and_time"
_loops = 0  # calls of Bridge's `train` that have not returned


def is_training() -> bool:
    """Returns whether Bridge's own loop is running, where parameters change only in optimizer steps."""
    return _loops > 0


def adopt(config: Any) -> bool:
    """Returns whether a CheckpointConfig selects our format; if by `ckpt_format`, rewrites it for Bridge.

    Raises:
        OptionError: it also selects something that excludes our format.
    """
    if config.ckpt_format == BACKEND:
        if config.custom_manager_class not in (None, MANAGER):
            raise OptionError(
                f"checkpoint.ckpt_format='{BACKEND}' and checkpoint.custom_manager_class="
                f"{config.custom_manager_class!r}: leave one of them out, or derive that class from "
                f"{MANAGER} and use ckpt_format='torch_dist'"
            )
        config.ckpt_format, config.custom_manager_class = "torch_dist", MANAGER
    if config.custom_manager_class != MANAGER:
        return False
    require_sharded_state(config)
    return True


def require_sharded_state(config: Any) -> None:
    """Raises OptionError if Bridge would not save this format through Megatron-Core's torch_dist strategy."""
    if config.ckpt_format != "torch_dist":
        raise OptionError(
            f"checkpoint.ckpt_format={config.ckpt_format!r} is not saved by {MANAGER}: expected 'torch_dist' "
            f"or '{BACKEND}'"
        )


def enable_saving() -> None:
    """Saves through torch_dist's strategy are ours from now on; lazy in Bridge's own loop only.

    Does nothing if the program has called `enable()`, with options of its own.
    """
    from megatron_datastates.mcore import programs

    if not programs.is_enabled():
        how = "lazily in Megatron-Bridge's own loop, and elsewhere before a save returns"
        programs.take_over(Options.from_environment(), is_training, how)


def wrap_finalize(original: Callable[..., Any], self: Any) -> None:
    """Wraps `CheckpointConfig.finalize`, which runs before Bridge looks at the name of the format.

    Bridge requires its worker process for asynchronous saves; ours need none, so none is started.
    """
    if not adopt(self):
        original(self)
        return
    self.use_persistent_ckpt_worker = True
    original(self)
    self.use_persistent_ckpt_worker = False


def wrap_create_checkpoint_manager(original: Callable[..., Any], checkpoint_config: Any) -> Any:
    """Wraps `create_checkpoint_manager`: our class, and nothing else of ours, is in Bridge's allow list."""
    if adopt(checkpoint_config):
        _allow_manager()
    return original(checkpoint_config)


def _allow_manager() -> None:
    try:
        from megatron.training.config.instantiate_utils import target_allowlist
    except ImportError:  # a release without the list
        return
    target_allowlist.add_exact(MANAGER)


def wrap_save_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `save_checkpoint`, which some programs call without a manager."""
    call = parameters_of(original).of_call(args, kwargs)
    if not adopt(call["state"].cfg.checkpoint):
        return original(*args, **kwargs)
    from megatron_datastates.mcore.training import device_cache
    from megatron_datastates.pipeline.saving.held import trainer_held

    enable_saving()
    with trainer_held("save_checkpoint"), device_cache.saving(is_ours=_is_save_of_ours(call)):
        return original(*args, **kwargs)


def wrap_load_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `load_checkpoint`, which compares the name of the format with what is in the directory."""
    adopt(parameters_of(original).of_call(args, kwargs)["state"].cfg.checkpoint)
    return original(*args, **kwargs)


def wrap_train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `train`, Bridge's own loop."""
    from megatron_datastates.mcore.training.device_cache import forget_saves

    global _loops
    _attach_to_loop(sys.modules.get(original.__module__))
    _loops += 1
    forget_saves()
    try:
        return original(*args, **kwargs)
    finally:
        _loops -= 1


def _attach_to_loop(module: Any) -> None:
    """Wraps the function of Bridge's loop that calls `save_checkpoint`, if this release has it."""
    from megatron_datastates.mcore.hooks.attach import replace
    from megatron_datastates.mcore.training.device_cache import wrap_save_and_time

    if hasattr(module, _SAVE):
        replace(module, _SAVE, functools.partial(wrap_save_and_time, is_ours=_is_save_of_ours))


def _is_save_of_ours(call: Mapping[str, Any]) -> bool:
    if "state" not in call:
        return False
    config = call["state"].cfg.checkpoint
    # Bridge itself saves these, to the node's own disk.
    is_local = getattr(config, "non_persistent_ckpt_type", None) == "local" and call.get(
        "non_persistent_ckpt"
    )
    return adopt(config) and not is_local
