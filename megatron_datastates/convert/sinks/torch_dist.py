"""Writes `--ckpt-format torch_dist` as DCP's FileSystemWriter does, with no whole tensor in memory."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import io
import itertools
import os
import pickle
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_datastates.config import MIB, Options
from megatron_datastates.convert.optimizer_maps import encode_maps
from megatron_datastates.convert.sinks.sink import Progress, Sink, stream_fragments, write_synced
from megatron_datastates.convert.sources.archives import write_archive
from megatron_datastates.convert.sources.dcp_index import Record
from megatron_datastates.convert.sources.source import RankContents, Source, SourceTensor
from megatron_datastates.convert.sources.torch_dist import TorchDistSource
from megatron_datastates.dcp.facts import Facts
from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.engine.staging import StagingEngine
from megatron_datastates.engine.streaming import SequentialFile
from megatron_datastates.format.directory import (
    COMMON_FILE,
    COMMON_STATE_KEY,
    OPTIMIZER_MAPS_NAME,
    TORCH_DIST_INDEX,
)
from megatron_datastates.format.values import is_optimizer_map
from megatron_datastates.pipeline.loading.dtypes import torch_dtype

_BUFFER_BYTES = 8 * MIB  # of each file that is being written
Written = list[tuple[str, int | None, Record]]  # key and number of each fragment; number None for an object


class TorchDistSink(Sink):
    """See Sink. Writes optimizer maps to a file of their own (optimizer_maps.py)."""

    format = TorchDistSource.format

    def __init__(
        self, source: Source, directory: Path, window_bytes: int, progress: Progress, *, options: Options
    ) -> None:
        # Its checksums would go nowhere: archives have their own.
        engine = StagingEngine(dataclasses.replace(options, checksums=False))
        super().__init__(source, directory, engine, window_bytes, progress)

    def write(self, number: int, contents: RankContents) -> Written:
        name = f"__{number}_0.distcp"
        path, written = self.directory / name, list[tuple[str, int | None, Record]]()
        reserved = sum(self.source.fragment(*one).bytes for one in contents.fragments)
        file = SequentialFile(self._engine, path, reserved, _BUFFER_BYTES)
        try:
            for key in contents.objects:
                if not is_optimizer_map(key):
                    begin = file.tell()
                    file.write(self.source.read_object(key))
                    written.append((key, None, Record(name, begin, file.tell() - begin)))
            self._write_fragments(file, contents, name, written)
            file.finish()
        except BaseException:  # including an interrupt
            file.remove()
            raise
        _forget(path)
        return written

    def _write_fragments(
        self, file: SequentialFile, contents: RankContents, name: str, written: Written
    ) -> None:
        window = np.empty(self.window_bytes, np.uint8)
        with contextlib.closing(stream_fragments(self.source, contents.fragments, window)) as parts:
            for (key, number), group in itertools.groupby(parts, key=lambda part: part[0][:2]):
                fragment, begin = self.source.fragment(key, number), file.tell()
                write_archive(file, fragment.dtype, fragment.shape, (view for _, view in group))
                written.append((key, number, Record(name, begin, file.tell() - begin)))
                self.progress(fragment.bytes)

    def publish(self, written: Sequence[Written]) -> None:
        index = encode_index(self.source.tensors, written, self.source.dcp_facts)
        write_synced(self.directory / TORCH_DIST_INDEX, index)
        maps = {key: self.source.read_object(key) for key in filter(is_optimizer_map, self.source.objects)}
        if maps:
            write_synced(self.directory / OPTIMIZER_MAPS_NAME, encode_maps(maps, index))
        if not self._is_of_dcp():
            self.write_metadata()
        sync_directory(self.directory)

    def _is_of_dcp(self) -> bool:
        """Returns whether DCP saved it, as for Megatron-FSDP: metadata.json would say that Megatron did."""
        facts, source = self.source.dcp_facts, self.source
        has_common = COMMON_FILE in source.other_files or COMMON_STATE_KEY in source.objects
        return facts is not None and facts.planner_data is not None and not has_common


def _forget(path: Path) -> None:
    """Lets verification read from the disk, where the file was not written directly, and is in memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def encode_index(
    tensors: Mapping[str, SourceTensor], written: Iterable[Written], facts: Facts | None
) -> bytes:
    """Returns the bytes of `.metadata` for these tensors, and for the objects that were written.

    Args:
        facts: of the nesting and the tensors' properties of this state, or of a larger one.
    """
    records = {(key, number): record for part in written for key, number, record in part}
    entries = {key: _tensor_metadata(key, entry, facts or Facts()) for key, entry in tensors.items()}
    objects = {key: BytesStorageMetadata() for key, number in records if number is None}
    metadata = Metadata(
        entries | objects,
        planner_data=_planner_data(facts, entries.keys() | objects.keys()),
        storage_data=_storage_data(records, entries),
        storage_meta=StorageMeta(checkpoint_id=None, save_id=str(uuid.uuid4())),
    )
    if hasattr(filesystem, "CURRENT_DCP_VERSION"):  # not so in torch 2.6
        metadata.version = filesystem.CURRENT_DCP_VERSION
    file = io.BytesIO()
    _Pickler(file).dump(metadata)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Leaves out the strides that torch 2.15 adds to properties: older releases could not read them."""

    def reducer_override(self, value: object) -> Any:
        if type(value) is not TensorProperties:
            return NotImplemented
        return copyreg.__newobj__, (TensorProperties,), value.__getstate__()[:5]  # type: ignore[attr-defined]


def _planner_data(facts: Facts | None, keys: Set[str]) -> Any:
    data = None if facts is None else facts.planner_data
    return {key: path for key, path in data.items() if key in keys} if isinstance(data, dict) else data


def _storage_data(
    records: dict[tuple[str, int | None], Record], entries: dict[str, TensorStorageMetadata]
) -> dict[MetadataIndex, _StorageInfo]:
    """Returns DCP's records by key and offset.

    Of fragments with the same offset at most one has elements; that one is recorded.
    """
    found: dict[MetadataIndex, _StorageInfo] = {}
    for (key, number), record in sorted(records.items(), key=lambda item: _is_empty(entries, *item[0])):
        found.setdefault(_index(key, number, entries), _StorageInfo(record.file, record.offset, record.bytes))
    return found


def _is_empty(entries: dict[str, TensorStorageMetadata], key: str, number: int | None) -> bool:
    return number is not None and 0 in entries[key].chunks[number].sizes


def _tensor_metadata(key: str, entry: SourceTensor, facts: Facts) -> TensorStorageMetadata:
    boxes = zip(entry.offsets.tolist(), entry.shapes.tolist(), strict=True)
    chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in boxes]
    properties = TensorProperties(dtype=torch_dtype(entry.dtype, key))
    facts.complete(properties, key)
    return TensorStorageMetadata(properties, torch.Size(entry.global_shape), chunks)


def _index(key: str, number: int | None, entries: dict[str, TensorStorageMetadata]) -> MetadataIndex:
    return (
        MetadataIndex(key)
        if number is None
        else MetadataIndex(key, entries[key].chunks[number].offsets, number)
    )
