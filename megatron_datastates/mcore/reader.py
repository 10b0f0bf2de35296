"""A DCP storage reader over our manifest.

Megatron's own load planner keeps doing its work: shape checks, resharding, allow_shape_mismatch, streaming
dequantization, in-place loads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import set_element  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_datastates.errors import FormatError, MismatchError
from megatron_datastates.format.index import TensorEntry
from megatron_datastates.mcore import versions
from megatron_datastates.mcore.dispatch import COMMON_STATE_KEY
from megatron_datastates.mcore.metadata import Boxes, StoredMetadata
from megatron_datastates.pipeline.load import Checkpoint, ScheduledRead, torch_dtype
from megatron_datastates.plan.boxes import contiguous_strides
from megatron_datastates.plan.reads import plan_box

_BATCH_BYTES = 256 << 20  # host memory for tensors that cannot be read in place


class DataStatesReader(FileSystemReader):
    """Reads one published checkpoint. A FileSystemReader, because Megatron's code is typed for that."""

    def __init__(self, checkpoint: Checkpoint, boxes: Boxes | None = None) -> None:
        """Of tensors with `boxes`, metadata tells only the fragments that meet them."""
        super().__init__(checkpoint.directory)
        self.checkpoint = checkpoint
        self._boxes = boxes or {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = self.checkpoint.index
        objects = set(index.objects)
        if versions.installed().writes_common_file:  # and knows no such key: it would call it unexpected
            objects.discard(COMMON_STATE_KEY)
        known: Any = StoredMetadata(index, objects, self._boxes)
        return Metadata(known, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises what pipeline.load.Checkpoint.read raises; DCP wraps it in its own exception."""
        objects = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        values = self.checkpoint.read_objects({item.storage_index.fqn for item in objects})
        for item in objects:
            _hand_over(planner, item.dest_index.fqn, values[item.storage_index.fqn])
        for batch in _batches(tensors, self.checkpoint):
            self._load_tensors(batch, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load_tensors(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        transfers = [
            _Transfer(item, planner.resolve_tensor(item).detach(), self.checkpoint) for item in items
        ]
        self.checkpoint.read(transfer.scheduled() for transfer in transfers)
        for transfer in transfers:
            transfer.complete()
            planner.commit_tensor(transfer.item, transfer.target)


def _hand_over(planner: LoadPlanner, key: str, value: Any) -> None:
    """As DefaultLoadPlanner.load_bytes does, which would unpickle anything; ours is unpickled safely."""
    if not isinstance(planner, DefaultLoadPlanner):
        raise FormatError(f"objects cannot be handed to a {type(planner).__name__}")
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[key], value)
    else:
        planner.state_dict[key] = value


def _batches(items: Sequence[ReadItem], checkpoint: Checkpoint) -> Iterator[list[ReadItem]]:
    batch: list[ReadItem] = []
    size = 0
    for item in items:
        batch.append(item)
        size += (
            math.prod(item.lengths)
            * torch_dtype(checkpoint.index.tensor(item.storage_index.fqn).dtype).itemsize
        )
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclasses.dataclass
class _Transfer:
    """One box from a stored fragment to (a part of) a tensor."""

    item: ReadItem
    target: torch.Tensor
    checkpoint: Checkpoint

    def __post_init__(self) -> None:
        self.entry = self.checkpoint.index.tensor(self.item.storage_index.fqn)
        if self.target.size() != self.item.lengths:
            raise MismatchError(
                f"tensor {self.item.storage_index.fqn!r}: a slice of {tuple(self.item.lengths)} "
                f"was asked for as {tuple(self.target.size())}"
            )
        self.memory = self.target if self._in_place() else self._packed()

    def _in_place(self) -> bool:
        plain = type(self.target) in (torch.Tensor, torch.nn.Parameter)
        return (
            plain and self.target.device.type == "cpu" and self.target.dtype == torch_dtype(self.entry.dtype)
        )

    def _packed(self) -> torch.Tensor:
        return torch.empty(tuple(self.item.lengths), dtype=torch_dtype(self.entry.dtype))

    def scheduled(self) -> ScheduledRead:
        fragment = find_fragment(self.entry, self.item.storage_index)
        lengths = tuple(self.item.lengths)
        strides = self.memory.stride() if lengths else contiguous_strides(lengths)
        reads = plan_box(self.entry, fragment, tuple(self.item.storage_offsets), lengths, strides)
        return ScheduledRead(reads, self.memory.data_ptr())

    def complete(self) -> None:
        if self.memory is not self.target:
            self.target.copy_(self.memory)


def find_fragment(entry: TensorEntry, index: MetadataIndex) -> int:
    """The stored fragment that DCP's plan means: the one with elements at that offset.

    The plan's number is the one in the metadata, which may tell only some fragments: no more than a hint.
    """
    offset = tuple(index.offset) if index.offset is not None else (0,) * len(entry.global_shape)
    hint = index.index
    held = hint is not None and hint < len(entry.files) and entry.file_bytes[hint] > 0
    if hint is not None and held and tuple(entry.offsets[hint].tolist()) == offset:
        return hint
    found = np.flatnonzero((entry.offsets == np.array(offset, np.int64)).all(axis=1))
    if len(found) == 0:
        raise FormatError(f"tensor {index.fqn!r} has no stored fragment at {offset}")
    return int(found[entry.file_bytes[found].argmax()])
