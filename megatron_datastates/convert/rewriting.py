"""The data files of a checkpoint that is rewritten in its own directory: what each holds, and its index.

One class for each format. What belongs here: writing files that hold a part of what others hold, and the
index that names them. What does not: in which order that is safe (weights_only.py).
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import msgspec

from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.sinks.datastates import DataStatesSink, WrittenFile, engine_options
from megatron_datastates.convert.sinks.sink import Progress
from megatron_datastates.convert.sinks.torch_dist import Written, encode_index
from megatron_datastates.convert.sources.datastates import DataStatesSource
from megatron_datastates.convert.sources.dcp_index import Record, records_of
from megatron_datastates.convert.sources.pickles import load_metadata
from megatron_datastates.convert.sources.source import RankContents, Source
from megatron_datastates.convert.sources.torch_dist import TorchDistSource
from megatron_datastates.convert.uploads import upload_files
from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import OptionError, StorageError
from megatron_datastates.files import (
    MANIFEST_BYTES,
    Status,
    is_object,
    names_in,
    open_regular,
    read_regular,
    status_of,
)
from megatron_datastates.format.directory import OPTIMIZER_MAPS_NAME, TORCH_DIST_INDEX
from megatron_datastates.format.index import Index
from megatron_datastates.format.manifest import DROPPED, Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.publishing.documents import releases
from megatron_datastates.pipeline.publishing.layouts import merge_layouts
from megatron_datastates.pipeline.publishing.presence import missing_files

_COPIED_BYTES = 8 << 20  # of a file, in one go
_FIRST_NEW = 1000  # of a rank's new files: a save by DCP numbers its few files from 0, and reuses those names
_DCP_FILE = re.compile(r"__(\d{1,9})_(\d{1,9})\.distcp", re.ASCII)


class Rewriting(ABC):
    """The files of one checkpoint, before and after.

    Attributes:
        names: of the data files.
        contents: what each of them holds, in the order of `names`.
        beside: names of files that say nothing right about what is rewritten.
        is_sent: the new index was about to be put in place. If that failed, the old one may be there; in an
            object store also for a while, because a request that has failed may still be carried out.
    """

    names: list[str]
    contents: list[RankContents]
    beside: list[str]
    is_sent: bool = False

    @abstractmethod
    def new_name(self, number: int) -> str:
        """Returns the name of the file that takes the place of file `number`."""

    def begin(self, limits: Limits, files: int) -> None:  # noqa: B027 - not each has something to begin
        """Prepares to write this many files. Each begun is closed."""

    @abstractmethod
    def write(self, number: int, kept: RankContents) -> Any:
        """Writes the file that takes the place of file `number`, durably; returns what `publish` needs."""

    @abstractmethod
    def publish(self, written: Mapping[int, Any], same: Collection[int], faults: Faults) -> None:
        """Replaces the index: it names the written files by number, and those that stay the same.

        Raises:
            StorageError: something has saved into the directory since it was read.
        """

    @abstractmethod
    def _require_unchanged(self) -> None:
        """Raises StorageError if something has saved into the directory since it was read."""

    def _note_sent(self) -> None:
        self._require_unchanged()  # once more: the new index was synced meanwhile
        self.is_sent = True

    def close(self) -> None:  # noqa: B027 - not each has something to close
        """Ends what `write` has begun."""


def rewriting_of(
    source: Source,
    save_id: SaveId,
    progress: Progress = lambda bytes_done: None,
    folder: Path | None = None,
    seen: Mapping[str, Status | None] = MappingProxyType({}),
) -> Rewriting:
    """Returns the files of a checkpoint. Raises OptionError for a format that is only read.

    Args:
        seen: the files in the directory before it was read, of a checkpoint in a file system.
        folder: where files are made that are uploaded, of a checkpoint in an object store.
    """
    if isinstance(source, DataStatesSource):
        return _OwnFiles(source, save_id, progress, folder or source.directory)
    if isinstance(source, TorchDistSource):
        return _DcpFiles(source, save_id, progress, seen)
    raise OptionError(f"{source.directory} has format {source.format}: convert it first")


def names_in_index(directory: Path, format: str) -> set[str]:
    """Returns the names of the files that a checkpoint's index names. Raises DataStatesError, OSError."""
    if format == TorchDistSource.format:
        path = directory / TORCH_DIST_INDEX
        found = records_of(load_metadata(path), path).values()
        return {record.file for records in found for record in records.values()}
    path = directory / MANIFEST_NAME
    return Manifest.decode(read_regular(path, MANIFEST_BYTES), str(path)).names


