"""Reads checkpoints for PyTorch's distributed checkpoints (DCP): what its load plans ask for.

DCP's load planner, or Megatron's, stays in charge of shape checks, resharding, allow_shape_mismatch,
streaming dequantization and in-place loads. Belongs here: what the readers of DCP (reader.py) and of Megatron
(mcore/load/reader.py) have in common. Does not belong here: finding and opening checkpoints.
"""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import set_element  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_datastates.dcp.metadata import Boxes, Complete, StoredMetadata
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.memory import local_ranks
from megatron_datastates.engine.reader import Reader, is_on_current_device
from megatron_datastates.errors import FormatError, MismatchError
from megatron_datastates.format.index import TensorEntry
from megatron_datastates.format.strides import footprint_elements, overlaps_itself
from megatron_datastates.format.values import is_optimizer_map
from megatron_datastates.pipeline.loading.filling import (
    Temporaries,
    copy_converted,
    is_plain,
    note_change,
    overlapping,
    require_memory,
)
from megatron_datastates.pipeline.loading.load import Checkpoint, torch_dtype
from megatron_datastates.pipeline.loading.optimizer import BucketStates, StateTensor
from megatron_datastates.pipeline.loading.optimizer_groups import beside_maps
from megatron_datastates.plan.boxes import Box, cut_box
from megatron_datastates.plan.frames import FramedBox
from megatron_datastates.plan.reads import BoxReads, ScheduledRead, plan_box
from megatron_datastates.providers.objects import ObjectSource

# Host memory where a tensor cannot be read in place. Converted integers may need half as much again.
_TEMPORARY_BYTES = 32 << 20
_MANY = 64  # fragments of a tensor: from so many on, they are looked up in a dictionary


class CheckpointReader(FileSystemReader):
    """Reads one open checkpoint. Derives from FileSystemReader, which Megatron's code expects."""

    checkpoint: Checkpoint

    def __init__(
        self, checkpoint: Checkpoint, boxes: Boxes | None = None, states: BucketStates | None = None
    ) -> None:
        """Reads a checkpoint.

        Args:
            boxes: the metadata of these tensors lists only the fragments that meet them.
            states: present these in place of the buckets that hold them.
        """
        super().__init__(checkpoint.directory)
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
        found, others = _resolve_in_place(boxes, planner, self.checkpoint)
        shared = _sharing(found)
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
        others.sort(key=lambda box: box.place)
        temporaries = Temporaries(_TEMPORARY_BYTES)
        for group in _groups(
            transfer for box in others for transfer in box.resolved(planner, self.checkpoint).parts()
        ):
            temporaries.clear()
            for transfer in group:
                transfer.prepare(temporaries)
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
        return local_ranks() > 1 and entry is not None and tuple(item.lengths) == entry.global_shape

    def _box(self, item: ReadItem, find: FragmentFinder) -> _Box:
        key, through_cache = item.storage_index.fqn, self.is_read_beside(item)
        if self._states is not None and key in self._states:
            return _BucketBox.of_state(item, self._states[key], through_cache)
        return _FragmentBox.of(item, self.checkpoint, find, through_cache)

    def _read_group(self, group: Sequence[_Transfer], planner: LoadPlanner, reader: Reader) -> None:
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


