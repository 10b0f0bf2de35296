"""The storage reader of our checkpoints that Megatron's loads use."""

from __future__ import annotations

from torch.distributed.checkpoint.planner import ReadItem

from megatron_datastates.dcp.reading import CheckpointReader
from megatron_datastates.format.directory import COMMON_STATE_KEY
from megatron_datastates.mcore.hooks import versions
from megatron_datastates.mcore.load import state


class DataStatesReader(CheckpointReader):
    """See CheckpointReader. Hides what Megatron would report as unexpected."""

    plans_alone = True  # no rank needs another rank's plan

    def listed_objects(self) -> set[str]:
        objects = super().listed_objects()
        if versions.installed().writes_common_file:
            objects.discard(COMMON_STATE_KEY)
        return objects

    def is_read_beside(self, item: ReadItem) -> bool:
        agreement = state.current().agreement
        keys = None if agreement is None else agreement.keys_read_beside
        return super().is_read_beside(item) if keys is None else item.storage_index.fqn in keys

    def hidden_names(self) -> list[str]:
        return [provider.name for provider in self.checkpoint.manifest.providers if provider.name]
