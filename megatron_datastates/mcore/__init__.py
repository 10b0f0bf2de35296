"""The integration with Megatron-Core: the only package that imports megatron.

Users of `--ckpt-format datastates` need not import anything. Programs without Megatron's argument parser
call `enable()`, or pass a `DataStatesSaveStrategy` to `dist_checkpointing.save` themselves.

Belongs here: hook points, the mapping of Megatron's sharded state to fragments, fences, differences between
releases. Does not belong here: anything that other trainers could use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_datastates.mcore.hooks.activation import autoload

if TYPE_CHECKING:
    from megatron_datastates.engine.fence import fence
    from megatron_datastates.mcore.dataloader import attach_dataloader
    from megatron_datastates.mcore.programs import enable
    from megatron_datastates.mcore.save.strategy import DataStatesSaveStrategy

__all__ = ["DataStatesSaveStrategy", "attach_dataloader", "autoload", "enable", "fence"]
_HOMES = {
    "DataStatesSaveStrategy": "save.strategy",
    "attach_dataloader": "dataloader",
    "enable": "programs",
    "fence": "fences",
}

autoload()  # for processes in which torch did not (TORCH_DEVICE_BACKEND_AUTOLOAD=0)


def __getattr__(name: str) -> Any:
    # Imported late: the import hook imports this package in the middle of Megatron's own imports.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name == "DataStatesSaveStrategy":  # before the program creates the state that it will save
        importlib.import_module(f"{__name__}.hooks.attach").attach_saving()
    return found