@dataclasses.dataclass(frozen=True)
class _Box:
    """The box of a stored tensor that a read item requests."""

    item: ReadItem
    dtype: str
    files: frozenset[int]
    place: tuple[int, int]  # sorts reads in the order of the files: (file number, offset in bytes)
    encoded: bool
    through_cache: bool  # see ScheduledRead

    @property
    def torch_dtype(self) -> torch.dtype:
        """The stored dtype. Raises FormatError if this torch lacks it."""
        return torch_dtype(self.dtype, self.item.storage_index.fqn)

    def plan(
        self, start: Sequence[int], shape: Sequence[int], strides: Sequence[int]
    ) -> Iterator[BoxReads | FramedBox]:
        """Plans to read a part of the box into memory with these strides.

        Args:
            start: of the part, in the coordinates of `item.storage_offsets`.
        """
        raise NotImplementedError  # each kind of box has its own plan

    def is_detour(self, planner: LoadPlanner) -> bool:
        """Returns whether the planner may resolve to a new tensor that it copies to the target afterwards.

        Megatron's planner does so for quantized tensors; only one of these should exist at a time.
        """
        return isinstance(planner, DefaultLoadPlanner) and not is_plain(
            planner.lookup_tensor(self.item.dest_index)
        )

    def _is_lost(self, planner: LoadPlanner, target: torch.Tensor) -> bool:
        """Returns whether the target is a copy that nobody has, as of a part of a quantized tensor."""
        if not (isinstance(planner, DefaultLoadPlanner) and self.is_detour(planner) and is_plain(target)):
            return False
        copied = getattr(planner, "_intermediate_read_items", None)  # back by Megatron's planner
        overrides = type(planner).commit_tensor is not DefaultLoadPlanner.commit_tensor
        if overrides if copied is None else id(self.item) in copied:
            return False
        whole = planner.lookup_tensor(self.item.dest_index)
        return bool(target.untyped_storage()._cdata != whole.untyped_storage()._cdata)

    def resolved(self, planner: LoadPlanner, checkpoint: Checkpoint) -> _Transfer:
        """Resolves the target with the planner. Raises MismatchError."""
        target = planner.resolve_tensor(self.item).detach()
        if target.size() != self.item.lengths:
            raise MismatchError(
                f"tensor {self.item.storage_index.fqn!r}: the planner requested a slice of shape "
                f"{tuple(self.item.lengths)} into a tensor of shape {tuple(target.size())}"
            )
        require_memory(self.item.storage_index.fqn, target)
        if self._is_lost(planner, target):
            raise MismatchError(
                f"tensor {self.item.storage_index.fqn!r}: the target is of a class of tensors whose parts "
                "are copies, such as a quantized one, and what is read into a copy is lost: load it as it "
                "was sharded in the save, or into a plain tensor"
            )
        same = checkpoint.is_same_dtype(self.item.storage_index.fqn, self.torch_dtype, target.dtype)
        memory = target if same and _fits_in_place(target, self.encoded) else None
        return _Transfer(self, tuple(self.item.storage_offsets), target, target, memory)


@dataclasses.dataclass(frozen=True)
class _FragmentBox(_Box):
    """A box of a stored fragment."""

    entry: TensorEntry
    fragment: int

    @classmethod
    def of(
        cls, item: ReadItem, checkpoint: Checkpoint, find: FragmentFinder, through_cache: bool
    ) -> _FragmentBox:
        """Finds the fragment of `item`. Raises MissingKeyError, FormatError."""
        entry = checkpoint.index.tensor(item.storage_index.fqn)
        number = find(entry, item.storage_index)
        shape = tuple(entry.shapes[number].tolist())
        box = tuple(item.storage_offsets), tuple(item.lengths)
        if 0 not in box[1] and not _is_within(box, shape):  # torch asks for empty ones anywhere
            raise FormatError(  # what lies there are the bytes of other tensors
                f"tensor {item.storage_index.fqn!r}: the load plan asks for {box[1]} at {box[0]} of a "
                f"fragment of shape {shape}: it was made of other metadata than those of "
                f"{checkpoint.directory}"
            )
        file = int(entry.files[number])
        place = file, int(entry.file_offsets[number])
        return cls(item, entry.dtype, frozenset([file]), place, entry.encoded, through_cache, entry, number)

    def plan(
        self, start: Sequence[int], shape: Sequence[int], strides: Sequence[int]
    ) -> Iterator[BoxReads | FramedBox]:
        yield plan_box(self.entry, self.fragment, start, shape, strides)


