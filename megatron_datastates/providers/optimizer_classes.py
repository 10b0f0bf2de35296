"""Classes of optimizers in stored objects: data, neither called nor imported.

Megatron stores them with the parameter groups of an optimizer that is offloaded to the CPU.
"""

from __future__ import annotations

import sys

OPTIMIZERS = frozenset(
    {
        "apex.optimizers.fused_adam.FusedAdam",
        "apex.optimizers.fused_sgd.FusedSGD",
        "torch.optim.adam.Adam",
        "torch.optim.adamw.AdamW",
        "torch.optim.sgd.SGD",
        "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
        "transformer_engine.pytorch.optimizers.fused_sgd.FusedSGD",
    }
)


def optimizer_class(name: str) -> type:
    """Returns one of OPTIMIZERS if this process has imported it, else an empty class of that name."""
    module, _, own = name.rpartition(".")
    found = getattr(sys.modules.get(module), own, None)
    return found if isinstance(found, type) else type(own, (), {"__module__": module})
