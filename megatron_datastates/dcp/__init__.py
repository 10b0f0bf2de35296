"""PyTorch's distributed checkpoints (DCP) in our format.

    import torch.distributed.checkpoint as dcp
    from megatron_datastates.dcp import DataStatesReader, DataStatesWriter

    dcp.save(state, storage_writer=DataStatesWriter(path))
    dcp.load(state, storage_reader=DataStatesReader(path))

Belongs here: DCP's plans as entries of a save, and stored fragments as DCP's metadata. Does not belong here:
Megatron, which need not be installed, and how a save or a load goes (pipeline/).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_datastates.dcp.reader import DataStatesReader
    from megatron_datastates.dcp.writer import DataStatesWriter

__all__ = ["DataStatesReader", "DataStatesWriter"]
_HOMES = {"DataStatesReader": "reader", "DataStatesWriter": "writer"}


def __getattr__(name: str) -> Any:
    # Imported late: Megatron's loads use parts of this package, and not the writer.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
