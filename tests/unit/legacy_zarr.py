"""Writes checkpoints as Megatron-Core's `--ckpt-format zarr` did.

After `megatron/core/dist_checkpointing/strategies/{zarr,common}.py` of Megatron-LM (commit 3702761a), which
called zarr-python 2: `zarr.create(shape, dtype, store, chunks, compressor=None, fill_value=None,
write_empty_chunks=True)`, then replaced `<V2` by `bfloat16` in `.zarray`. What is written here was compared
byte for byte with what these calls write with zarr 2.18.7.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.unit.states import bits


def write_array(folder: Path, tensor: torch.Tensor, chunks: tuple[int, ...]) -> None:
    """Writes an array; its chunks at the end of an axis are padded."""
    folder.mkdir(parents=True)
    kind = "c" if tensor.is_complex() else "f" if tensor.is_floating_point() else "i"
    kind = "u" if tensor.dtype is torch.uint8 else "b" if tensor.dtype is torch.bool else kind
    dtype = f"{'|' if tensor.itemsize == 1 else '<'}{kind}{tensor.itemsize}"
    members = {
        "chunks": list(chunks),
        "compressor": None,
        "dtype": "bfloat16" if tensor.dtype is torch.bfloat16 else dtype,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(tensor.shape),
        "zarr_format": 2,
    }
    (folder / ".zarray").write_text(json.dumps(members, indent=4))
    for cell in itertools.product(*(range(-(-n // c)) for n, c in zip(tensor.shape, chunks, strict=True))):
        part = tensor[tuple(slice(i * c, (i + 1) * c) for i, c in zip(cell, chunks, strict=True))]
        padded = torch.zeros(chunks, dtype=tensor.dtype)
        padded[tuple(map(slice, part.shape))] = part
        (folder / (".".join(map(str, cell)) or "0")).write_bytes(bits(padded))


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]],
    objects: Mapping[str, Any],
    common: Mapping[str, Any],
) -> None:
    """Writes tensors with the shapes of their chunks, and objects by `KEY/shard_OFFSET_SHAPE`."""
    directory.mkdir(parents=True)
    for key, (tensor, chunks) in tensors.items():
        write_array(directory / key, tensor, chunks)
    for key, value in objects.items():
        path = directory / f"{key}.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save(value, path)
    torch.save(dict(common), directory / "common.pt")
    config = {"sharded_backend": "zarr", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(config))
