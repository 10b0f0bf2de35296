"""Megatron's optimizer of multimodal models in a tiny pretraining, around the one that Megatron makes.

It puts its name before all keys, and makes an object of the sharding type. An environment variable switches
it on, so that any run of tests/support/tiny.py can have it.
"""

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import training as loop

CHOSEN = "TINY_MIMO_OPTIMIZER"  # an environment variable


def install() -> None:
    """Wraps the optimizer as that of a model with a single module. Call it before Megatron makes it."""
    from megatron.core.models.mimo.optimizer import MimoOptimizer, ModuleOptimizerInfo

    MimoOptimizer.chained_optimizers = property(lambda self: self._active_optimizers)  # for recorders
    make = loop.get_megatron_optimizer

    def get_megatron_optimizer(*args: Any, **options: Any) -> MimoOptimizer:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        module = ModuleOptimizerInfo(make(*args, **options), None, groups, is_active=True)
        return MimoOptimizer({"language": module}, module.optimizer.config)

    loop.get_megatron_optimizer = get_megatron_optimizer
