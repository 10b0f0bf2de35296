"""Writing a slice of a tensor to a .npy file, part by part."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron_datastates.convert.contents import PART_BYTES, Content, converted
from megatron_datastates.convert.slices import Slice
from megatron_datastates.errors import StorageError
from megatron_datastates.format.values import element_bytes
from megatron_datastates.pipeline.load import torch_dtype
from megatron_datastates.plan.boxes import cut_box

_RAW = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def stands_for(dtype: torch.dtype) -> torch.dtype:
    """The dtype of equal size that numpy knows: for bfloat16, 8-bit floats and the like, one of raw bits."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return _RAW[dtype.itemsize]
    return dtype


def write_npy(
    path: Path,
    content: Content,
    wanted: Slice,
    dtype: torch.dtype | None = None,
    progress: Callable[[int], None] = lambda bytes_done: None,
) -> torch.dtype:
    """Writes a new file; gives the dtype that is in it.

    Args:
        dtype: to convert to; by default nothing is converted, and what numpy lacks is written as raw bits.
        progress: told how many more bytes of the tensor have been read.

    Raises:
        StorageError: `path` exists or cannot be written. Nothing is left behind then.
        DataStatesError: as reading the tensor.
    """
    target = dtype or stands_for(torch_dtype(content.dtype))
    item = element_bytes(content.dtype)
    # Of this call alone: what another one writes, or a killed one has left, is not touched.
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        if os.path.lexists(path):
            raise FileExistsError(None, "it exists already, and is not written over")
        with temporary.open("xb") as file:
            array = {"descr": np.lib.format.dtype_to_descr(torch.empty(0, dtype=target).numpy().dtype)}
            shape = {"fortran_order": False, "shape": wanted.kept_shape}
            np.lib.format.write_array_header_1_0(file, array | shape)
            size = file.tell() + math.prod(wanted.shape) * target.itemsize
            os.posix_fallocate(file.fileno(), 0, size)  # so that a full disk is told before anything is read
            for offset, lengths in cut_box(wanted.offset, wanted.shape, PART_BYTES // item):
                values = content.read(offset, lengths)
                values = values.view(target) if dtype is None else converted(values, dtype)
                file.write(values.contiguous().numpy().data)
                progress(math.prod(lengths) * item)
        os.link(temporary, path)
    except OSError as error:
        raise StorageError(f"{path} was not written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return target
