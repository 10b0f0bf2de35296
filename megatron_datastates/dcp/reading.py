"""Reads checkpoints for PyTorch's distributed checkpoints (DCP): what its load plans ask for.

DCP's load planner, or Megatron's, stays in charge of shape checks, resharding, allow_shape_mismatch,
streaming dequantization and in-place loads. Belongs here: what the readers of DCP (reader.py) and of Megatron
(mcore/load/reader.py) have in common. Does not belong here: finding and opening checkpoints; where the bytes
of a tensor are and how they get to its target (transfers.py).
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint._nested_dict import set_element  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_datastates.dcp.fragments import FragmentFinder
from megatron_datastates.dcp.metadata import Boxes, Complete, StoredMetadata
from megatron_datastates.dcp.transfers import (
    RequestedBox,
    Transfer,
    bucket_box,
    fragment_box,
    resolve_in_place,
    sharing,
    through_temporaries,
)
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.reader import Reader
from megatron_datastates.format.values import is_optimizer_map
from megatron_datastates.pipeline.loading.in_place import is_read_beside
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer import BucketStates
from megatron_datastates.pipeline.loading.optimizer_groups import beside_maps
from megatron_datastates.providers.objects import ObjectSource


class CheckpointReader(FileSystemReader):
    """Reads one checkpoint at a time. Derives from FileSystemReader, which Megatron's code expects."""

    checkpoint: Checkpoint

    def __init__(
        self,
        checkpoint: Checkpoint | Path,
        boxes: Boxes | None = None,
        states: BucketStates | None = None,
    ) -> None:
        """Prepares to read a checkpoint.

        Args:
            checkpoint: an open one, or the directory of one that each load is going to open.
            boxes: the metadata of these tensors lists only the fragments that meet them.
            states: present these in place of the buckets that hold them.
        """
        super().__init__(checkpoint if isinstance(checkpoint, Path) else checkpoint.directory)
        if not isinstance(checkpoint, Path):
            self.checkpoint = checkpoint
        self._boxes, self._states = boxes or {}, states

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            self.stored_metadata(), storage_data={}, storage_meta=StorageMeta(load_id=self.load_id)
        )

    def stored_metadata(self, complete: Complete | None = None) -> Any:
        """Returns what DCP may know of the tensors and objects; `complete` as in StoredMetadata."""
        index, hidden = self.checkpoint.index, self.hidden_names()
        return StoredMetadata(index, self.listed_objects(), self._boxes, hidden, self._states, complete)

    def hidden_names(self) -> list[str]:
        """Returns names of state providers whose keys are left out."""
        return []

    def listed_objects(self) -> set[str]:
        """Returns the keys of the objects that DCP may know of."""
        objects = {key for key in self.checkpoint.index.objects if not is_optimizer_map(key)}
        if self._states is not None:
            objects -= beside_maps(self.checkpoint).keys()
        return objects

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what it can in place, in one pass over the files, and then the rest through temporaries.

        Raises what pipeline.loading.load.Checkpoint.read raises; DCP wraps that in its own exception.
        """
        FENCE.wait("a load")
        reader = self.checkpoint.new_reader()
        objects = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        tensors_asked = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        find = FragmentFinder(Counter(item.storage_index.fqn for item in tensors_asked))
        boxes = [self._box(item, find) for item in tensors_asked]
        self.checkpoint.require({file for box in boxes for file in box.files})
        stored = self.checkpoint.plan_objects({item.storage_index.fqn for item in objects})
        found, others = resolve_in_place(boxes, planner, self.checkpoint)
        shared = sharing(found)
        later = set(map(id, shared))
        in_place = [transfer for transfer in found if id(transfer) not in later]
        tensors = [read for transfer in in_place for read in transfer.scheduled()]
        self.checkpoint.read([*stored.scheduled, *tensors], reader)
        values = stored.values()
        for item in objects:
            value = values[item.storage_index.fqn]
            self.require_fits(item, value)
            _hand_over(planner, item, value)
        for transfer in in_place:
            transfer.complete(planner)
        for transfer in shared:  # of what several have, the last one counts
            self._read_group([transfer], planner, reader)
        for group in through_temporaries(others, planner, self.checkpoint):
            self._read_group(group, planner, reader)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def require_fits(self, item: ReadItem, value: Any) -> None:
        """Raises MismatchError if a program cannot take this value of an object."""

    def is_read_beside(self, item: ReadItem) -> bool:
        """Returns whether other ranks of this node probably read the same bytes.

        They do if it is a whole tensor: what is sharded is requested in parts.
        """
        entry = self.checkpoint.tensors.get(item.storage_index.fqn)
        return entry is not None and is_read_beside(tuple(item.lengths), entry.global_shape)

    def _box(self, item: ReadItem, find: FragmentFinder) -> RequestedBox:
        key, through_cache = item.storage_index.fqn, self.is_read_beside(item)
        if self._states is not None and key in self._states:
            return bucket_box(item, self._states[key], through_cache)
        return fragment_box(item, self.checkpoint, find, through_cache)

    def _read_group(self, group: Sequence[Transfer], planner: LoadPlanner, reader: Reader) -> None:
        self.checkpoint.read([read for transfer in group for read in transfer.scheduled()], reader)
        for transfer in group:
            transfer.complete(planner)


def _hand_over(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Passes the planner an object that was unpickled safely, and never the stored bytes.

    Replaces DefaultLoadPlanner.load_bytes, which would unpickle anything. A planner with a method of its own
    gets bytes that were made here, of the same object.
    """
    if type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        planner.load_bytes(item, io.BytesIO(ObjectSource(item.storage_index.fqn, value).serialize()))
        return
    assert isinstance(planner, DefaultLoadPlanner)
    key = item.dest_index.fqn
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[key], value)
    else:
        planner.state_dict[key] = value
