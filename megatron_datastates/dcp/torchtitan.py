"""A checkpoint manager for torchtitan: its own, whose checkpoints are in the datastates format.

    from megatron_datastates.dcp.torchtitan import CheckpointManager

    checkpoint = CheckpointManager.Config(enable=True, interval=500, async_mode="async")  # of Trainer.Config

Belongs here: what imports torchtitan. When it saves, what is in its state and which checkpoints it removes
stay torchtitan's own, and so do Hugging Face's folders. Steps that DCP's own writer has saved are found and
loaded.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torchtitan.components import checkpoint as titan
from torchtitan.tools.utils import GarbageCollection

from megatron_datastates.dcp.reader import DataStatesReader
from megatron_datastates.dcp.writer import DataStatesWriter
from megatron_datastates.format.directory import BACKEND
from megatron_datastates.pipeline.runs.runs import format_of, is_published

_STEP = re.compile(r"step-(\d+)")


class CheckpointManager(titan.CheckpointManager):  # type: ignore[misc]
    """torchtitan's manager. Options come from the environment, as for DataStatesWriter."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(titan.CheckpointManager.Config):  # type: ignore[misc]
        """Has the fields of torchtitan's: it builds the class that has a Config of its own."""

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: titan.AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Saves; returns what DCP's functions return. Raises what they raise."""
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf=to_hf
            )
        writer, found = DataStatesWriter(checkpoint_id), None
        if async_mode == titan.AsyncMode.DISABLED:
            save(state_dict, storage_writer=writer)
        elif async_mode == titan.AsyncMode.ASYNC:
            found = async_save(state_dict, storage_writer=writer, process_group=self.pg)
        else:
            found = async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return found

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Loads a checkpoint of either format. Raises what DCP's functions raise."""
        if from_hf or format_of(checkpoint_id) != BACKEND:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, storage_reader=DataStatesReader(checkpoint_id))
        if titan.MODEL in self.states:
            self.states[titan.MODEL].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        """Returns the newest step that is complete; -1 if there is none."""
        found = [int(super()._find_load_step(folder=folder))]
        root = Path(folder or self.folder)
        for path in root.iterdir() if root.is_dir() else ():
            match = _STEP.search(path.name)
            if match is not None and is_published(path):
                found.append(int(match[1]))
        return max(found)
