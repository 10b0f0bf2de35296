"""Attaches us to Megatron: replaces its functions at the hook points that `versions` lists.

The hooks for loading are always attached, when Megatron's modules are imported (activation.py). Those for
saving are attached by `attach_saving`: when `--ckpt-format datastates` is given, when `enable` is called, or
when DataStatesSaveStrategy is imported from the package or constructed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from megatron_datastates.config import ACTIVATION, is_activated, is_switched_on
from megatron_datastates.errors import HookPointError, OptionError
from megatron_datastates.mcore.hooks import versions

Wrapper = Callable[..., Any]  # called in place of a function, which it gets before the arguments of the call
_NO_FENCE = (
    ", so no fence can be attached: call megatron_datastates.fence() before unmapping device memory after a "
    "lazy save"
)
_NO_BRIDGE = (
    ": ckpt_format='datastates' and our CheckpointManager need another release of Megatron-Bridge; call "
    "megatron_datastates.enable()"
)


def replace(owner: Any, name: str, wrapper: Wrapper, everywhere: bool = True) -> None:
    """Replaces owner.name, once, by a function that calls wrapper(original, ...) with what it is called with.

    The original stays available as `__wrapped__`. With `everywhere`, also replaces it in modules that have
    imported it by name.
    """
    original = getattr(owner, name)
    if getattr(original, "_is_datastates_hook", False):
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    replacement._is_datastates_hook = True  # type: ignore[attr-defined]
    setattr(owner, name, replacement)
    if everywhere and isinstance(owner, ModuleType):
        rebind(name, original, replacement)


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replaces owner.name while the block runs."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def rebind(name: str, original: Any, replacement: Any, besides: str = "") -> list[str]:
    """Replaces `original` in all modules, the user's script included, that have imported it by name.

    The modules of the package `besides` keep it. Returns the names of the others.
    """
    holders = []
    for holder, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and vars(module).get(name) is original:
            if holder.partition(".")[0] == besides:
                continue
            setattr(module, name, replacement)
            holders.append(holder)
    return holders


def attach_module(module: ModuleType) -> None:
    """Attaches the hooks for loading to one of Megatron's modules, Bridge's hooks, or a memory saver's fence.

    Raises:
        HookPointError: some hook points do not exist; the others are attached.
    """
    for table, without in ((versions.MEMORY_SAVERS, _NO_FENCE), (versions.BRIDGE, _NO_BRIDGE)):
        if module.__name__ in table:
            if missing := _missing(table[module.__name__]):
                raise HookPointError(f"{module.__name__} has no {', no '.join(missing)}{without}")
            return
    hooks = [hook for hook in versions.installed().loading if hook.module == module.__name__]
    hooks += versions.TOOLS.get(module.__name__, ())
    if module.__name__ == versions.OPTIMIZER_MODULE and is_switched_on():
        # The first state dict is made before the first save, which attaches the rest (mcore/switch.py).
        hooks += [hook for hook in versions.installed().saving if hook.module == module.__name__]
    _attach(hooks, "load checkpoints of the datastates format")


def attach_loading(*, in_loop: bool) -> None:
    """Attaches all hooks for loading, which importing Megatron's modules has done unless some were missing.

    Args:
        in_loop: also those in Megatron's training loop.

    Raises:
        HookPointError: this release of Megatron lacks some of the hook points.
    """
    hooks = versions.installed().loading
    wanted = [hook for hook in hooks if in_loop or not hook.module.startswith("megatron.training.")]
    _attach(wanted, "load checkpoints of the datastates format")


# Cached because every strategy calls it, and a search for packages that are not installed takes 1 ms.
@functools.cache
def attach_saving() -> None:
    """Attaches the hooks that saving needs in any program. Idempotent.

    Raises:
        HookPointError: this release of Megatron lacks some of the hook points.
        OptionError: this package is switched off, so that this process could not load what it saves.
    """
    if not is_activated():
        raise OptionError(
            f"{ACTIVATION}={os.environ[ACTIVATION]}: this process attaches to nothing of Megatron's, and "
            "saves nothing in the datastates format through it; unset that variable"
        )
    _attach(versions.installed().saving, "save in the datastates format")
    # Imported late: it imports torch's compiler, which a program that only loads does not need.
    importlib.import_module("megatron_datastates.mcore.fences").install()


def attach_training() -> None:
    """Attaches the further hooks that saving needs in Megatron's own training loop.

    Raises:
        HookPointError: this release of Megatron lacks some of the hook points.
    """
    _attach(versions.installed().training, "save in Megatron's training loop")


def _attach(hooks: Iterable[versions.Hook], purpose: str) -> None:
    missing = _missing(hooks)
    if missing:
        raise HookPointError(
            f"megatron-core {versions.installed_version()} has no {', no '.join(missing)}, "
            f"which megatron_datastates needs to {purpose}: use a release listed in README.md"
        )


def _missing(hooks: Iterable[versions.Hook]) -> list[str]:
    """Attaches the hooks; returns the names of required ones that do not exist, and why if it is known."""
    faults = {hook: _fault_of(hook) for hook in hooks}
    served = {hook.need for hook, fault in faults.items() if fault is None and hook.need}
    return [
        f"{hook}{fault}" for hook, fault in faults.items() if fault is not None and hook.need not in served
    ]


def _fault_of(hook: versions.Hook) -> str | None:
    """Attaches a hook. Returns None, or a text if it does not exist: why, or "" for no such function."""
    try:
        owner: Any = importlib.import_module(hook.module)
    except ImportError as error:
        is_there = error.name is not None and not hook.module.startswith(error.name)
        return f" (that module is not imported: {error})" if is_there else ""
    *classes, name = hook.name.split(".")
    try:
        for part in classes:
            owner = getattr(owner, part)
        replace(owner, name, _wrapper(hook), hook.rebind)
    except AttributeError as error:
        if error.name in (*classes, name):
            return ""
        raise
    return None


def _wrapper(hook: versions.Hook) -> Wrapper:
    module, _, function = hook.wrapper.rpartition(".")
    found: Wrapper = getattr(importlib.import_module("megatron_datastates.mcore." + module), function)
    return found
