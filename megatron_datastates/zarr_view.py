r"""A read-only zarr v3 view of a checkpoint, for reading slices of it with zarr, numpy or xarray.

    import megatron_datastates.zarr_view

    group = megatron_datastates.zarr_view.open("runs/gpt/iter_0001000")
    group["decoder.layers.mlp.linear_fc1.weight"][3, :100]

Nothing is converted or copied in advance: metadata documents and chunks are made on request, and a request
for a chunk reads that chunk only. If the stored fragments of a tensor form a regular grid, they are its
chunks; otherwise the tensor is one chunk. Chunks larger than CHUNK_BYTES are split.

An array is named after its tensor's key. Characters that zarr's paths cannot contain are escaped: `%` as
`%25`, `/` as `%2F`, `\` as `%5C`. So is the first character of a name that zarr reserves (`__...`,
`zarr.json`, only dots). The attribute `key` holds the unescaped key.

zarr has no bfloat16, no 8-bit floats and no complex32: their bits are shown as unsigned integers, and the
attribute `dtype` names the dtype. Dimensions are named by number and size (`d0_4096`), so that arrays of
different shapes fit into one xarray.Dataset.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import AsyncIterator, Iterator, MutableMapping
from typing import Any, NoReturn

import numpy as np
import torch

from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sources.source import Source, SourceTensor
from megatron_datastates.errors import optional_package
from megatron_datastates.files import path_of
from megatron_datastates.format.values import element_bytes

with optional_package("a zarr view needs the package zarr", "zarr"):
    import zarr
    from zarr.abc.buffer import Buffer
    from zarr.buffer import cpu
    from zarr.storage import MemoryStore

CHUNK_BYTES = 16 << 20  # the largest chunk
_DOCUMENT = "zarr.json"
_KNOWN = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip
_RESERVED = re.compile(r"__.*|\.*|zarr\.json", re.DOTALL)


def open(path: str | os.PathLike[str], *, as_float32: bool = False) -> zarr.Group:
    """Opens the checkpoint in the directory `path`, of any format, as a group with an array for each tensor.

    Reading an array raises the errors of reading the checkpoint: CorruptDataError, StorageError, FormatError.

    Args:
        as_float32: show bfloat16 and 8-bit floats as float32 numbers, not as bits.

    Raises:
        NotACheckpointError: `path` holds no checkpoint of a known format.
    """
    entries = _Entries(
        open_source(path_of(path).absolute()), as_float32
    )  # for a program that changes its own
    return zarr.open_group(_Store(entries), mode="r", zarr_format=3)


def array_name(key: str) -> str:
    """Returns the name of a tensor's array, which is different for every key."""
    name = key.replace("%", "%25").replace("/", "%2F").replace("\\", "%5C")  # zarr turns \ into /
    if _RESERVED.fullmatch(name):
        name = "".join(f"%{byte:02X}" for byte in name[:1].encode()) + name[1:] if name else "%"
    return name


