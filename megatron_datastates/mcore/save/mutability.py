"""Classifies the tensors of a save by when their memory may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from megatron_datastates.mcore.fences import sharded_storages, stepped_storages
from megatron_datastates.providers.base import Mutability

# Returns when a tensor's memory may change after the save has returned.
Classify = Callable[[torch.Tensor], Mutability]


def nothing_promised(tensor: torch.Tensor) -> Mutability:
    """Returns NOW: the caller may change anything as soon as the save returns."""
    return Mutability.NOW


def all_promised(tensor: torch.Tensor) -> Mutability:
    """Returns AT_FENCE: the caller changes nothing before the next optimizer step or fence."""
    return Mutability.AT_FENCE


def proof_in_training_loop(model: Iterable[torch.nn.Module] = ()) -> Classify:
    """Returns a function that classifies tensors by what Megatron's own training loop proves now.

    A model tensor that is a Parameter, or a view of one, changes only in the optimizer's step. So does a
    DTensor Parameter's local tensor: FSDP2 only reads it, and gathers into memory of its own. So does the
    memory of an optimizer whose pre-step hook has fired. All other tensors (buffers such as the router's
    expert_bias, new copies, padding) may change at once.

    Args:
        model: the chunks of the model that is saved, if they are known.
    """
    fenced = stepped_storages()
    fenced |= sharded_storages(model)

    def classify(tensor: torch.Tensor) -> Mutability:
        base = tensor._base if tensor._base is not None else tensor
        if isinstance(base, torch.nn.Parameter) or tensor.untyped_storage().data_ptr() in fenced:
            return Mutability.AT_FENCE
        return Mutability.NOW

    return classify
