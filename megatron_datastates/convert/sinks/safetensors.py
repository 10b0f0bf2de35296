"""Exports tensors as safetensors files, which Hugging Face's loaders read.

The format (https://huggingface.co/docs/safetensors, safetensors' `tensor.rs`): the header's size as 8 bytes,
a header in JSON, then all tensors without gaps. This module does not use the library, which needs all tensors
of a file in memory at once. Files and index have the names that transformers uses.

Tensors have the names of Megatron's modules with Transformer Engine, as in the checkpoint
(`self_attention.linear_qkv.layer_norm_weight`), with the numbers of layers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from megatron_datastates.convert.parts import Choice, choose_parts, is_weight
from megatron_datastates.convert.sinks.target import publish_on_exit, refuse_target
from megatron_datastates.convert.sources.source import Source, SourceTensor
from megatron_datastates.errors import MissingKeyError, OptionError, UnsupportedFormatError
from megatron_datastates.format.values import element_bytes
from megatron_datastates.plan.boxes import cut_box

INDEX_NAME = "model.safetensors.index.json"
_HEADER_OF_FILE = "__metadata__"  # in the header, among the tensors

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32",
    "uint32": "U32", "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


Box = tuple[str, tuple[int, ...], tuple[int, ...]]  # key, offset, shape
ReadBox = Callable[[str, Sequence[int], Sequence[int]], torch.Tensor]  # takes those of a box


@dataclasses.dataclass(frozen=True)
class Exportable:
    """One tensor to export, and the boxes of stored tensors that it consists of."""

    name: str
    dtype: str  # as torch names it
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]  # after each other, they are the tensor

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * element_bytes(self.dtype)

    def blocks(self, read: ReadBox, memory_bytes: int) -> Iterator[torch.Tensor]:
        """Yields all elements in row-major order, in tensors of at most `memory_bytes`."""
        yield from self.stored_blocks(read, memory_bytes // element_bytes(self.dtype))

    def stored_blocks(self, read: ReadBox, most_elements: int) -> Iterator[torch.Tensor]:
        """Yields all elements of the boxes, as they are stored."""
        for key, offset, shape in self.boxes:
            for at, lengths in cut_box(offset, shape, most_elements):
                yield read(key, at, lengths)


@dataclasses.dataclass(frozen=True)
class Exported:
    """The result of an export."""

    files: tuple[str, ...]
    tensors: int
    tensor_bytes: int


def choose_weights(
    source: Source, patterns: Sequence[str] = (), *, stacked: bool = False
) -> list[Exportable]:
    """Chooses the model's weights, or the tensors that the patterns match.

    Args:
        stacked: export stacked layers as one tensor; otherwise each layer becomes a tensor of its own.

    Raises:
        MissingKeyError: a pattern matches nothing, or there are no weights.
        UnsupportedFormatError: safetensors lacks the dtype of a tensor.
        FormatError: two tensors would have the same name, or one a name that safetensors reserves.
    """
    keys = list(source.tensors) if patterns else [key for key in source.tensors if is_weight(key)]
    if not keys:
        what = "tensors" if not source.tensors else "weights, only optimizer state: choose it with --keys"
        raise MissingKeyError(f"{source.directory} holds no {what}")
    weights: dict[str, Exportable] = {}
    shapes = {key: source.tensors[key].global_shape for key in keys}
    for key, choice in choose_parts(shapes, patterns, str(source.directory)).items():
        tensor = source.tensors[key]
        if tensor.dtype not in DTYPES:
            raise UnsupportedFormatError(
                f"{key!r} has dtype {tensor.dtype}, which safetensors lacks: exclude it with --keys"
            )
        for weight in _weights_of(key, tensor, choice, stacked):
            if weight.name == _HEADER_OF_FILE:
                raise OptionError(
                    f"{key!r} is a name that safetensors reserves: exclude the tensor with --keys"
                )
            if weight.name in weights:
                other = weights[weight.name].boxes[0][0]
                raise OptionError(
                    f"{key!r} and {other!r} would both be named {weight.name!r}: "
                    "export them separately with --keys, or use --stacked"
                )
            weights[weight.name] = weight
    return list(weights.values())


def _weights_of(key: str, tensor: SourceTensor, choice: Choice, stacked: bool) -> Iterator[Exportable]:
    dtype, shape = tensor.dtype, tuple(tensor.global_shape)
    if stacked and choice.whole:
        yield Exportable(key, dtype, shape, ((key, (0,) * len(shape), shape),))
        return
    for part in choice.parts:
        shape = part.shape[1:] if part.stacked else part.shape
        yield Exportable(part.name, dtype, shape, ((key, part.offset, part.shape),))


def export(
    source: Source,
    target: Path,
    weights: Sequence[Exportable],
    *,
    shard_bytes: int = 5 * 10**9,
    memory_bytes: int = 1 << 30,
    progress: Callable[[int], None] = lambda bytes_done: None,
    add_files: Callable[[Path], None] = lambda directory: None,
    read: ReadBox | None = None,
) -> Exported:
    """Writes the directory `target`, which appears only once it is complete.

    Args:
        shard_bytes: upper limit of the tensors in one file; a larger tensor gets a file of its own.
        memory_bytes: upper limit of the memory for elements.
        progress: called with the number of bytes written since the last call.
        add_files: called with the directory, before it gets the target's name.
        read: reads a box of a stored tensor (default: the source does).

    Raises:
        StorageError: the target exists, there is too little space, or the source was saved again meanwhile.
        DataStatesError: a tensor cannot be read.
        OSError: a file cannot be written.
    """
    shards = _pack(weights, shard_bytes)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    names = names if len(names) > 1 else ["model.safetensors"]
    total = sum(weight.bytes for weight in weights)
    refuse_target(target, total, makes_parents=True)
    source.note_files()  # not require_files: a damaged checkpoint's whole files can be exported
    with publish_on_exit(target, makes_parents=True) as directory:
        directory.mkdir()
        for name, shard in zip(names, shards, strict=True):
            with open(directory / name, "xb") as file:
                _write_shard(read or source.read_tensor, shard, file, memory_bytes, progress)
        source.require_unchanged()
        if len(shards) > 1:
            where = {w.name: name for name, shard in zip(names, shards, strict=True) for w in shard}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        add_files(directory)
    return Exported(tuple(names), len(weights), total)


def _pack(weights: Sequence[Exportable], shard_bytes: int) -> list[list[Exportable]]:
    shards: list[list[Exportable]] = [[]]
    filled = 0
    for weight in weights:
        if shards[-1] and filled + weight.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.bytes
    return shards


def _write_shard(
    read: ReadBox,
    shard: Sequence[Exportable],
    file: BinaryIO,
    memory_bytes: int,
    progress: Callable[[int], None],
) -> None:
    # Wide elements first, as the library does: then every tensor is aligned.
    shard = sorted(shard, key=lambda weight: (-element_bytes(weight.dtype), weight.name))
    file.write(_header(shard))
    for weight in shard:
        for data in weight.blocks(read, memory_bytes):
            progress(file.write(data.reshape(-1).view(torch.uint8).numpy()))


def _header(shard: Sequence[Exportable]) -> bytes:
    """Returns the header, padded with spaces to 8 bytes, with the metadata that transformers requires."""
    header: dict[str, object] = {_HEADER_OF_FILE: {"format": "pt"}}
    at = 0
    for weight in shard:
        offsets = [at, at + weight.bytes]
        header[weight.name] = {
            "dtype": DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": offsets,
        }
        at = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
