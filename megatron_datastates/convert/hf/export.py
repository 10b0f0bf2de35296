"""Exports a model as a folder that transformers loads: config.json and safetensors files.

Everything that cannot be done is refused before anything is written: an architecture that is not known,
tensors that it lacks or does not have, and shapes that do not fit its arguments.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from megatron_datastates.convert.contents import convert_dtype
from megatron_datastates.convert.hf import FLOATS
from megatron_datastates.convert.hf.arguments import Arguments, model_arguments
from megatron_datastates.convert.hf.config_json import config_json
from megatron_datastates.convert.hf.families import Family, family_of
from megatron_datastates.convert.hf.tensors import EMBEDDING, EXPERTS, LAYERS, Place, Rows, entries
from megatron_datastates.convert.parts import is_weight
from megatron_datastates.convert.sinks.safetensors import Box, Exportable, Exported, ReadBox
from megatron_datastates.convert.sinks.safetensors import export as write_files
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.convert.stored_arguments import training_arguments
from megatron_datastates.errors import (
    FormatError,
    MismatchError,
    OptionError,
    StorageError,
    UnsupportedFormatError,
)
from megatron_datastates.files import open_regular
from megatron_datastates.format.directory import is_through_dcp
from megatron_datastates.format.values import element_bytes
from megatron_datastates.pipeline.loading.dtypes import torch_dtype
from megatron_datastates.plan.boxes import slices_of

CONFIG_NAME = "config.json"
# What tokenizers save; other files of a model's folder, such as its weights, are not copied.
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*",
    "generation_config.json",
)  # fmt: skip
_MOST_NAMED = 3
_MOST_KEPT = 4  # the files hold what is made of one tensor close together: names are in order


@dataclasses.dataclass(frozen=True)
class HuggingFaceTensor(Exportable):
    """A tensor of Hugging Face's, which `dtype` and `shape` are of. The boxes hold its rows."""

    transposed: bool = False  # the boxes are what it is the transpose of
    zero_centered: bool = False  # 1 is to be added

    def blocks(self, read: ReadBox, memory_bytes: int) -> Iterator[torch.Tensor]:
        # A block exists at most three times: as it is stored, transposed, and converted. Half of the memory
        # is for layers, see _Layers.
        most = max(memory_bytes // 24, 1)
        for data in self._transposed(read, most) if self.transposed else self.stored_blocks(read, most):
            yield self._converted(data)

    def _transposed(self, read: ReadBox, most: int) -> Iterator[torch.Tensor]:
        """Yields rows of the transpose, which are columns of what is stored."""
        columns, rows = self.shape
        step = max(most // rows, 1)
        for begin in range(0, columns, step):
            width = min(step, columns - begin)
            parts = [
                read(key, (*offset[:-1], begin), (*shape[:-1], width)).reshape(-1, width)
                for key, offset, shape in self.boxes
            ]
            yield torch.cat(parts).t().contiguous()

    def _converted(self, data: torch.Tensor) -> torch.Tensor:
        dtype = torch_dtype(self.dtype, self.name)
        wide = data.to(torch.float32) + 1 if self.zero_centered else data
        if wide.dtype == dtype:
            return wide
        narrow = convert_dtype(wide, dtype, self.name)
        if not torch.equal(torch.isfinite(narrow), torch.isfinite(wide)):
            raise MismatchError(
                f"{self.name!r} has numbers that {self.dtype} cannot hold: choose another --dtype"
            )
        return narrow


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that can be exported."""

    family: Family
    arguments: Arguments
    dtype: str
    tensors: list[HuggingFaceTensor]
    notes: list[str]  # what a user should know


def read_model(source: Source, *, dtype: str = "", vocab_size: int = 0) -> Model:
    """Finds out what a checkpoint's model is, and where the tensors of Hugging Face's are in it.

    Args:
        dtype: of all tensors; by default each keeps its own.
        vocab_size: without padding; by default, what the stored arguments say, or else with padding.

    Raises:
        UnsupportedFormatError: the architecture is not known, or Megatron saved through DCP.
        FormatError: the tensors are not those of the architecture.
        MissingKeyError: there are no stored arguments.
        OptionError: `dtype` is none of FLOATS, or `vocab_size` exceeds the vocabulary.
    """
    if dtype not in ("", *FLOATS):
        raise OptionError(f"--dtype {dtype}: expected one of {', '.join(FLOATS)}")
    stored = training_arguments(source)
    if is_through_dcp(source.objects):
        raise UnsupportedFormatError(
            f"{source.directory} was saved through PyTorch's DCP, as with Megatron-FSDP, and its tensors "
            "have other names: --hf does not export it. Without --hf, weights are exported under these names"
        )
    arguments = model_arguments(stored, vocab_size)
    family = family_of(arguments, stored)
    arguments, notes = _with_vocabulary(source, arguments, vocab_size)
    finder = _Finder(source, arguments)
    tensors = [
        tensor
        for place, made in entries(family.model_type, arguments)
        for tensor in finder.tensors(place, made, dtype)
    ]
    finder.require_all_used(family)
    if arguments.apply_layernorm_1p:
        notes.append("norms: 1 was added to their weights, which Megatron stores without it")
    capacity = stored.get("moe_expert_capacity_factor")
    if arguments.num_experts and capacity is not None:
        notes.append(
            f"experts: with --moe-expert-capacity-factor {capacity}, Megatron drops tokens of an expert that "
            "has too many; transformers drops none"
        )
    main = dtype or source.tensors[EMBEDDING].dtype
    return Model(family, arguments, main, tensors, notes)


def _with_vocabulary(source: Source, a: Arguments, asked: int) -> tuple[Arguments, list[str]]:
    """Returns the arguments with the number of words to export."""
    if EMBEDDING not in source.tensors:
        raise FormatError(
            f"{source.directory} has no tensor {EMBEDDING!r}: choose a checkpoint of a GPT model"
        )
    rows = source.tensors[EMBEDDING].global_shape[0]
    if asked > rows:
        raise OptionError(f"--vocab-size {asked}: the embedding has only {rows} rows")
    if a.vocab_size and a.vocab_size <= rows:
        return a, []
    note = (
        f"vocabulary: all {rows} rows of the embedding, with any padding, since the stored arguments do not "
        "say how many are words: --vocab-size N drops the others"
    )
    return dataclasses.replace(a, vocab_size=rows), [note]


class _Finder:
    """Finds the places of a model's tensors in a checkpoint, in any of the ways that Megatron stores them."""

    def __init__(self, source: Source, a: Arguments) -> None:
        self._source, self._a = source, a
        self._used: set[str] = set()

    def tensors(self, place: Place, made: list[Rows], dtype: str) -> Iterator[HuggingFaceTensor]:
        """Yields the tensors that a place's rows make. Raises FormatError."""
        for rows in made:
            boxes = tuple(self._box(place, *run) for run in rows.runs)
            count = sum(length for _, length in rows.runs)
            shape = (count, *place.shape[1:])
            kept = self._source.tensors[boxes[0][0]].dtype
            if kept not in FLOATS:
                raise FormatError(f"{boxes[0][0]!r} has dtype {kept}, expected one of {', '.join(FLOATS)}")
            yield HuggingFaceTensor(
                rows.name,
                dtype or kept,
                shape[::-1] if rows.transposed else shape,
                boxes,
                rows.transposed,
                place.zero_centered,
            )

    def _box(self, place: Place, first: int, count: int) -> Box:
        key, before = self._find(place)
        self._used.add(key)
        rows, others = place.shape[0], place.shape[1:]
        if key.endswith(("_w", "_v")):  # the halves of a gated layer, stored apart
            rows //= 2
            if first >= rows:
                key, first = f"{key[:-1]}v", first - rows
                self._used.add(key)
        self._require_shape(key, (*(size for _, size in before), rows, *others), place)
        offset = tuple(n for n, _ in before)
        zeros = (0,) * len(others)
        return key, (*offset, first, *zeros), (*(1 for _ in before), count, *others)

    def _find(self, place: Place) -> tuple[str, list[tuple[int, int]]]:
        """Returns the key of a place's tensor, and (number, count) for each axis before its own."""
        stacked = [] if place.layer is None else [(place.layer, self._a.num_layers)]
        for name in place.names:
            for key, before in _keys(name, place, stacked, self._a.num_experts or 0):
                for end in ("", "_w"):
                    if key + end in self._source.tensors:
                        return key + end, before
        layer = "" if place.layer is None else f" of layer {place.layer}"
        raise FormatError(
            f"{self._source.directory} lacks {place.names[0]!r}{layer}, which its arguments ask for: "
            "choose a complete checkpoint of a GPT model"
        )

    def _require_shape(self, key: str, wanted: tuple[int, ...], place: Place) -> None:
        if key not in self._source.tensors:
            raise FormatError(f"{self._source.directory} lacks {key!r}, the other half of a gated layer")
        found = tuple(self._source.tensors[key].global_shape)
        if found != wanted and not (place.padded and found[0] >= wanted[0] and found[1:] == wanted[1:]):
            raise FormatError(
                f"{key!r} has shape {list(found)}, but the stored arguments ask for {list(wanted)}: they are "
                "another model's"
            )

    def require_all_used(self, family: Family) -> None:
        """Raises FormatError if the checkpoint's model has other tensors, too."""
        others = sorted(key for key in self._source.tensors if is_weight(key) and key not in self._used)
        if others:
            some = ", ".join(map(repr, others[:_MOST_NAMED]))
            raise FormatError(
                f"{self._source.directory} has {len(others)} tensors that {family.model_type} lacks, such as "
                f"{some}: its architecture is not known"
            )


def _keys(
    name: str, place: Place, stacked: list[tuple[int, int]], experts: int
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yields the keys that a tensor may have: layers and experts are stacked, or have keys of their own."""
    if place.layer is None:
        yield name, []
        return
    for prefix, before in ((LAYERS, stacked), (f"{LAYERS}{place.layer}.", [])):
        if place.expert is None:
            yield prefix + name, before
            continue
        yield prefix + name, [*before, (place.expert, experts)]
        own = name.replace(EXPERTS, f"{EXPERTS}{place.expert}.")
        yield prefix + own, before


def export_model(
    source: Source,
    target: Path,
    model: Model,
    *,
    tokenizer: Path | None = None,
    shard_bytes: int = 5 * 10**9,
    memory_bytes: int = 1 << 30,
    progress: Callable[[int], None] = lambda bytes_done: None,
) -> Exported:
    """Writes the folder `target`, which appears only once it is complete.

    Args:
        tokenizer: a folder with the files of a tokenizer, which are copied.

    Raises:
        what sinks.safetensors.export raises; StorageError: `tokenizer` has no tokenizer's files.
    """
    files = _tokenizer_files(tokenizer) if tokenizer else []
    config = config_json(model.family, model.arguments, model.dtype)

    def add_files(directory: Path) -> None:
        for path in files:
            with open_regular(path) as found, open(directory / path.name, "xb") as copy:
                shutil.copyfileobj(found, copy)
        (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")

    return write_files(
        source,
        target,
        model.tensors,
        shard_bytes=shard_bytes,
        memory_bytes=memory_bytes,
        progress=progress,
        add_files=add_files,
        read=_Layers(source, memory_bytes // 2).read,
    )


class _Layers:
    """Reads a stored tensor of a layer as a whole, and keeps the latest, for several tensors are made of it.

    Checksums cover more than a small box, so reading box by box would read most bytes several times.
    """

    def __init__(self, source: Source, memory_bytes: int) -> None:
        self._source, self._memory_bytes = source, memory_bytes
        self._kept: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}  # by key and number of the layer

    @property
    def _held(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept.values())

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Reads a box, which lies in one layer and has at most two axes of more than one element."""
        whole = self._source.tensors[key].global_shape
        before = max(len(whole) - 2, 0)
        start, lengths = (*offset[:before], *(0 for _ in whole[before:])), (*shape[:before], *whole[before:])
        size = math.prod(lengths) * element_bytes(self._source.tensors[key].dtype)
        if size > self._memory_bytes:
            return self._source.read_tensor(key, offset, shape)
        if (key, start) not in self._kept:
            while self._kept and (len(self._kept) == _MOST_KEPT or self._held + size > self._memory_bytes):
                del self._kept[next(iter(self._kept))]
            self._kept[key, start] = self._source.read_tensor(key, start, lengths)
        return self._kept[key, start][slices_of((offset, shape), start)].contiguous()


def _tokenizer_files(directory: Path) -> list[Path]:
    found = {path for pattern in TOKENIZER_FILES for path in directory.glob(pattern) if path.is_file()}
    if not directory.is_dir():
        raise StorageError(f"--tokenizer {directory}: there is no such directory")
    if not found:
        raise StorageError(f"--tokenizer {directory}: it has no file of a tokenizer, such as tokenizer.json")
    return sorted(found)
