"""An open checkpoint: what is in it, and reading it into host memory, checked.

Belongs here: opening one, and what others ask of it, by key. Does not belong here: which file bytes come from
(data_files.py); which bytes make up a slice of a tensor (slices.py).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_datastates.config import Options
from megatron_datastates.engine.reader import Reader, read_small
from megatron_datastates.errors import CorruptDataError, FormatError, MissingKeyError, StorageError
from megatron_datastates.files import OBJECT_BYTES, path_of
from megatron_datastates.format.index import Index
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.tail import TailEntry
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.pipeline.loading.data_files import DataFiles
from megatron_datastates.pipeline.loading.entries import ObjectReads, plan_object, read_stream
from megatron_datastates.pipeline.loading.slices import plan_new
from megatron_datastates.pipeline.runs.opening import is_another, open_index, read_manifest
from megatron_datastates.pipeline.runs.runs import require_counts

if TYPE_CHECKING:
    import torch


class Checkpoint(DataFiles):
    """A published checkpoint: its data files, and what is in them by key."""

    def __init__(self, directory: Path, manifest: Manifest, index: Index, options: Options) -> None:
        super().__init__(directory, manifest, index, options)
        self.rounded: dict[str, str] = {}  # "float32 as bfloat16", by the key of a tensor that was loaded so

    @classmethod
    def open(
        cls, directory: str | os.PathLike[str], options: Options | None = None, *, reuse: bool = True
    ) -> Checkpoint:
        """Reads the manifest and the index's directory, nothing else.

        Args:
            reuse: what another open checkpoint has read of an index with the same bytes is not read again.

        Raises:
            NotACheckpointError: there is no manifest, or DCP has saved a checkpoint in its place.
            FormatError, UnsupportedFormatError, StorageError: it, or the index, cannot be used.
        """
        begin = time.perf_counter()
        path = path_of(directory)
        manifest = read_manifest(path)
        require_counts(path)
        while True:
            try:
                index = open_index(path / manifest.index.name, manifest, reuse)
                checkpoint = cls(path, manifest, index, options or Options.from_environment())
                checkpoint.costs.opening = time.perf_counter() - begin
                return checkpoint
            except (StorageError, FormatError):
                # A save into this directory, or a removal of keys, may have replaced both meanwhile.
                before, manifest = manifest, read_manifest(path)
                if not is_another(manifest, before):
                    raise

    def __repr__(self) -> str:
        counts = f"{len(self.tensors)} tensors, {len(self.objects)} objects, {len(self.streams)} streams"
        return f"<Checkpoint {self.directory}: {counts}>"

    # -- what there is ----------------------------------------------------------------------------------

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Global tensors by key: `dtype`, `global_shape`, and where their fragments lie."""
        return self.index.tensors

    @property
    def objects(self) -> list[str]:
        """Keys of the objects."""
        return list(self.index.objects)

    @property
    def streams(self) -> list[str]:
        """Keys of the streams."""
        return list(self.index.streams)

    # -- reading ----------------------------------------------------------------------------------------

    def read_tensor(
        self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Returns a slice of a global tensor (all of it by default), in host memory, in its stored dtype.

        Raises:
            MissingKeyError: no such tensor.
            MismatchError: the slice leaves the tensor.
            FormatError: the checkpoint holds only a part of it.
        """
        return self.read_tensors([(key, offset, shape)])[0]

    def read_tensors(
        self,
        slices: Iterable[tuple[str, Sequence[int] | None, Sequence[int] | None]],
        reader: Reader | None = None,
    ) -> list[torch.Tensor]:
        """Reads slices, each (key, offset, shape), in one pass: a block that they share is read once.

        Args:
            reader: with memory from earlier reads.
        """
        targets, scheduled = [], []
        with self.costs.timing("planning"):
            for key, offset, shape in slices:
                target, reads = plan_new(self, key, offset, shape)
                targets.append(target)
                scheduled += reads
        self.read(scheduled, reader)
        return targets

    def read_objects(self, keys: Iterable[str]) -> dict[str, Any]:
        """Returns objects, unpickled with an allow list of names (providers/objects.py).

        Raises:
            MissingKeyError: no such object.
            FormatError: an object is not accepted, or is not where the index says.
        """
        objects = self.plan_objects(keys)
        self.read(objects.scheduled)
        return objects.values()

    def read_object_bytes(self, key: str) -> bytes:
        """Returns an object as it is stored: the bytes that torch.save wrote."""
        objects = self.plan_objects([key])
        self.read(objects.scheduled)
        return objects.stored(key)

    def open_stream(self, key: str) -> Iterator[memoryview]:
        """Yields the bytes of a stream in buffers of at most 16 MiB, checked.

        Raises:
            MissingKeyError: no such stream.
            CorruptDataError: a checksum differs; the SHA-256 of the whole stream is compared at its end.
        """
        file, entry = self.stream_entry(key)
        reader = self.new_reader()
        return read_stream(lambda reads: self.read(reads, reader), file, entry)

    def plan_objects(self, keys: Iterable[str]) -> ObjectReads:
        """Plans the reads of `read_objects`. Raises as it does, but for objects that are not plain data."""
        files = {key: self._object_file(key) for key in keys}
        self.require(files.values())
        buffers, scheduled, entries = {}, [], {}
        for key, file in files.items():
            _, entries[key] = self.object_entry(key)
            buffers[key], read = plan_object(file, entries[key])
            scheduled.append(read)
        return ObjectReads(buffers, scheduled, entries, self._options.trust_objects)

    def read_other(self, name: str) -> bytes:
        """Returns the bytes of a file that others wrote and that belongs to the checkpoint.

        Raises:
            MissingKeyError: the manifest names no such file.
            CorruptDataError: it is not the file that was there when the checkpoint was published.
        """
        entries = [entry for entry in self.manifest.others if entry.name == name]
        if not entries:
            raise MissingKeyError(f"there is no file {name!r} in the checkpoint {self.directory}")
        data = read_small(self.directory / name, OBJECT_BYTES)
        if len(data) != entries[0].bytes or hashlib.sha256(data).hexdigest() != entries[0].sha256:
            raise CorruptDataError(
                f"{self.directory / name} is not the file that was saved: its SHA-256 differs"
            )
        return data

    def read_object(self, key: str) -> Any:
        """Returns one object. Raises as `read_objects`."""
        return self.read_objects([key])[key]

    def read_other_object(self, name: str) -> Any:
        """Returns the object in a whole file of torch.save's. Raises as `read_other` and `read_objects`."""
        return self.decode_object(name, self.read_other(name))

    def decode_object(self, key: str, stored: bytes) -> Any:
        """Returns the object that torch.save wrote as these bytes. FormatError: it is not accepted."""
        from megatron_datastates.providers.objects import deserialize

        return deserialize(stored, key, trust=self._options.trust_objects)

    def object_entry(self, key: str) -> tuple[int, TailEntry]:
        """Returns an object's data file and its entry in the footer. Raises as `read_objects`."""
        file = self._object_file(key)
        return file, self._entry(file, self.footer(file).objects, key, "object")

    def _object_file(self, key: str) -> int:
        if key not in self.index.objects:
            raise self.index.missing("object", key, str(self.directory))
        return self.index.objects[key]

    def stream_entry(self, key: str) -> tuple[int, TailEntry]:
        """Returns a stream's data file and its entry in the footer. Raises as `open_stream`."""
        if key not in self.index.streams:
            raise self.index.missing("stream", key, str(self.directory))
        file = self.index.streams[key]
        return file, self._entry(file, self.footer(file).streams, key, "stream")

    def _entry(self, file: int, entries: Mapping[str, TailEntry], key: str, what: str) -> TailEntry:
        if key not in entries:
            raise FormatError(f"{self.file_path(file)} does not hold {what} {key!r}, as the index says")
        return entries[key]
