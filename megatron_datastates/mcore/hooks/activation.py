"""What runs at the end of every `import torch`: one import hook, nothing else.

torch calls entry points of the group `torch.backends`. An exception here would break `import torch` for
the whole environment, so nothing here raises, and nothing heavy is imported before Megatron itself is.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches this off; `import megatron_datastates.mcore` then does the same.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_datastates.mcore.hooks.versions import WATCHED_MODULES


class _Finder:
    """Lets the other finders find a module that we attach to, and does so once it has been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
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
    execute = spec.loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        attach(module)

    spec.loader.exec_module = exec_module


def attach(module: Any) -> None:
    """Attaches us to one of the watched modules. Never raises: the user's program goes on without us."""
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
    """Sees that nothing asked for as datastates is saved as something else, where ours is not in place."""
    original = getattr(module, "save_checkpoint", None)
    if original is None or getattr(original, "_of_datastates", False):
        return

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        from megatron_datastates.errors import HookPointError

        found = get_args()
        if "datastates" in (getattr(found, "ckpt_backend", None), getattr(found, "ckpt_format", None)):
            raise HookPointError(
                "--ckpt-format datastates cannot be had: megatron_datastates did not attach to "
                f"{module.__name__} when that was imported ({type(error).__name__}: {error})"
            ) from error
        return original(*args, **kwargs)

    module.save_checkpoint = save_checkpoint


def autoload() -> None:
    """The entry point. Idempotent."""
    try:
        if any(isinstance(finder, _Finder) for finder in sys.meta_path):
            return
        sys.meta_path.insert(0, _Finder())
        for name in WATCHED_MODULES & sys.modules.keys():
            attach(sys.modules[name])
    except Exception as error:
        print(f"megatron_datastates was not activated: {error}", file=sys.stderr)
