"""The state provider for Megatron's sharded state dict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

from megatron_datastates.mcore.save.buckets import carried_map
from megatron_datastates.mcore.save.marks import Mark, mark_of
from megatron_datastates.mcore.save.mutability import Classify
from megatron_datastates.mcore.save.preparing import awaits_tensors, complete
from megatron_datastates.providers.base import EmptyObjects, Mutability, Place, StateReader, Tensors
from megatron_datastates.providers.objects import ObjectSource, is_nothing
from megatron_datastates.providers.tensors import is_frozen


class ShardedStateProvider:
    """Yields the main replicas in a preprocessed sharded state dict, which has tensors and objects only.

    Of a thin state dict (prepared.py), the tensors are those that were prepared.

    Args:
        is_lazy: as in DataStatesSaveStrategy; what the classifier depends on.
    """

    def __init__(
        self, sharded_state_dict: dict[str, Any], classifier: Callable[[], Classify], *, is_lazy: bool = False
    ) -> None:
        self._state = sharded_state_dict
        self._classifier = classifier  # called in tensors(): an error there fails the save on all ranks
        self._is_lazy = is_lazy
        mark = mark_of(sharded_state_dict)
        self.thin = None if mark is None else mark.thin  # the prepared save, if it is one
        self._preparation = None if mark is None else mark.preparation

    def _main_replicas(self, kind: type[Any]) -> Iterator[Any]:
        for item in nested_values(self._state):
            if isinstance(item, kind) and not isinstance(item, Mark) and is_main_replica(item.replica_id):
                yield item

    def entries(self) -> Iterator[Tensors | EmptyObjects | ObjectSource]:
        """Yields the tensors, all at once, then the objects. Raises as `tensors`."""
        yield self.tensors()
        empty, objects = self.objects()
        yield empty
        yield from objects

    def restore(self, reader: StateReader) -> None:
        """Does nothing: Megatron itself requests what it loads."""

    def tensors(self) -> Tensors:
        """Returns the tensors. Raises CheckpointingException for one without data, or flattened."""
        if self.thin is not None:
            if any(self._main_replicas(ShardedTensor)):
                raise CheckpointingException(
                    "a prepared save has tensors that the last save did not have: use --datastates-prepared "
                    "off, and report this"
                )
            return self.thin.tensors(self._classifier, is_lazy=self._is_lazy)
        if awaits_tensors():
            raise CheckpointingException(
                "a prepared save's state dict has lost its mark, an object of the model: keep all objects "
                "that generate_state_dict returns, or use --datastates-prepared off"
            )
        classify, found, stored = self._classifier(), Tensors(), []
        for item in self._main_replicas(ShardedTensor):
            data = item.data
            if data is None or getattr(item, "flattened_range", None) is not None:
                raise CheckpointingException(f"cannot save {item}: expected data and no flattened range")
            if type(data).dequantize is torch.Tensor.dequantize:
                mutability = classify(data)
            else:
                # As torch_dist stores quantized weights. The copy is the save's own.
                data, mutability = data.dequantize(), Mutability.NEVER
            shape = (1,) * item.prepend_axis_num + tuple(item.local_shape)
            place = Place(tuple(item.global_shape), tuple(item.global_offset), shape)
            found.add(item.key, data, mutability, place, is_frozen(item.data))
            stored.append(item.data)
        if self._preparation is not None:
            complete(self._preparation, self._state, found, stored)
        return found

    def objects(self) -> tuple[EmptyObjects, list[ObjectSource]]:
        """Returns the objects without a value, and the others with the optimizer maps attached to them."""
        values: dict[str, list[Any]] = defaultdict(list)
        for item in self._main_replicas(ShardedObject):
            values[item.unique_key].append(item.data)
            carried = carried_map(item)
            if carried is not None:
                values[carried[0]].append(carried[1])
        # A list, as torch_dist stores objects: readers take its first element.
        empty = tuple([key for key, value in values.items() if is_nothing(value)])
        for key in empty:
            del values[key]
        if self.thin is not None:
            empty = self.thin.empty_objects(empty)
        elif self._preparation is not None:
            self._preparation.note_empty(empty)
        return EmptyObjects(empty), [ObjectSource(key, value) for key, value in values.items()]
