"""Reads checkpoints of `--ckpt-format zarr`, which Megatron-Core once wrote and no longer reads.

The files, as Megatron-LM wrote them (`megatron/core/dist_checkpointing/strategies/zarr.py`, commit 3702761a,
and `strategies/common.py`; `strategies/tensorstore.py` read them):

    metadata.json              {"sharded_backend": "zarr", "sharded_backend_version": 1, ...}
    common.pt                  the common state, by torch.save
    KEY/.zarray, KEY/0.1, ...  a tensor: a zarr v2 array, uncompressed, without fill value, all chunks
                               written; bfloat16 is spelled as in TensorStore: "dtype": "bfloat16"
    KEY.sync/                  locks of ranks that wrote parts of one chunk (flattened tensors); ignored
    KEY/shard_OFFSET_SHAPE.pt  a ShardedObject's value, by torch.save; later formats put it in a list

Names of objects once lacked the last number of their shape (`shard_0.1_2.pt` for `shard_0.1_2.4`). It is
derived from the largest offset, as Megatron does.

Chunks contain plain elements, and are mapped: the package zarr, which none of this needs, would read a whole
chunk, perhaps a whole embedding, for any slice of it. They have no checksums. A chunk that is missing or has
the wrong size is an error, which is detected before memory is allocated.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.convert.sources.source import FragmentRange, RankContents, Source
from megatron_datastates.errors import FormatError, StorageError, UnsupportedFormatError
from megatron_datastates.files import DOCUMENT_BYTES, OBJECT_BYTES, open_regular, read_regular
from megatron_datastates.format.directory import COMMON_FILE
from megatron_datastates.format.values import DTYPES
from megatron_datastates.pipeline.loading.dtypes import torch_dtype
from megatron_datastates.plan.boxes import checked_slice, intersect, slices_of
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.objects import ObjectSource, deserialize

_ARRAY_NAME = ".zarray"
_MOST_CHUNKS_MISSING = 1 << 20  # of an incomplete array whose chunks are listed anyway
_MOST_AXES = 32  # numpy has 64, and one more is for the bytes of an element
_OBJECT = re.compile(r"shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)\.pt", re.ASCII)
# Dtypes as documents spell them: looked up, as numpy ends the process for some that are hostile.
_SPELLED = {np.dtype(name).str: name for name in DTYPES if name in np.sctypeDict} | {"bfloat16": "bfloat16"}
_OF_ARRAY = re.compile(r"\.zarray|\d+(\.\d+)*", re.ASCII)  # its document and chunks


@dataclasses.dataclass(frozen=True)
class ZarrTensor:
    """See SourceTensor. The fragments are the chunks, in row-major order of the grid.

    A tensor without elements has no chunks: it is one fragment without elements, or it would be lost.
    """

    path: Path
    dtype: str
    global_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @functools.cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        if 0 in self.global_shape:
            return np.zeros((1, len(self.global_shape)), np.int64)
        pairs = zip(self.global_shape, self.chunk_shape, strict=True)
        grid = tuple(-(-size // chunk) for size, chunk in pairs)
        if math.prod(grid) > _MOST_CHUNKS_MISSING:
            self._require_count(math.prod(grid))
        cells = np.indices(grid, np.int64).reshape(len(grid), math.prod(grid)).T
        offsets: npt.NDArray[np.int64] = cells * np.array(self.chunk_shape, np.int64)
        return offsets

    @functools.cached_property
    def shapes(self) -> npt.NDArray[np.int64]:
        left = np.array(self.global_shape, np.int64) - self.offsets
        if 0 in self.global_shape:
            return left
        shapes: npt.NDArray[np.int64] = np.minimum(left, np.array(self.chunk_shape, np.int64))
        return shapes

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype][1]

    def cells(self, offset: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yields the grid positions of the chunks that a slice touches.

        Raises:
            StorageError: one of these chunks is missing or has the wrong size.
        """
        if math.prod(shape) == 0:
            return
        axes = [
            range(at // chunk, (at + size - 1) // chunk + 1)
            for at, size, chunk in zip(offset, shape, self.chunk_shape, strict=True)
        ]
        self._require_count(math.prod(map(len, axes)))
        for cell in itertools.product(*axes):
            self._require_chunk(self._chunk_path(cell))
            yield cell

    def _require_count(self, chunks: int) -> None:
        """Raises StorageError if there are fewer files than chunks, before a hostile number takes memory."""
        files = len(os.listdir(self.path))
        if chunks > files:
            raise StorageError(
                f"{self.path} is incomplete: it has {files} files, expected at least {chunks} chunks"
            )

    def chunk(self, cell: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Maps a chunk: an array of its shape with one more axis, for the bytes of an element."""
        with open_regular(self._chunk_path(cell)) as file:
            return np.memmap(file, np.uint8, "r", shape=(*self.chunk_shape, self.element_bytes))

    def _chunk_path(self, cell: tuple[int, ...]) -> Path:
        return self.path / (".".join(map(str, cell)) or "0")

    def _require_chunk(self, path: Path) -> None:
        wanted = math.prod(self.chunk_shape) * self.element_bytes
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise StorageError(
                f"{path} is missing: the checkpoint has only a part of tensor {self.path.name!r}"
            ) from None
        if found != wanted:
            raise StorageError(f"{path} has {found} bytes, expected a chunk of {wanted}: it is damaged")


class LegacyZarrSource(Source):
    """Lists files and reads .zarray documents when it is created; reads data on request."""

    format = "zarr"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        folders = [path for path in sorted(directory.iterdir()) if path.is_dir()]
        arrays = [path for path in folders if (path / _ARRAY_NAME).is_file()]
        self.tensors: dict[str, ZarrTensor] = {path.name: _open_tensor(path) for path in arrays}
        self._objects = dict(pair for path in folders for pair in _objects_in(path))
        holders = {*arrays, *(path.parent for path in self._objects.values())}
        self._other_directories = [
            path.name for path in folders if path not in holders and path.suffix != ".sync"
        ]

    @property
    def objects(self) -> Sequence[str]:
        return list(self._objects)

    @property
    def other_directories(self) -> Sequence[str]:
        return self._other_directories

    def read_tensor(
        self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        tensor = self._found(self.tensors, "tensor", key)
        offset, shape = checked_slice(key, tensor.global_shape, offset, shape)
        cells = list(tensor.cells(offset, shape))  # checks all before memory is allocated
        target = np.empty((*shape, tensor.element_bytes), np.uint8)
        for cell in cells:
            corner = [n * size for n, size in zip(cell, tensor.chunk_shape, strict=True)]
            common = intersect(corner, tensor.chunk_shape, offset, shape)
            assert common is not None, "the cells are those that the slice touches"
            target[slices_of(common, offset)] = tensor.chunk(cell)[slices_of(common, corner)]
        return torch.from_numpy(target.reshape(-1)).view(torch_dtype(tensor.dtype, key)).reshape(shape)

    def read_ranges(self, ranges: Sequence[FragmentRange], window: npt.NDArray[np.uint8]) -> None:
        for key, number, begin, size, at in ranges:
            tensor, fragment = self._found(self.tensors, "tensor", key), self.fragment(key, number)
            (cell,) = tensor.cells(fragment.offset, fragment.shape)
            # No copy but of what is padded: then only the requested bytes are read.
            data = tensor.chunk(cell)[tuple(map(slice, fragment.shape))].reshape(-1)
            window[at : at + size] = data[begin : begin + size]

    def read_object(self, key: str) -> bytes:
        """See Source. Serializes the value again, in a list. Raises UnsafeObjectError if it is not plain."""
        value = deserialize(_read(self._found(self._objects, "object", key)), key)
        return ObjectSource(key, [value], Mutability.NEVER).serialize()

    def require_files(self) -> None:
        for tensor in self.tensors.values():
            for _ in tensor.cells((0,) * len(tensor.global_shape), tensor.global_shape):
                pass

    def _reused_files(self) -> Iterable[Path]:
        yield self.directory / COMMON_FILE
        yield from self._objects.values()
        for tensor in self.tensors.values():
            with os.scandir(tensor.path) as entries:
                yield from (tensor.path / entry.name for entry in entries if _OF_ARRAY.fullmatch(entry.name))

    def stored_by_rank(self) -> list[RankContents]:
        """Returns everything as one rank's, because the files do not say which rank wrote what."""
        fragments = [(key, n) for key, tensor in self.tensors.items() for n in range(len(tensor.offsets))]
        return [RankContents(fragments, list(self._objects))]


def _read(path: Path) -> bytes:
    """Raises StorageError."""
    try:
        return read_regular(path, OBJECT_BYTES)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def _open_tensor(path: Path) -> ZarrTensor:
    """Raises FormatError, UnsupportedFormatError."""
    document = path / _ARRAY_NAME
    try:
        members = json.loads(read_regular(document, DOCUMENT_BYTES))
        shape, chunks = tuple(members["shape"]), tuple(members["chunks"])
        spelled, order, version = members["dtype"], members["order"], members["zarr_format"]
        packed = members.get("compressor") or members.get("filters")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise FormatError(f"{document} is damaged: {error}") from error
    if version != 2 or not isinstance(spelled, str | list):  # a list is one of fields
        raise FormatError(f"{document} is damaged: it has zarr_format {version!r} and dtype {spelled!r}")
    sizes, least = (*shape, *chunks), (*(0 for _ in shape), *(1 for _ in chunks))
    if not len(shape) == len(chunks) <= _MOST_AXES or not all(
        type(size) is int and low <= size < 1 << 62  # no bool
        for size, low in zip(sizes, least, strict=True)
    ):
        raise FormatError(f"{document} is damaged: its shape {shape} with chunks {chunks} is impossible")
    if packed or isinstance(spelled, list) or spelled not in _SPELLED or order != "C":
        raise UnsupportedFormatError(
            f"{document}: an array of {spelled!r}, compressor and filters {packed}, order {order}; "
            "expected uncompressed little-endian numbers in C order, as Megatron wrote"
        )
    return ZarrTensor(path, _SPELLED[spelled], shape, chunks)


def _objects_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the keys and files of the objects in a folder."""
    files = {path: _OBJECT.fullmatch(path.name) for path in sorted(folder.iterdir())}
    found = {path: (m[1], m[2]) for path, m in files.items() if m is not None}
    if not found:
        return
    last = max(int(offset.rpartition(".")[2]) for offset, _ in found.values()) + 1
    for path, (offset, shape) in found.items():
        if shape.count(".") < offset.count("."):
            shape = f"{shape}.{last}"
        yield f"{folder.name}/shard_{offset}_{shape}", path