class _OwnFiles(Rewriting):
    """A file that stays the same keeps its name, so other checkpoints may go on sharing it."""

    def __init__(self, source: DataStatesSource, save_id: SaveId, progress: Progress, folder: Path) -> None:
        self._source, self._save_id, self._progress, self._folder = source, save_id, progress, folder
        self._old = source.checkpoint.manifest
        self.names = [file.name for file in self._old.files]
        self.beside = [self._old.index.name]
        self.contents = source.stored_by_file()
        self._sink: DataStatesSink | None = None

    def new_name(self, number: int) -> str:
        entry = self._old.files[number]
        return self._save_id.data_file_name(entry.rank, entry.group)

    def begin(self, limits: Limits, files: int) -> None:
        self._sink = DataStatesSink(
            self._source,
            self._folder,
            limits.window_bytes(files),
            self._progress,
            save_id=self._save_id,
            world_size=self._old.world_size,
            options=engine_options(limits.staging_bytes),
        )

    def write(self, number: int, kept: RankContents) -> WrittenFile:
        assert self._sink is not None, "begin was called"
        entry = self._old.files[number]
        return self._sink.write(entry.rank, kept, entry.group)

    def publish(self, written: Mapping[int, WrittenFile], same: Collection[int], faults: Faults) -> None:
        files = {n: written[n] if n in written else self._same(n) for n in sorted([*written, *same])}
        merged = merge_layouts((file.entry.rank, file.own_index) for file in files.values())
        entry = msgspec.structs.replace(merged.entry, name=self._save_id.index_file_name(merged.entry.sha256))
        index = Index.decode(merged.encoded, entry.name, len(files))
        keys = {*index.tensors, *index.objects, *index.streams}
        manifest = msgspec.structs.replace(
            self._old,
            run_id=f"{self._save_id.run_id:016x}",
            ordinal=self._save_id.ordinal,
            rewritten=str(self._old.original_save_id),
            index=entry,
            files=[file.entry for file in files.values()],
            providers=[one for one in self._old.providers if self._is_of_any(one.name, keys)],
            writer={**releases(), "optimizer": DROPPED},
        )
        directory = self._source.directory
        if self._folder != directory:
            upload_files(self._folder, directory, manifest, [file.entry for file in written.values()])
        write_whole(directory / entry.name, merged.encoded, faults, self._save_id)
        faults.point("publish weights")
        self._require_unchanged()
        if not is_object(directory):
            _refuse_gone(directory, missing_files(directory, manifest))
        path = directory / MANIFEST_NAME
        write_whole(path, manifest.encode(), faults, self._save_id, before_rename=self._note_sent)

    def _require_unchanged(self) -> None:
        """Raises StorageError if something has published into the directory since it was read."""
        path = self._source.directory / MANIFEST_NAME
        if Manifest.decode(read_regular(path, MANIFEST_BYTES), str(path)).save_id != self._old.save_id:
            raise StorageError(f"{path.parent} was not rewritten: a save has published into it meanwhile")

    def _is_of_any(self, name: str, keys: Collection[str]) -> bool:
        return any((found := self._old.provider_of(key)) is not None and found.name == name for key in keys)

    def _same(self, number: int) -> WrittenFile:
        entry, checkpoint = self._old.files[number], self._source.checkpoint
        named = msgspec.structs.replace(entry, save_id=str(self._old.file_save_id(entry)))
        version = checkpoint.footer(number).format_version
        return WrittenFile(named, checkpoint.index.own_index(number, version))

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()


