"""Shared by tests of conversion: writing a checkpoint with DCP, converting, comparing contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from megatron_datastates.config import MIB
from megatron_datastates.convert.job import convert
from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.planning import plan_conversion
from megatron_datastates.convert.sources.source import Source
from tests.unit.states import KNOWN_DTYPES, bits, random_tensor

LEAST = Limits(memory_bytes=66 * MIB, workers=1)  # windows of 15 MiB
State = dict[str, Any]


def dcp_state() -> State:
    """Returns tensors of every dtype, without elements, without axes, and with transposed memory."""
    tensors = {
        f"of.{name}": random_tensor(getattr(torch, name), (3, 5), n) for n, name in enumerate(KNOWN_DTYPES)
    }
    tensors |= {
        "large": random_tensor(torch.float32, (5 * MIB, 1), 1),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(1.5),
        "transposed": random_tensor(torch.bfloat16, (70, 33, 5), 2).permute(2, 0, 1),
    }
    return tensors


def save_with_dcp(directory: Path, state: State, **how: Any) -> None:
    writer = dcp.FileSystemWriter(directory, **how)
    dcp.save(state, storage_writer=writer)


def convert_to(source: Path, target: Path, limits: Limits = LEAST, **how: Any) -> Source:
    keys = ("format", "ranks")
    plan = plan_conversion(open_source(source), target, **{k: v for k, v in how.items() if k in keys})
    convert(plan, limits, **{k: v for k, v in how.items() if k not in keys})
    return open_source(target)


def contents(source: Source) -> dict[str, Any]:
    """Returns the dtype, shape and bits of every tensor, and the bytes of every object."""
    tensors = {
        key: (entry.dtype, entry.global_shape, bits(source.read_tensor(key)))
        for key, entry in source.tensors.items()
    }
    return tensors | {f"object {key}": source.read_object(key) for key in source.objects}
