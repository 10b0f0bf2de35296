"""The comparison of a load's request with the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_datastates.errors import similar_keys
from megatron_datastates.format.values import is_of_optimizer
from megatron_datastates.mcore.load.optimizer_names import KEY
from megatron_datastates.pipeline.loading.dtypes import torch_dtype
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer import PREFIX, REMAINDERS, StateTensor


def first_mismatch(
    checkpoint: Checkpoint,
    requested: Iterable[Any],
    states: Mapping[str, StateTensor] | None = None,
) -> str | None:
    """Describes the first item that the checkpoint lacks or that does not match; None if all match.

    Args:
        states: further tensors, which the checkpoint holds in buckets.
    """
    for item in requested:
        if isinstance(item, ShardedObject) and item.unique_key not in checkpoint.index.objects:
            similar = similar_keys(item.unique_key, checkpoint.index.objects)
            return f"there is no object {item.unique_key!r} in this checkpoint{similar}"
        if isinstance(item, ShardedTensor):
            problem = _tensor_mismatch(checkpoint, item, states or {})
            if problem is not None:
                return problem
    return None


def tensors_left_out(checkpoint: Checkpoint, everyone: Sequence[Iterable[Any]]) -> list[str]:
    """Returns the keys of stored tensors, optimizers' and state providers' aside, that no rank requests.

    The other ranks wait meanwhile, and many of them request millions of items: looks at distant ranks first,
    as those beside each other hold the same layers, and no further once every key was found.
    """
    names = tuple(f"{provider.name}." for provider in checkpoint.manifest.providers if provider.name)
    tensors = checkpoint.index.tensors
    left = {key for key in tensors if not is_of_optimizer(key) and not key.startswith(names)}
    step = math.isqrt(len(everyone))
    for items in (items for first in range(step) for items in everyone[first::step]):
        if not left:
            break
        left.difference_update(item.key for item in items)
    return sorted(left)


def _tensor_mismatch(checkpoint: Checkpoint, item: Any, states: Mapping[str, StateTensor]) -> str | None:
    if item.key in states:
        dtype, shape = states[item.key].dtype, states[item.key].global_shape
    elif item.key in checkpoint.index.tensors:
        dtype, shape = checkpoint.index.describe(item.key)
    else:
        similar = similar_keys(item.key, checkpoint.index.tensors)
        text = f"there is no tensor {item.key!r} in this checkpoint{similar}"
        return text + _why_without_state(item.key, checkpoint.index.tensors)
    if item.key in checkpoint.index.objects:  # DCP has one name for both
        return (
            f"{item.key!r} is both a tensor and an object in this checkpoint: Megatron cannot load either; "
            "read it with megatron_datastates.open(...), or save again with another name"
        )
    may_differ = item.allow_shape_mismatch and len(shape) == len(item.global_shape)
    if not may_differ and shape != tuple(item.global_shape):
        return (
            f"tensor {item.key!r} has global shape {shape} in this checkpoint, "
            f"and {tuple(item.global_shape)} in the model"
        )
    if dtype == REMAINDERS and item.dtype.is_floating_point and is_of_optimizer(item.key):
        return (
            f"tensor {item.key!r} has only the remainders of main parameters in this checkpoint, the 16 bits "
            "that bfloat16 weights lack, as --use-precision-aware-optimizer stores them, and this run needs "
            "the main parameters: resume with that option, or load without the optimizer (--no-load-optim), "
            "which makes them of the weights"
        )
    # Values keep their kind: as torch_dist converts, but no floats to integers.
    if not torch.can_cast(torch_dtype(dtype, item.key), item.dtype):
        wanted = str(item.dtype).removeprefix("torch.")
        return f"tensor {item.key!r} is {dtype} in this checkpoint, and {wanted} in the model"
    return None


def _why_without_state(key: str, tensors: Collection[str]) -> str:
    """Returns what to do if a parameter is stored and its state of an optimizer, `key`, is not."""
    parameter = KEY.fullmatch(key)
    if parameter is None or parameter[3] not in tensors:
        return ""
    if parameter[2] == "fp32_param" and f"{PREFIX}.param.{parameter[3]}" in tensors:
        return (
            ": its optimizer was distributed, saved with --dist-ckpt-optim-fully-reshardable, and this run's "
            "is not. Resume with --use-distributed-optimizer, save once without that option, and resume from "
            "that; or load without the optimizer (--no-load-optim)"
        )
    return (
        ": the parameter was not trained by the run that saved it, or its optimizer keeps no such state. "
        "Load without the optimizer (--no-load-optim)"
    )
