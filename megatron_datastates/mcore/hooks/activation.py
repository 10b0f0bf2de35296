"""The import hook that `import torch` installs: it attaches us to modules of Megatron when they are imported.

torch calls every entry point of the group `torch.backends` at the end of its own import. An exception there
would break `import torch` for the whole environment, so nothing here raises, and nothing is imported that
Python and torch have not imported before. `MEGATRON_DATASTATES_ACTIVATE=off` leaves the import hook out.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches entry points off, those of others too; `import
megatron_datastates.mcore` then installs it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# The modules that versions.py attaches to at import, written out because importing that takes milliseconds.
WATCHED_MODULES = frozenset(
    {
        "dist_checkpoint_io",
        "megatron.bridge.training.checkpointing",
        "megatron.bridge.training.config",
        "megatron.bridge.training.train",
        "megatron.core.dist_checkpointing.core",
        "megatron.core.dist_checkpointing.serialization",
        "megatron.core.dist_checkpointing.strategies.base",
        "megatron.core.dist_checkpointing.strategies.common",
        "megatron.core.dist_checkpointing.strategies.fully_parallel",
        "megatron.core.dist_checkpointing.strategies.torch",
        "megatron.core.dist_checkpointing.validation",
        "megatron.core.optimizer.distrib_optimizer",
        "megatron.training.arguments",
        "megatron.training.checkpointing",
        "torch_memory_saver",
        "vllm.device_allocator.cumem",
    }
)


class _Finder:
    """Finds the watched modules with the other finders, and attaches to each after it has been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Returns the spec that the first other finder has for a watched module; None for all others."""
        if name not in WATCHED_MODULES:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if finder is not self and find is not None else None
            if spec is not None:
                _attach_after_execution(spec)
                return spec
        return None


def _attach_after_execution(spec: Any) -> None:
    execute = getattr(spec.loader, "exec_module", None)
    if execute is None:  # a folder without a module in it, as a clone of a repository may be
        return

    def exec_module(module: Any) -> None:
        execute(module)
        attach(module)

    spec.loader.exec_module = exec_module


def attach(module: Any) -> None:
    """Attaches our hooks to one of the watched modules. Never raises: a failure is logged as a warning."""
    try:
        from megatron_datastates.mcore.hooks.attach import attach_module

        attach_module(module)
    except Exception as error:
        import logging

        logging.getLogger(__name__).warning(
            "megatron_datastates is not available in %s: %s: %s", module.__name__, type(error).__name__, error
        )
        _refuse_saves(module, error)


def _refuse_saves(module: Any, error: Exception) -> None:
    """Replaces a `save_checkpoint` that has no hook: it must not save in another format than asked for."""
    if module.__name__ != "megatron.training.checkpointing":
        return
    original = getattr(module, "save_checkpoint", None)
    if original is None or getattr(original, "_is_datastates_hook", False):
        return

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        from megatron_datastates.errors import HookPointError

        found = module.get_args()
        if "datastates" in (getattr(found, "ckpt_backend", None), getattr(found, "ckpt_format", None)):
            raise HookPointError(
                "--ckpt-format datastates is not available: megatron_datastates could not attach to "
                f"{module.__name__} when it was imported ({type(error).__name__}: {error})"
            ) from error
        return original(*args, **kwargs)

    module.save_checkpoint = save_checkpoint


def autoload() -> None:
    """Installs the import hook, and attaches to watched modules that are imported already. Idempotent."""
    try:
        if os.environ.get("MEGATRON_DATASTATES_ACTIVATE"):
            from megatron_datastates.config import is_activated  # not where nobody has set it

            if not is_activated():
                return
        # By name: after a reload of this module, the class is another one, and two would ask each other.
        if any(type(finder).__module__ == __name__ for finder in sys.meta_path):
            return
        sys.meta_path.insert(0, _Finder())
        for name in WATCHED_MODULES & sys.modules.keys():
            attach(sys.modules[name])
    except Exception as error:
        print(f"megatron_datastates was not activated: {type(error).__name__}: {error}", file=sys.stderr)
