"""The storage reader of our checkpoints that Megatron's loads use."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.planner import ReadItem

from megatron_datastates.dcp.reading import CheckpointReader
from megatron_datastates.errors import MismatchError
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

    def require_fits(self, item: ReadItem, value: Any) -> None:
        key = item.storage_index.fqn
        count = state.current().objects[key]
        if count and not (isinstance(value, list) and len(value) == count):
            found = f"a list of {len(value)}" if isinstance(value, list) else f"a {type(value).__qualname__}"
            raise MismatchError(
                f"object {key!r} is {found}: expected a list of {count}, as Megatron saves objects. "
                "Load it with the program that saved it, or with ds.load"
            )

    def is_read_beside(self, item: ReadItem) -> bool:
        agreement = state.current().agreement
        keys = None if agreement is None else agreement.keys_read_beside
        return super().is_read_beside(item) if keys is None else item.storage_index.fqn in keys

    def hidden_names(self) -> list[str]:
        return [provider.name for provider in self.checkpoint.manifest.providers if provider.name]
