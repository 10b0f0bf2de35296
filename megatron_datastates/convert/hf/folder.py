"""Reads a Hugging Face model folder: config.json, and where each tensor is in the safetensors files.

The format of these files is described in sinks/safetensors.py. Headers are checked as if they were hostile.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_datastates.convert.hf.export import CONFIG_NAME
from megatron_datastates.convert.sinks.safetensors import DTYPES, INDEX_NAME
from megatron_datastates.convert.sources.archives import read_exactly
from megatron_datastates.errors import FormatError, NotACheckpointError, StorageError
from megatron_datastates.files import DOCUMENT_BYTES, open_regular, size_of
from megatron_datastates.format.values import element_bytes
from megatron_datastates.pipeline.runs.runs import json_members

_ONE_FILE = "model.safetensors"
_MOST_HEADER_BYTES = 100_000_000  # the limit of the library itself
_INDEX_BYTES = 256 << 20
_NAMES = {short: name for name, short in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file, in row-major order."""

    path: Path
    offset: int  # of its first byte
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * element_bytes(self.dtype)

    def read_into(self, begin: int, target: npt.NDArray[np.uint8]) -> None:
        """Reads bytes [begin, begin + len(target)) of the tensor. Raises StorageError, OSError."""
        with open_regular(self.path) as file:
            read_exactly(file, self.offset + begin, target, str(self.path))

    def transposed_rows(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Returns the bytes of rows [first, last) of the transpose."""
        item = element_bytes(self.dtype)
        mapped = np.memmap(self.path, f"V{item}", "r", self.offset, self.shape)
        return np.ascontiguousarray(mapped[:, first:last].T).view(np.uint8).reshape(-1)


def read_config_json(directory: Path) -> dict[str, Any]:
    """Returns config.json. Raises NotACheckpointError if there is none, FormatError if it is damaged."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        what = f"has no {CONFIG_NAME}" if directory.is_dir() else "is not a directory"
        raise NotACheckpointError(f"{directory} {what}: choose a Hugging Face model folder")
    return json_members(path, DOCUMENT_BYTES)


def find_tensors(directory: Path) -> dict[str, Stored]:
    """Returns all tensors of a folder by name.

    Raises:
        NotACheckpointError: it has no safetensors files.
        StorageError: a file is missing or truncated.
        FormatError: a file is damaged.
    """
    if (directory / INDEX_NAME).is_file():
        places = json_members(directory / INDEX_NAME, _INDEX_BYTES).get("weight_map")
        if not isinstance(places, dict) or not all(_is_file_name(name) for name in places.values()):
            raise FormatError(f"{directory / INDEX_NAME} is damaged: it has no weight_map of file names")
    elif (directory / _ONE_FILE).is_file():
        return _tensors_of(directory / _ONE_FILE)
    else:
        raise NotACheckpointError(
            f"{directory} has neither {_ONE_FILE} nor {INDEX_NAME}: save the model with safetensors"
        )
    files = sorted(set(places.values()))
    if _ONE_FILE not in files and (directory / _ONE_FILE).exists():  # transformers would load that one
        raise FormatError(
            f"{directory} has both {_ONE_FILE} and an {INDEX_NAME} that does not name it: remove the one "
            "that is not the model's"
        )
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, tensor in _tensors_of(directory / file).items():
            if name in tensors:
                raise FormatError(f"{directory}: {name!r} is in {tensors[name].path.name} and in {file}")
            tensors[name] = tensor
    for name, file in places.items():
        if name not in tensors:
            raise FormatError(f"{directory} lacks {name!r}, which {INDEX_NAME} names")
        if tensors[name].path.name != file:
            raise FormatError(
                f"{directory}: {name!r} is in {tensors[name].path.name}, and {INDEX_NAME} says in {file}"
            )
    return tensors


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _tensors_of(path: Path) -> dict[str, Stored]:
    if not path.is_file():
        raise StorageError(f"{path} is missing")
    with open_regular(path) as file:
        file_bytes = size_of(file)
        size = int(struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0])
        if file_bytes < 8 + size or size > _MOST_HEADER_BYTES:
            raise StorageError(f"{path}: the file is truncated: its header should have {size} bytes")
        try:
            header = json.loads(file.read(size))
            tensors = {
                name: _stored(path, entry, 8 + size, file_bytes)
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
            raise FormatError(f"{path} is damaged: {error}") from error
    _require_no_gaps(path, tensors, 8 + size, file_bytes)
    return tensors


def _require_no_gaps(path: Path, tensors: Mapping[str, Stored], start: int, file_bytes: int) -> None:
    """Raises FormatError unless each byte after the header is of one tensor, as the format asks."""
    at = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.bytes)):
        if tensor.offset != at:
            raise FormatError(
                f"{path} is damaged: a tensor begins at byte {tensor.offset}, expected {at}, the end of the "
                "previous one"
            )
        at += tensor.bytes
    if at != file_bytes:
        raise FormatError(f"{path} is damaged: it has {file_bytes} bytes, and its last tensor ends at {at}")


def _stored(path: Path, entry: Mapping[str, Any], start: int, file_bytes: int) -> Stored:
    begin, end = entry["data_offsets"]
    dtype, shape = _NAMES[entry["dtype"]], tuple(entry["shape"])
    sizes = (begin, end, *shape)
    if not all(isinstance(n, int) and 0 <= n < 1 << 63 for n in sizes):
        raise ValueError(f"offsets and sizes are {sizes}, expected numbers")
    tensor = Stored(path, start + begin, dtype, shape)
    if end - begin != tensor.bytes:
        raise ValueError(f"{end - begin} bytes do not hold a tensor of shape {shape}")
    if start + end > file_bytes:
        raise StorageError(
            f"{path}: the file is truncated: it has {file_bytes} bytes, expected {start + end}"
        )
    return tensor
