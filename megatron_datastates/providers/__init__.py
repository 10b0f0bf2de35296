"""State providers: what the state is, as named entries; not how its bytes move.

    class Position:
        name = "position"                       # its keys begin with it, where providers are listed

        def entries(self):                      # what a save stores
            yield TensorSource("table", self.table)
            yield ObjectSource("step", self.step)
            yield StreamSource("log", self.write_log)

        def restore(self, reader):              # what a load brings back
            reader.read_into({"table": self.table})
            self.step = reader.read_object("step")

    ds.enable(providers=[Position()])                                   part of every checkpoint of Megatron
    ds.save({"model": model.state_dict(), "data": Position()}, path)    in any program; values nest

Belongs here: one small class per kind of state, which says where its bytes are, how many there are (or that
the number is not known yet) and how long they stay unchanged. Does not belong here: files, threads, Megatron.
A new kind of state is a new provider and needs no change in the engine.
(After DataStates-LLM, arXiv 2601.16956, section on state providers.)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_datastates.providers.base import (
        Entry,
        Mutability,
        Place,
        StateProvider,
        StateReader,
        Tensors,
        TensorSource,
    )
    from megatron_datastates.providers.dataloader import DataLoaderState
    from megatron_datastates.providers.objects import ObjectSource
    from megatron_datastates.providers.streams import StreamSource
    from megatron_datastates.providers.transforms import Cast, Compressed

__all__ = [
    "Cast",
    "Compressed",
    "DataLoaderState",
    "Entry",
    "Mutability",
    "ObjectSource",
    "Place",
    "StateProvider",
    "StateReader",
    "StreamSource",
    "TensorSource",
    "Tensors",
]
_HOMES = {
    "Cast": "transforms",
    "Compressed": "transforms",
    "DataLoaderState": "dataloader",
    "ObjectSource": "objects",
    "StreamSource": "streams",
}


def __getattr__(name: str) -> Any:
    # Imported late: a command that only lists checkpoints needs no torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'base')}"), name)
