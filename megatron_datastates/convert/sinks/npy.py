"""Writes a slice of a tensor to a .npy file, part by part."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron_datastates.convert.contents import Content, convert_dtype
from megatron_datastates.convert.sinks.target import publish_on_exit
from megatron_datastates.convert.slices import Slice
from megatron_datastates.convert.statistics import PART_BYTES
from megatron_datastates.format.values import element_bytes
from megatron_datastates.pipeline.loading.dtypes import torch_dtype
from megatron_datastates.plan.boxes import cut_box

_RAW = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def dtype_for_numpy(dtype: torch.dtype) -> torch.dtype:
    """Returns `dtype`, or the unsigned integer of its size if numpy lacks it, as it does bfloat16."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return _RAW[dtype.itemsize]
    return dtype


def write_npy(
    path: Path,
    content: Content,
    wanted: Slice,
    dtype: torch.dtype | None,
    progress: Callable[[int], None],
    check: Callable[[], None],
) -> torch.dtype:
    """Writes a new file and returns the dtype of its elements.

    Args:
        dtype: to convert to. None: nothing is converted, and dtypes that numpy lacks are written as raw
            bits.
        progress: called with the number of bytes of the tensor read since the last call.
        check: called once all is read, before the file gets its name.

    Raises:
        StorageError, OSError: `path` exists, lies inside a checkpoint, or cannot be written; there is no
            partial file then.
        DataStatesError: the tensor cannot be read.
    """
    target = dtype or dtype_for_numpy(torch_dtype(content.dtype, content.key))
    item = element_bytes(content.dtype)
    with publish_on_exit(path) as temporary, temporary.open("xb") as file:
        dtype_in_file = torch.empty(0, dtype=target, device="cpu").numpy().dtype
        header = {"descr": np.lib.format.dtype_to_descr(dtype_in_file), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, header | {"shape": wanted.kept_shape})
        size = file.tell() + math.prod(wanted.shape) * target.itemsize
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk fails here, before anything is read
        for offset, lengths in cut_box(wanted.offset, wanted.shape, PART_BYTES // item):
            values = content.read(offset, lengths)
            values = values.view(target) if dtype is None else convert_dtype(values, dtype, content.key)
            file.write(values.contiguous().numpy().data)
            progress(math.prod(lengths) * item)
        check()
    return target