class _DcpFiles(Rewriting):
    """Archives and objects are copied as they are, to other places."""

    def __init__(
        self,
        source: TorchDistSource,
        save_id: SaveId,
        progress: Progress,
        seen: Mapping[str, Status | None],
    ) -> None:
        self._source, self._save_id, self._progress, self._seen = source, save_id, progress, seen
        places: dict[str, list[tuple[Record, str, int | None]]] = defaultdict(list)
        for key, number, record in source.records():
            places[record.file].append((record, key, number))
        self.names = sorted(places)
        self._places = [sorted(places[name], key=lambda one: one[0].offset) for name in self.names]
        self.contents = [
            RankContents(
                [(key, n) for _, key, n in place if n is not None],
                [key for _, key, n in place if n is None],
            )
            for place in self._places
        ]
        self.beside = [OPTIMIZER_MAPS_NAME]
        self._new_names = _new_names(self.names, os.listdir(source.directory))

    def new_name(self, number: int) -> str:
        return self._new_names[number]

    def write(self, number: int, kept: RankContents) -> Written:
        wanted, name = {*kept.fragments, *((key, None) for key in kept.objects)}, self.new_name(number)
        written: Written = []
        directory = self._source.directory
        with open_regular(directory / self.names[number]) as old, (directory / name).open("xb") as new:
            for record, key, n in self._places[number]:
                if (key, n) in wanted:
                    written.append((key, n, Record(name, new.tell(), record.bytes)))
                    self._copy(old, record, new)
            new.flush()
            os.fsync(new.fileno())
        return written

    def _copy(self, old: BinaryIO, record: Record, new: BinaryIO) -> None:
        old.seek(record.offset)
        for begin in range(0, record.bytes, _COPIED_BYTES):
            size = min(_COPIED_BYTES, record.bytes - begin)
            data = old.read(size)
            if len(data) != size:
                raise StorageError(
                    f"{self._source.directory / record.file} is truncated: it has fewer than "
                    f"{record.offset + record.bytes} bytes"
                )
            new.write(data)
            self._progress(size)

    def publish(self, written: Mapping[int, Written], same: Collection[int], faults: Faults) -> None:
        parts = [[(key, n, record) for record, key, n in self._places[file]] for file in same]
        parts += [written[file] for file in written]
        kept = {key for part in parts for key, n, _ in part if n is not None}
        tensors = {key: entry for key, entry in self._source.tensors.items() if key in kept}
        index = encode_index(tensors, parts, self._source.dcp_facts)
        directory = self._source.directory
        faults.point("publish weights")
        self._require_unchanged()
        _refuse_gone(directory, set(map(self.new_name, written)).difference(names_in(directory)))
        path = directory / TORCH_DIST_INDEX
        write_whole(path, index, faults, self._save_id, before_rename=self._note_sent)

    def _require_unchanged(self) -> None:
        """Raises StorageError if a save, which uses the same names again, has written to what was read."""
        directory = self._source.directory
        for name in (TORCH_DIST_INDEX, *self.names):
            if status_of(directory / name) != self._seen.get(name):
                raise StorageError(f"{directory} was not rewritten: a save has written {name} meanwhile")


def _refuse_gone(directory: Path, gone: Collection[str]) -> None:
    """Raises StorageError for files that were written: a file system without locks lets two calls rewrite."""
    if gone:
        raise StorageError(
            f"{directory} was not rewritten: {min(gone)} is gone: another call may be rewriting it"
        )


def _new_names(names: Sequence[str], existing: Collection[str]) -> list[str]:
    """Returns a name for each file that none has yet: of the same rank, as DCP numbers a rank's files."""
    taken, new_names = set(existing) | set(names), []
    for name in names:
        match = _DCP_FILE.fullmatch(name)
        rank, number = match[1] if match else "0", _FIRST_NEW
        while f"__{rank}_{number}.distcp" in taken:
            number += 1
        new_names.append(f"__{rank}_{number}.distcp")
        taken.add(new_names[-1])
    return new_names
