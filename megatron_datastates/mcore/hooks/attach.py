"""How we attach to Megatron: its functions are replaced, at the hook points that `versions` names.

Loading is attached always, when Megatron's modules are imported (activation.py). Saving is attached by
`attach_saving`: once `--ckpt-format datastates` was given, `enable` was called, or the strategy was taken
from the package or made.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from megatron_datastates.errors import HookPointError
from megatron_datastates.mcore.hooks import versions

Maker = Callable[[Callable[..., Any]], Callable[..., Any]]


def replace(owner: Any, name: str, make: Maker, everywhere: bool = True) -> None:
    """Replaces owner.name by make(owner.name), once; the original stays at `__wrapped__`.

    `everywhere`: also where other modules have imported it by its name.
    """
    # Looked up in the owner itself: what a base class has replaced already is still to be replaced here.
    original = vars(owner)[name] if isinstance(owner, type) and name in vars(owner) else getattr(owner, name)
    if getattr(original, "_of_datastates", False):
        return
    replacement = functools.wraps(original)(make(original))
    replacement._of_datastates = True  # type: ignore[attr-defined]
    setattr(owner, name, replacement)
    if everywhere and isinstance(owner, ModuleType):
        rebind(name, original, replacement)


def rebind(name: str, original: Any, replacement: Any) -> None:
    """The same in modules (the user's script among them) that have imported `original` by its name."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(name) is original:
            setattr(module, name, replacement)


def attach_module(module: ModuleType) -> None:
    """Attaches what loading needs to one of Megatron's modules, or the fence to a memory saver.

    Raises:
        HookPointError: some of the hook points are not there; the others are attached.
    """
    if module.__name__ in versions.MEMORY_SAVERS:
        missing = _missing(versions.MEMORY_SAVERS[module.__name__])
        if missing:
            raise HookPointError(
                f"there is no {', no '.join(missing)}: call megatron_datastates.mcore.fence() before device "
                "memory is unmapped after a lazy save"
            )
        return
    hooks = [hook for hook in versions.installed().loading if hook.module == module.__name__]
    _attach(hooks, "load checkpoints of the datastates format")


@functools.cache  # looking for what is not installed takes a millisecond, and every save makes a strategy
def attach_saving() -> None:
    """Attaches what every save of ours needs, in any program. Idempotent.

    Raises:
        HookPointError: this Megatron lacks some of the hook points.
    """
    _attach(versions.installed().saving, "save in the datastates format")
    # Imports torch's compiler, which a program that only loads need not wait for.
    importlib.import_module("megatron_datastates.mcore.fences").install()


def attach_training() -> None:
    """Attaches what saves in Megatron's own training loop need besides.

    Raises:
        HookPointError: this Megatron lacks some of the hook points.
    """
    _attach(versions.installed().training, "save in Megatron's training loop")


def _attach(hooks: Iterable[versions.Hook], purpose: str) -> None:
    missing = _missing(hooks)
    if missing:
        raise HookPointError(
            f"megatron-core {versions.installed_version()} has no {', no '.join(missing)}, "
            f"which megatron_datastates needs to {purpose}: use a release that it is tested with (README.md)"
        )


def _missing(hooks: Iterable[versions.Hook]) -> list[str]:
    """Attaches the hooks; returns the names of those that are needed and not there."""
    attached = {hook: _attached(hook) for hook in hooks}
    served = {hook.need for hook, is_there in attached.items() if is_there and hook.need}
    return [str(hook) for hook, is_there in attached.items() if not is_there and hook.need not in served]


def _attached(hook: versions.Hook) -> bool:
    try:
        owner: Any = importlib.import_module(hook.module)
    except ImportError:
        return False
    *classes, name = hook.name.split(".")
    try:
        for part in classes:
            owner = getattr(owner, part)
        replace(owner, name, _maker(hook), hook.rebind)
    except AttributeError as error:
        if error.name in (*classes, name):
            return False
        raise
    return True


def _maker(hook: versions.Hook) -> Maker:
    module, _, function = hook.maker.rpartition(".")
    maker: Maker = getattr(importlib.import_module("megatron_datastates.mcore." + module), function)
    return maker
