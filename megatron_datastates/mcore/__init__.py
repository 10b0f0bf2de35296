"""Megatron-Core's side: the only importer of megatron.

Users of `--ckpt-format datastates` need not import anything. Programs without Megatron's argument parser
do `from megatron_datastates.mcore import DataStatesSaveStrategy` and hand one to `dist_checkpointing.save`.

Belongs here: hook points, mapping Megatron's sharded state to fragments, fences, versions. Does not
belong here: anything that other trainers could use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_datastates.mcore.activation import autoload

if TYPE_CHECKING:
    from megatron_datastates.mcore.fences import fence
    from megatron_datastates.mcore.strategy import DataStatesSaveStrategy

__all__ = ["DataStatesSaveStrategy", "autoload", "fence"]

autoload()  # where torch did not do it (TORCH_DEVICE_BACKEND_AUTOLOAD=0)


def __getattr__(name: str) -> Any:
    # Imported late: the import hook imports this package in the middle of Megatron's own imports.
    if name == "DataStatesSaveStrategy":
        from megatron_datastates.mcore.strategy import DataStatesSaveStrategy

        return DataStatesSaveStrategy
    if name == "fence":
        from megatron_datastates.mcore.fences import fence

        return fence
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
