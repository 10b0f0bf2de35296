"""Megatron's sharded state dict as a state provider."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

from megatron_datastates.mcore.fences import stepped_storages
from megatron_datastates.mcore.save.buckets import carried_map
from megatron_datastates.providers.base import Mutability, Place, Tensors
from megatron_datastates.providers.objects import PickledObject

Classify = Callable[[torch.Tensor], Mutability]


def nothing_promised(tensor: torch.Tensor) -> Mutability:
    """The caller may change anything as soon as the save returns."""
    return Mutability.NOW


def all_promised(tensor: torch.Tensor) -> Mutability:
    """The caller changes nothing before the next optimizer step or fence."""
    return Mutability.AT_FENCE


def proof_in_training_loop() -> Classify:
    """What Megatron's own training loop proves, at the time of a save.

    A model tensor that is a Parameter, or a view of one, changes behind the optimizer's step only. So does
    the memory of an optimizer whose pre-step hook has already fired. Everything else (buffers such as the
    router's expert_bias, fresh copies, padding) may change at once.
    """
    fenced = stepped_storages()

    def classify(tensor: torch.Tensor) -> Mutability:
        base = tensor._base if tensor._base is not None else tensor
        if isinstance(base, torch.nn.Parameter) or tensor.untyped_storage().data_ptr() in fenced:
            return Mutability.AT_FENCE
        return Mutability.NOW

    return classify


class ShardedStateProvider:
    """The main replicas of a preprocessed sharded state dict (tensors and objects only)."""

    def __init__(self, sharded_state_dict: dict[str, Any], classifier: Callable[[], Classify]) -> None:
        self._state = sharded_state_dict
        self._classifier = classifier  # asked once the save counts what goes wrong as its own

    def _main_replicas(self, kind: type[Any]) -> Iterator[Any]:
        for item in nested_values(self._state):
            if isinstance(item, kind) and is_main_replica(item.replica_id):
                yield item

    def tensors(self) -> Tensors:
        classify = self._classifier()
        found = Tensors()
        for item in self._main_replicas(ShardedTensor):
            data = item.data
            if data is None or getattr(item, "flattened_range", None) is not None:
                raise CheckpointingException(f"cannot save {item}: it has no data, or a flattened range")
            if type(data).dequantize is torch.Tensor.dequantize:
                mutability = classify(data)
            else:
                data, mutability = (
                    data.dequantize(),
                    Mutability.NEVER,
                )  # as torch_dist stores quantized weights
            shape = (1,) * item.prepend_axis_num + tuple(item.local_shape)
            found.add(
                item.key, data, mutability, Place(tuple(item.global_shape), tuple(item.global_offset), shape)
            )
        return found

    def objects(self) -> Iterator[PickledObject]:
        values: dict[str, list[Any]] = defaultdict(list)
        for item in self._main_replicas(ShardedObject):
            values[item.unique_key].append(item.data)
            carried = carried_map(item)
            if carried is not None:
                values[carried[0]].append(carried[1])
        # A list, as torch_dist stores them: readers take its first element.
        return (PickledObject(key, value, Mutability.NOW) for key, value in values.items())