def chunk_shape(tensor: SourceTensor) -> tuple[int, ...]:
    """Returns the shape of a tensor's chunks, in elements."""
    shape = np.array(tensor.global_shape, np.int64)
    grid = tensor.shapes.max(axis=0, initial=1)
    regular = (tensor.offsets % grid == 0).all()  # as fragments tile the tensor, each fills its cell
    chunk: list[int] = np.maximum(grid if regular else shape, 1).tolist()
    most = CHUNK_BYTES // element_bytes(tensor.dtype)
    for axis in range(len(chunk)):
        rest = math.prod(chunk[axis + 1 :])
        if chunk[axis] * rest <= most:
            break
        chunk[axis] = max(most // rest, 1)
    return tuple(chunk)


def _grid(tensor: SourceTensor) -> tuple[int, ...]:
    """Returns how many chunks a tensor has along each axis."""
    sizes = zip(tensor.global_shape, chunk_shape(tensor), strict=True)
    return tuple(-(-size // chunk) for size, chunk in sizes)


class _Entries(MutableMapping[str, Buffer]):
    """A mapping of every path in the store to its bytes, which are made on request."""

    def __init__(self, source: Source, as_float32: bool) -> None:
        self._source, self._as_float32 = source, as_float32
        self._keys = {array_name(key): key for key in source.tensors}

    @property
    def names(self) -> list[str]:
        """The names right below the root."""
        return [_DOCUMENT, *self._keys]

    def __getitem__(self, path: str) -> Buffer:
        if path == _DOCUMENT:
            return _document("group", attributes={"format": self._source.format})
        name, _, rest = path.partition("/")
        key = self._keys[name]
        if rest == _DOCUMENT:
            return self._array_document(key)
        if re.fullmatch(r"c(/(0|[1-9]\d{0,18}))*", rest, re.ASCII) is None:
            raise KeyError(path)
        index, grid = tuple(map(int, rest.split("/")[1:])), _grid(self._source.tensors[key])
        if len(index) != len(grid) or any(n >= count for n, count in zip(index, grid, strict=True)):
            raise KeyError(path)
        return self._chunk(key, index)

    def __iter__(self) -> Iterator[str]:
        yield _DOCUMENT
        for name, key in self._keys.items():
            yield f"{name}/{_DOCUMENT}"
            for index in itertools.product(*map(range, _grid(self._source.tensors[key]))):
                yield "/".join([name, "c", *map(str, index)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, path: str, value: object) -> NoReturn:
        raise PermissionError("a view of a checkpoint is read-only")

    def __delitem__(self, path: str) -> NoReturn:
        raise PermissionError("a view of a checkpoint is read-only")

    def _shown_dtype(self, dtype: str) -> str:
        if dtype in _KNOWN:
            return dtype
        if self._as_float32 and (dtype == "bfloat16" or dtype.startswith("float8")):
            return "float32"
        return f"uint{8 * element_bytes(dtype)}"

    def _array_document(self, key: str) -> Buffer:
        tensor = self._source.tensors[key]
        dtype = self._shown_dtype(tensor.dtype)
        return _document(
            "array",
            attributes={"key": key, "dtype": tensor.dtype},
            shape=tensor.global_shape,
            data_type=dtype,
            chunk_grid={"name": "regular", "configuration": {"chunk_shape": chunk_shape(tensor)}},
            chunk_key_encoding={"name": "default", "configuration": {"separator": "/"}},
            codecs=[{"name": "bytes", "configuration": {"endian": "little"}}],
            fill_value=False if dtype == "bool" else [0.0, 0.0] if dtype.startswith("complex") else 0,
            dimension_names=[f"d{axis}_{size}" for axis, size in enumerate(tensor.global_shape)],
        )

    def _chunk(self, key: str, index: tuple[int, ...]) -> Buffer:
        """Reads a chunk. One that reaches past the end of an axis is padded with zeros to full size."""
        tensor = self._source.tensors[key]
        chunk = chunk_shape(tensor)
        offset = tuple(n * size for n, size in zip(index, chunk, strict=True))
        shape = tuple(map(min, chunk, (s - o for s, o in zip(tensor.global_shape, offset, strict=True))))
        data = self._source.read_tensor(key, offset, shape)
        if data.dtype is not torch.float32 and self._shown_dtype(tensor.dtype) == "float32":
            data = data.to(torch.float32)
        if shape != chunk:
            padded = torch.zeros(chunk, dtype=data.dtype, device="cpu")
            padded[tuple(map(slice, shape))] = data
            data = padded
        return cpu.Buffer.from_array_like(data.reshape(-1).view(torch.uint8).numpy())


class _Store(MemoryStore):
    """A store that equals only itself: comparing its contents would read the whole checkpoint."""

    _store_dict: _Entries

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Lists the root without the names of all chunks, of which an array may have any number."""
        if prefix.rstrip("/"):
            async for name in super().list_dir(prefix):
                yield name
        else:
            for name in self._store_dict.names:
                yield name

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


def _document(node_type: str, **members: Any) -> Buffer:
    text = json.dumps({"zarr_format": 3, "node_type": node_type, **members})
    return cpu.Buffer.from_bytes(text.encode())