@dataclasses.dataclass(frozen=True)
class _BucketBox(_Box):
    """A box of a parameter's state that is stored in buckets, of any ranks."""

    state: StateTensor
    origin: tuple[int, ...]  # in the state, of the coordinates of `item.storage_offsets`

    @classmethod
    def of_state(cls, item: ReadItem, state: StateTensor, through_cache: bool) -> _BucketBox:
        origin = tuple(item.storage_index.offset or ())
        at = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
        files, place = state.place(at, tuple(item.lengths))
        return cls(item, state.dtype, files, place, state.encoded, through_cache, state, origin)

    def plan(
        self, start: Sequence[int], shape: Sequence[int], strides: Sequence[int]
    ) -> Iterator[BoxReads | FramedBox]:
        at = tuple(a + b for a, b in zip(self.origin, start, strict=True))
        yield from self.state.plan(at, shape, strides)


@dataclasses.dataclass
class _Transfer:
    """One box, or a part of one, on its way to its target."""

    box: _Box
    start: tuple[int, ...]  # in the fragment
    target: torch.Tensor
    whole: torch.Tensor | None  # what the planner resolved, on its last part only
    memory: torch.Tensor | None  # destination of the read: the target, or a temporary

    def parts(self) -> Iterator[_Transfer]:
        """Yields itself if read in place or not a plain tensor, else parts with small temporaries."""
        if self.memory is not None or not is_plain(self.target):
            yield self
            return
        shape, origin = tuple(self.target.shape), (0,) * self.target.dim()
        most = _TEMPORARY_BYTES // 2 // self.box.torch_dtype.itemsize
        boxes = list(cut_box(origin, shape, most)) or [(origin, shape)]
        for offset, lengths in boxes:
            target = self.target
            for dim, (at, length) in enumerate(zip(offset, lengths, strict=True)):
                target = target.narrow(dim, at, length)
            start = tuple(a + b for a, b in zip(self.start, offset, strict=True))
            whole = self.whole if offset == boxes[-1][0] else None
            yield _Transfer(self.box, start, target, whole, None)

    @property
    def bytes(self) -> int:
        return self.target.numel() * self.box.torch_dtype.itemsize

    @property
    def memory_range(self) -> tuple[int, int]:
        """Where the target begins and ends, as addresses."""
        begin, elements = self.target.data_ptr(), footprint_elements(self.target.shape, self.target.stride())
        return begin, begin + elements * self.target.itemsize

    def prepare(self, temporaries: Temporaries) -> None:
        if self.memory is None:
            self.memory = temporaries.take(self.target.shape, self.box.torch_dtype)

    def scheduled(self) -> Iterator[ScheduledRead]:
        assert self.memory is not None
        if self.memory is self.target:
            note_change(self.target)
        for reads in self.box.plan(self.start, tuple(self.memory.shape), self.memory.stride()):
            yield ScheduledRead(
                reads, self.memory.data_ptr(), _is_on_device(self.memory), self.box.through_cache
            )

    def complete(self, planner: LoadPlanner) -> None:
        if self.memory is not None and self.memory is not self.target:
            copy_converted(self.box.item.storage_index.fqn, self.memory, self.target)
        self.memory = None
        if self.whole is not None:
            planner.commit_tensor(self.box.item, self.whole)


def _resolve_in_place(
    boxes: Iterable[_Box], planner: LoadPlanner, checkpoint: Checkpoint
) -> tuple[list[_Transfer], list[_Box]]:
    """Splits boxes into transfers to targets that native code can write to, and others, unresolved."""
    in_place, others = [], []
    for box in boxes:
        transfer = None if box.is_detour(planner) else box.resolved(planner, checkpoint)
        if transfer is not None and transfer.memory is not None:
            in_place.append(transfer)
        else:
            others.append(box)
    return in_place, others


