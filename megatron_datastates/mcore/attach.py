"""Where we attach to Megatron: one function per module of Megatron, each idempotent.

Loading is attached always, so that any program with Megatron reads our checkpoints. Saving is attached by
`arguments` once `--ckpt-format datastates` was given, or by importing `DataStatesSaveStrategy`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces owner.name by make(owner.name), once; the original stays at `__wrapped__`."""
    original = getattr(owner, name)
    if getattr(original, "_of_datastates", False):
        return
    replacement = functools.wraps(original)(make(original))
    replacement._of_datastates = True  # type: ignore[attr-defined]
    setattr(owner, name, replacement)


def attach_core(module: ModuleType) -> None:
    """`dist_checkpointing.core`: a directory with our manifest is a distributed checkpoint."""
    from megatron_datastates.mcore import dispatch

    replace(module, "maybe_load_config", dispatch.config_from_manifest)


def attach_strategies(module: ModuleType) -> None:
    """`dist_checkpointing.strategies.torch`: our reader for our directories."""
    from megatron_datastates.mcore import dispatch

    replace(module, "_get_filesystem_reader", dispatch.reader_by_format)
    replace(module.TorchDistLoadShardedStrategy, "load", dispatch.load_with_clear_errors)


def attach_serialization(module: Any) -> None:
    """`dist_checkpointing.serialization`: common state, which 0.19 reads from the checkpoint itself."""
    from megatron_datastates.mcore import dispatch

    attach_strategies(sys.modules["megatron.core.dist_checkpointing.strategies.torch"])
    if hasattr(module, "_get_filesystem_reader"):
        replace(module, "_get_filesystem_reader", dispatch.reader_by_format)
    replace(module, "load_common_state_dict", dispatch.common_state_by_format)
    package: Any = sys.modules["megatron.core.dist_checkpointing"]
    if hasattr(package, "load_common_state_dict"):  # bound before we came
        package.load_common_state_dict = module.load_common_state_dict


def attach_arguments(module: ModuleType) -> None:
    """`training.arguments`: the format's name and our options."""
    from megatron_datastates.mcore import arguments

    replace(module, "_add_checkpointing_args", arguments.with_our_options)
    replace(module, "validate_args", arguments.validated)


def attach_checkpointing(module: ModuleType) -> None:
    """`training.checkpointing`: a tracker file that a crash truncated."""
    from megatron_datastates.mcore import tracker

    replace(module, "read_metadata", tracker.with_fallback)
