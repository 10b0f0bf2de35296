"""Presents a Hugging Face model folder as a checkpoint with Megatron's keys, ready to be converted.

The tables that export a model are read backwards: each tensor of Megatron's is made of rows of tensors of
Hugging Face's. Bytes are read where they lie, so a conversion needs no more memory than any other.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.convert.hf import FLOATS, LOCAL, TRANSFORMER_ENGINE
from megatron_datastates.convert.hf.arguments import namespace
from megatron_datastates.convert.hf.config_json import read_config
from megatron_datastates.convert.hf.folder import Stored, find_tensors, read_config_json
from megatron_datastates.convert.hf.tensors import EMBEDDING, LAYERS, Entry, Place, Rows, entries
from megatron_datastates.convert.sources.source import FragmentRange, RankContents, Source
from megatron_datastates.errors import FormatError, MissingKeyError, UnsupportedFormatError
from megatron_datastates.format.directory import COMMON_FILE
from megatron_datastates.format.values import element_bytes
from megatron_datastates.pipeline.loading.dtypes import torch_dtype
from megatron_datastates.plan.boxes import Box, checked_slice, intersect, slices_of
from megatron_datastates.providers.objects import ObjectSource

# Buffers that older releases of transformers saved, which are no weights.
_BUFFERS = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
_OUTPUT = "lm_head.weight"  # some programs store it although the embedding has the same elements
_MOST_NAMED = 3
_BLOCK_BYTES = 16 << 20
# Modules with an extra state: all linear layers and, of Transformer Engine's, attention and norms.
_LINEAR = re.compile(r"(?P<module>.*\.linear_\w+)\.weight")
_NORM = re.compile(r"(?P<module>.*_layernorm)\.weight")
_ATTENTION = "self_attention.core_attention"


@dataclasses.dataclass(frozen=True)
class Segment:
    """Rows of a tensor of Megatron's, and where they are in one of Hugging Face's."""

    begin: int
    rows: int
    stored: Stored
    stored_begin: int
    transposed: bool

    @property
    def row_bytes(self) -> int:
        """Returns the size of a row of Megatron's."""
        shape = self.stored.shape[:1] if self.transposed else self.stored.shape[1:]
        return math.prod(shape) * element_bytes(self.stored.dtype)

    def read_into(self, begin: int, target: npt.NDArray[np.uint8]) -> None:
        """Reads bytes [begin, begin + len(target)) of these rows."""
        if not self.transposed:
            self.stored.read_into(self.stored_begin * self.row_bytes + begin, target)
            return
        first, end = begin // self.row_bytes, begin + len(target)
        last = -(-end // self.row_bytes)
        rows = self.stored.transposed_rows(self.stored_begin + first, self.stored_begin + last)
        target[:] = rows[begin - first * self.row_bytes :][: len(target)]


@dataclasses.dataclass
class MegatronTensor:
    """See SourceTensor. Fragment i consists of the segments i, in order of their rows."""

    dtype: str
    global_shape: tuple[int, ...]
    offsets: npt.NDArray[np.int64]
    shapes: npt.NDArray[np.int64]
    segments: list[list[Segment]]


class HuggingFaceSource(Source):
    """See Source. Its temporary directory is removed by close().

    Args:
        transformer_impl: of the training run, as Megatron names it; before experts, the norm's key depends on
            it.

    Raises:
        UnsupportedFormatError: the architecture is not known.
        NotACheckpointError: the folder has no config.json or no safetensors files.
        FormatError, StorageError: a file is damaged, missing or truncated, or is another model's.
    """

    format = "huggingface"

    def __init__(self, directory: Path, transformer_impl: str = TRANSFORMER_ENGINE) -> None:
        super().__init__(directory)
        config = read_config_json(directory)
        try:
            self.family, self.arguments = read_config(config)
        except (FormatError, UnsupportedFormatError) as error:
            raise type(error)(f"{directory}: {error}") from error
        self._stored = find_tensors(directory)
        self._impl = transformer_impl
        self._require_enough()
        table = list(entries(self.family.model_type, self.arguments))
        self._require_no_others(table)
        self._require_one_embedding(table)
        self.tensors: dict[str, MegatronTensor] = self._megatron_tensors(table)
        self._objects = sorted({key for place, _ in table for key in self._extra_states(place)})
        # Last: a folder that is refused leaves nothing to remove.
        self._made = tempfile.TemporaryDirectory(prefix="datastates-import-")  # holds the common state
        try:
            self._write_common(Path(self._made.name, COMMON_FILE))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Removes the temporary directory; the source cannot be read any more."""
        self._made.cleanup()

    def _write_common(self, path: Path) -> None:
        """Writes what Megatron reads before it loads weights; each of its releases reads it from a file."""
        args = namespace(self.arguments)
        args.transformer_impl = self._impl
        common = {
            "args": args,
            "checkpoint_version": 3.0,  # the order of queries, keys and values
            "content_metadata": {"singleton_local_shards": False},
            "iteration": 0,
        }
        torch.save(common, path)

    def _require_enough(self) -> None:
        """Raises FormatError for fewer tensors than layers and experts: the table has a row for each."""
        a = self.arguments
        least = a.num_layers + sum(a.has_experts) * (a.num_experts or 0)
        if len(self._stored) < least:
            raise FormatError(
                f"{self.directory} lacks tensors: it has {len(self._stored)}, and config.json asks for at "
                f"least {least}"
            )

    def _require_no_others(self, table: Sequence[Entry]) -> None:
        known = {rows.name for _, made in table for rows in made}
        if not self.arguments.untie_embeddings_and_output_weights:
            known.add(_OUTPUT)
        known |= {self._unprefixed(name) for name in known}
        others = sorted(name for name in self._stored if name not in known and not _BUFFERS.search(name))
        if others:
            some = ", ".join(map(repr, others[:_MOST_NAMED]))
            raise FormatError(
                f"{self.directory} has {len(others)} tensors that {self.family.model_type} lacks, such as "
                f"{some}"
            )

    def _require_one_embedding(self, table: Sequence[Entry]) -> None:
        """Raises FormatError if embedding and output are one in config.json and differ in the files."""
        output = self._stored.get(_OUTPUT)
        if output is None or self.arguments.untie_embeddings_and_output_weights:
            return
        rows = next(made[0] for place, made in table if EMBEDDING in place.names)
        embedding = self._stored.get(rows.name) or self._stored.get(self._unprefixed(rows.name))
        if embedding is not None and not _is_same(output, embedding):
            raise FormatError(
                f"{self.directory}: {_OUTPUT!r} differs from {rows.name!r}, but config.json says that they "
                "are one: set tie_word_embeddings to false there, or remove the former if it is left over"
            )

    @staticmethod
    def _unprefixed(name: str) -> str:
        """Returns the name that GPT-2's first files have."""
        return name.removeprefix("transformer.")

    def _megatron_tensors(self, table: Sequence[Entry]) -> dict[str, MegatronTensor]:
        parts: dict[str, list[tuple[Box, list[Segment]]]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for place, made in table:
            key, before = self._key(place)
            shapes[key] = (*(count for _, count in before), *place.shape)
            offset = (*(number for number, _ in before), *(0 for _ in place.shape))
            shape = (*(1 for _ in before), *place.shape)
            parts.setdefault(key, []).append(((offset, shape), self._segments(place, made)))
        return {key: self._tensor(key, shapes[key], found) for key, found in parts.items()}

    def _key(self, place: Place) -> tuple[str, list[tuple[int, int]]]:
        """Returns a place's key, and (number, count) for each axis before its own, as Megatron asks."""
        if place.layer is None:
            return place.names[0], []
        name = place.names[0]
        if self._impl == LOCAL:
            name = next((one for one in place.names if ".layer_norm_" in one), name)
        experts = [] if place.expert is None else [(place.expert, self.arguments.num_experts or 0)]
        if len(set(self.arguments.has_experts)) > 1:  # then layers have keys of their own
            return f"{LAYERS}{place.layer}.{name}", experts
        return f"{LAYERS}{name}", [(place.layer, self.arguments.num_layers), *experts]

    def _extra_states(self, place: Place) -> Iterator[str]:
        """Yields the keys of extra states of a place's module, which a load asks for; all are None."""
        key, before = self._key(place)
        te = self._impl == TRANSFORMER_ENGINE
        found = _LINEAR.fullmatch(key) or (_NORM.fullmatch(key) if te else None)
        modules = [found["module"]] if found else []
        if te and key.endswith("self_attention.linear_proj.weight"):
            modules.append(key.replace("self_attention.linear_proj.weight", _ATTENTION))
        numbers, counts = zip(*(before or [(0, 1)]), strict=True)
        for module in modules:
            yield f"{module}._extra_state/shard_{'.'.join(map(str, numbers))}_{'.'.join(map(str, counts))}"

    def _segments(self, place: Place, parts: Sequence[Rows]) -> list[Segment]:
        segments = []
        for rows in parts:
            stored, at = self._find(rows, place), 0
            for begin, count in rows.runs:
                segments.append(Segment(begin, count, stored, at, rows.transposed))
                at += count
        segments.sort(key=lambda segment: segment.begin)
        ends = [0, *(segment.begin + segment.rows for segment in segments)]
        starts = [*(segment.begin for segment in segments), place.shape[0]]
        assert ends == starts, f"{place.names[0]}: the table does not name each row once"
        return segments

    def _find(self, rows: Rows, place: Place) -> Stored:
        stored = self._stored.get(rows.name) or self._stored.get(self._unprefixed(rows.name))
        if stored is None:
            raise FormatError(f"{self.directory} lacks {rows.name!r}, which its config.json asks for")
        if stored.dtype not in FLOATS:
            raise FormatError(
                f"{self.directory}: {rows.name!r} has dtype {stored.dtype}, expected one of "
                f"{', '.join(FLOATS)}"
            )
        shape = (sum(count for _, count in rows.runs), *place.shape[1:])
        shape = shape[::-1] if rows.transposed else shape
        if stored.shape != shape:
            raise FormatError(
                f"{self.directory}: {rows.name!r} has shape {list(stored.shape)}, but config.json asks for "
                f"{list(shape)}"
            )
        return stored

    def _tensor(
        self, key: str, shape: tuple[int, ...], parts: Sequence[tuple[Box, list[Segment]]]
    ) -> MegatronTensor:
        dtypes = {segment.stored.dtype for _, segments in parts for segment in segments}
        if len(dtypes) > 1:
            raise FormatError(
                f"{self.directory}: the parts of Megatron's {key!r} have several dtypes: "
                f"{', '.join(sorted(dtypes))}"
            )
        offsets, shapes = zip(*(box for box, _ in parts), strict=True)
        segments = [found for _, found in parts]
        return MegatronTensor(
            dtypes.pop(), shape, np.array(offsets, np.int64), np.array(shapes, np.int64), segments
        )

    @property
    def objects(self) -> Sequence[str]:
        return self._objects

    def read_metadata(self) -> dict[str, Any]:
        return {}  # a file of this name in the folder is not Megatron's

    @property
    def other_files(self) -> Sequence[str]:
        return [COMMON_FILE]

    @property
    def other_directories(self) -> Sequence[str]:
        return []

    def other_path(self, name: str) -> Path:
        return Path(self._made.name, name)

    def _reused_files(self) -> Iterable[Path]:
        return sorted({stored.path for stored in self._stored.values()})

    def read_tensor(
        self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        entry = self._found(self.tensors, "tensor", key)
        offset, shape = checked_slice(key, entry.global_shape, offset, shape)
        dtype = torch_dtype(entry.dtype, key)
        target = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        boxes = zip(entry.offsets.tolist(), entry.shapes.tolist(), strict=True)
        for number, (begin, lengths) in enumerate(boxes):
            common = intersect(begin, lengths, offset, shape)
            if common is not None:
                window = np.empty(math.prod(lengths) * dtype.itemsize, np.uint8)
                self.read_ranges([FragmentRange(key, number, 0, len(window), 0)], window)
                whole = torch.from_numpy(window).view(dtype).reshape(lengths)
                target[slices_of(common, offset)] = whole[slices_of(common, begin)]
        return target

    def read_ranges(self, ranges: Sequence[FragmentRange], window: npt.NDArray[np.uint8]) -> None:
        for key, number, begin, size, at in ranges:
            entry = self.tensors[key]
            for segment in entry.segments[number]:
                first = segment.begin * segment.row_bytes
                low, high = max(begin, first), min(begin + size, first + segment.rows * segment.row_bytes)
                if low < high:
                    segment.read_into(low - first, window[at + low - begin : at + high - begin])

    def read_object(self, key: str) -> bytes:
        if key not in self._objects:
            raise MissingKeyError(f"{self.directory} contains no object {key!r}")
        return ObjectSource(key, [None]).serialize()

    def stored_by_rank(self) -> list[RankContents]:
        every = [(key, n) for key, one in self.tensors.items() for n in range(len(one.segments))]
        return [RankContents(every, self._objects)]

    def require_files(self) -> None:
        """Does nothing: the constructor has checked the sizes of all files."""


def _is_same(one: Stored, other: Stored) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    for begin in range(0, one.bytes, _BLOCK_BYTES):
        blocks = [np.empty(min(_BLOCK_BYTES, one.bytes - begin), np.uint8) for _ in range(2)]
        one.read_into(begin, blocks[0])
        other.read_into(begin, blocks[1])
        if not np.array_equal(blocks[0], blocks[1]):
            return False
    return True
