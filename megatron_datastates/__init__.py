"""Checkpoints for Megatron-Core that pause training for milliseconds, not seconds.

    import megatron_datastates as ds

    ds.enable()                               every save through Megatron-Core's torch_dist strategy is ours
    ds.save(state, directory)                 nested mappings of tensors and objects, in any program
    handle = ds.async_save(state, directory)  the same, while the program goes on; handle.wait() ends it
    ds.load(directory, into=state)            fills tensors in place, on any number of ranks
    ds.open(directory)                        looks inside without reading the data
    ds.on_report(callback)                    is called with what each save and each load cost
    ds.Shard, ds.fence                        parts of global tensors; waiting for lazy copies

`pretrain_gpt.py --ckpt-format datastates` needs none of them. Errors are in megatron_datastates.errors,
options in megatron_datastates.config. Importing this package imports nothing else: every process that
imports torch can afford it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_datastates.api import SaveHandle, Shard, async_save, fence, load, on_report, open, save
    from megatron_datastates.mcore import enable

__version__ = "0.1.0.dev0"
__all__ = ["SaveHandle", "Shard", "async_save", "enable", "fence", "load", "on_report", "open", "save"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "mcore" if name == "enable" else "api"
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