def _sharing(transfers: Sequence[_Transfer]) -> list[_Transfer]:
    """Returns, in order, transfers to memory that those to other shards fill, too, as far as ranges show.

    Threads would fill that with parts of each. Parts of one shard are apart, but their ranges are not where
    they are strided: then they count together.
    """
    filled = [transfer for transfer in transfers if transfer.target.numel()]
    strided = {one.box.item.dest_index for one in filled if not one.target.is_contiguous()}
    together: dict[MetadataIndex | int, list[_Transfer]] = {}
    for number, transfer in enumerate(filled):
        shard = transfer.box.item.dest_index
        together.setdefault(shard if shard in strided else number, []).append(transfer)
    groups = list(together.values())
    ranges = [[one.memory_range for one in group] for group in groups]
    shared = overlapping(
        [(min(begins), max(ends)) for begins, ends in (zip(*r, strict=True) for r in ranges)]
    )
    found = {id(transfer) for number in shared for transfer in groups[number]}
    return [transfer for transfer in filled if id(transfer) in found]


def _groups(transfers: Iterable[_Transfer]) -> Iterator[list[_Transfer]]:
    """Groups transfers: the last one of a group takes its temporaries past half of _TEMPORARY_BYTES."""
    group: list[_Transfer] = []
    size = 0
    for transfer in transfers:
        group.append(transfer)
        size += transfer.bytes
        if size > _TEMPORARY_BYTES // 2:
            yield group
            group, size = [], 0
    if group:
        yield group


def _is_within(box: Box, shape: Sequence[int]) -> bool:
    return len(box[0]) == len(shape) and all(o + n <= s for o, n, s in zip(*box, shape, strict=True))


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _fits_in_place(target: torch.Tensor, encoded: bool) -> bool:
    """Returns whether elements of the same dtype can be read into the target without a temporary."""
    return (
        is_plain(target)
        and not (encoded and _is_on_device(target))
        and target.layout is torch.strided
        and not (target.is_conj() or target.is_neg())
        and (is_on_current_device(target) if _is_on_device(target) else target.device.type == "cpu")
        and (target.is_contiguous() or not overlaps_itself(target.shape, target.stride()))
    )


class FragmentFinder:
    """Finds the stored fragment that an item of DCP's plan means.

    Args:
        asked: how many fragments of each tensor are going to be asked for.
    """

    def __init__(self, asked: Mapping[str, int]) -> None:
        self._asked = asked
        self._numbers: dict[str, dict[bytes, int]] = {}  # by key and offset, where many are asked for

    def __call__(self, entry: TensorEntry, index: MetadataIndex) -> int:
        """Returns the number of the fragment with elements at the offset of `index`. Raises FormatError."""
        found = _hinted(entry, index)
        if found is not None:
            return found
        if self._asked.get(index.fqn, 0) < _MANY:
            return _find_fragment(entry, index)
        if index.fqn not in self._numbers:
            # Of several at one offset, the largest counts: the others have no elements.
            order = np.argsort(entry.file_bytes, kind="stable").tolist()
            rows = np.ascontiguousarray(entry.offsets)
            self._numbers[index.fqn] = {rows[number].tobytes(): number for number in order}
        offset = np.array(_offset_of(entry, index), np.int64).tobytes()
        found = self._numbers[index.fqn].get(offset)
        return _find_fragment(entry, index) if found is None else found


def _offset_of(entry: TensorEntry, index: MetadataIndex) -> tuple[int, ...]:
    return tuple(index.offset) if index.offset is not None else (0,) * len(entry.global_shape)


def _hinted(entry: TensorEntry, index: MetadataIndex) -> int | None:
    """Returns the number that the plan names, if that fragment is at its offset and has elements.

    The plan's number counts the fragments in the metadata, which may list only some: it is only a hint.
    """
    hint = index.index
    if hint is None or hint >= len(entry.files) or entry.file_bytes[hint] == 0:
        return None
    return hint if tuple(entry.offsets[hint].tolist()) == _offset_of(entry, index) else None


def _find_fragment(entry: TensorEntry, index: MetadataIndex) -> int:
    """Returns the number of the stored fragment with elements at the offset that DCP's plan has."""
    offset = _offset_of(entry, index)
    found = np.flatnonzero((entry.offsets == np.array(offset, np.int64)).all(axis=1))
    if len(found) == 0:
        raise FormatError(f"tensor {index.fqn!r} has no stored fragment at {offset}")
    return int(found[entry.file_bytes[found].argmax()])
