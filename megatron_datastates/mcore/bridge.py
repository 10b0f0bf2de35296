"""A checkpoint manager for Megatron-Bridge: `custom_manager_class` of its `CheckpointConfig`.

    checkpoint:
      custom_manager_class: megatron_datastates.mcore.bridge.CheckpointManager

Saving and loading stay Bridge's own: which state there is, its names, the trackers, retention. Only what
stores the state is ours. Belongs here: what imports Megatron-Bridge. The hooks are in bridge_settings.py.
"""

from __future__ import annotations

from typing import Any

from megatron.bridge.training.checkpointing import DefaultCheckpointManager

from megatron_datastates.mcore import bridge_settings as settings


class CheckpointManager(DefaultCheckpointManager):  # type: ignore[misc]
    """Bridge's default manager, whose checkpoints are in the datastates format.

    In Bridge's own training loop, parameters and optimizer state are copied while training continues;
    elsewhere everything is copied before a save returns. Options come from the environment, or from a call of
    `megatron_datastates.enable(...)` before the manager is made.

    Raises:
        OptionError: the config selects a format that Bridge does not save through Megatron-Core.
        HookPointError: this release of Megatron-Core lacks a hook point for saving.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        settings.adopt(checkpoint_config)
        settings.require_sharded_state(checkpoint_config)  # for derived classes, which have other names
        settings.enable_saving()
        super().__init__(checkpoint_config)
