"""DCP's view of an index: a tensor's metadata is made on demand, and only for the requested boxes, if known.

A large checkpoint has millions of fragments, of which one rank needs some hundred.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_datastates.errors import DataStatesError, FormatError, MismatchError
from megatron_datastates.format.index import Index
from megatron_datastates.pipeline.loading.dtypes import torch_dtype
from megatron_datastates.pipeline.loading.optimizer import BucketStates, StateTensor
from megatron_datastates.plan.boxes import boxes_that_meet, first_overlap, hold_all
from megatron_datastates.plan.coverage import StoredBoxes, coverage_faults

# Key -> offsets and shapes of the requested boxes, (n, dimensions) each, in elements of the global tensor.
Boxes = Mapping[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]

Complete = Callable[[TensorProperties, str], None]


def _properties(dtype: str, key: str) -> TensorProperties:
    """Returns the properties of a tensor, each of which Megatron passes to `torch.empty`.

    torch 2.15 adds the strides, which `torch.empty` does not know: the object has only the class's default.
    """
    properties = TensorProperties(dtype=torch_dtype(dtype, key))
    vars(properties).pop("strides", None)
    return properties


class StoredTensor(TensorStorageMetadata):
    """A tensor's metadata: its chunks are the fragments that meet the requested boxes, or all of them.

    Its size can be assigned, which Megatron does.

    Args:
        stored: returns all stored boxes.
    """

    def __init__(
        self, key: str, dtype: str, shape: tuple[int, ...], boxes: Boxes, stored: Callable[[], StoredBoxes]
    ) -> None:
        self.properties = _properties(dtype, key)
        self.size = torch.Size(shape)
        self._key, self._boxes, self._stored = key, boxes, stored

    @functools.cached_property
    def chunks(self) -> list[ChunkStorageMetadata]:  # type: ignore[override]
        stored = self._stored()
        offsets, shapes = stored.offsets, stored.shapes
        requested = self._boxes.get(self._key)
        if requested is not None and requested[0].shape[1:] == offsets.shape[1:]:
            meeting = boxes_that_meet(offsets, shapes, *requested)
            offsets, shapes = offsets[meeting], shapes[meeting]
            # DCP would leave elements without a fragment unloaded, and load those of two fragments twice.
            whole = first_overlap(offsets, shapes) is None
            if not (whole and hold_all(offsets, shapes, *requested, stored.global_shape)):
                raise self._hole()
        elif not self._boxes and (faults := coverage_faults(self._key, stored)):  # any may be requested
            raise FormatError("; ".join(faults))
        pairs = zip(offsets.tolist(), shapes.tolist(), strict=True)
        return [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in pairs]

    def _hole(self) -> DataStatesError:
        """Returns the error of a request for elements that are not stored, or stored twice."""
        return FormatError(f"tensor {self._key!r}: its fragments overlap, or do not cover a requested box")

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorStorageMetadata, (self.properties, self.size, self.chunks)


class StateInBuckets(StoredTensor):
    """The metadata of a parameter's state that is stored in buckets: its chunks are shards of the model."""

    def _hole(self) -> DataStatesError:
        """No damage: in an older checkpoint of the run, the same part is frozen."""
        return MismatchError(
            f"optimizer maps describe {self._key!r} only in part, and this run trains more of it: the rest "
            "was frozen when it was saved, or a map is missing. Load without the optimizer (--no-load-optim)"
        )


class StoredMetadata(Mapping[str, STORAGE_TYPES]):
    """A read-only `state_dict_metadata`, one object per key. Copies and pickles are plain dictionaries.

    Args:
        hidden: names of state providers, whose keys are left out: Megatron would report them as unexpected.
        states: are listed in place of the buckets that hold them.
        complete: called with the properties of a tensor and its key, to set what our index does not have.
    """

    def __init__(
        self,
        index: Index,
        objects: Collection[str],
        boxes: Boxes,
        hidden: Collection[str],
        states: BucketStates | None,
        complete: Complete | None,
    ) -> None:
        self._complete = complete
        self._index, self._boxes = index, boxes
        self._made: dict[str, STORAGE_TYPES] = {}
        self._states: Mapping[str, StateTensor] = {} if states is None else states
        buckets, prefixes = {} if states is None else states.buckets, tuple(f"{name}." for name in hidden)
        stored = [key for key in [*index.tensors, *objects] if not key.startswith(prefixes)]
        self._keys = dict.fromkeys([*(key for key in stored if key not in buckets), *self._states])
        self._objects = frozenset(objects)

    def __getitem__(self, key: str) -> STORAGE_TYPES:
        if key not in self._made:
            if key not in self._keys:
                raise KeyError(key)
            if key in self._objects:
                self._made[key] = BytesStorageMetadata()
            elif key in self._states:
                state = self._states[key]
                self._made[key] = StateInBuckets(
                    key, state.dtype, state.global_shape, self._boxes, lambda: state
                )
            else:
                stored = functools.partial(self._index.tensor, key)
                self._made[key] = tensor = StoredTensor(key, *self._index.describe(key), self._boxes, stored)
                if self._complete is not None:
                    self._complete(tensor.properties, key)
        return self._made[key]

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
