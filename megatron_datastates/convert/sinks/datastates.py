"""Writes the datastates format with the engine that saves use, so that the files are those of a save."""

from __future__ import annotations

import dataclasses
import datetime
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_datastates.config import MIB, Options
from megatron_datastates.convert.sinks.sink import Bytes, Progress, Sink
from megatron_datastates.convert.sources.source import FragmentRange, RankContents, Source
from megatron_datastates.convert.stored_arguments import parallel_sizes, training_arguments
from megatron_datastates.dcp.facts import Facts
from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.engine.staging import StagingEngine
from megatron_datastates.engine.streaming import StreamedFile
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.directory import BACKEND, COMMON_FILE, iteration_in_name
from megatron_datastates.format.features import COMPATIBLE_CHECKSUMS
from megatron_datastates.format.footer import TRAILER_BYTES, Footer, decode_trailer
from megatron_datastates.format.header import HEADER_BYTES, Header
from megatron_datastates.format.manifest import FileEntry, Manifest
from megatron_datastates.format.tail import NOT_RECORDED, Kind, TailEntry
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.publishing.documents import releases
from megatron_datastates.pipeline.publishing.layouts import merge_layouts
from megatron_datastates.pipeline.publishing.presence import other_file_entry
from megatron_datastates.plan.layout import Layout, TailItem, align_up, place_objects, plan_layout
from megatron_datastates.providers.objects import check_stored

_MOST_NAMED_BYTES = 64 * MIB  # of another file that the manifest names: whoever checks one holds it in memory


class WrittenFile(NamedTuple):
    """A durable data file, and the index of its own tensors."""

    entry: FileEntry
    own_index: bytes


class _Placed(NamedTuple):
    """The place of a fragment, an object or a stream in a data file."""

    key: str
    number: int  # of a fragment
    offset: int
    size: int
    kind: Kind = Kind.FRAGMENT


class _Stream:
    """A stream of the source that is read piece by piece, in order."""

    def __init__(self, buffers: Iterator[memoryview]) -> None:
        self._buffers, self._rest = buffers, memoryview(b"")

    def fill(self, view: Bytes) -> None:
        """Reads as many bytes as `view` has; checks the whole stream once its last byte is read."""
        at = 0
        while at < len(view):
            self._rest = self._rest or next(self._buffers)
            part = self._rest[: len(view) - at]
            view[at : at + len(part)] = part
            at, self._rest = at + len(part), self._rest[len(part) :]

    def close(self) -> None:
        """Checks what is checked at the end of a stream."""
        for _ in self._buffers:
            raise AssertionError("the stream is longer than its entry says")


def engine_options(staging_bytes: int) -> Options:
    """Returns the options of an engine that writes within this much staging memory."""
    return dataclasses.replace(Options.from_environment(), staging_memory=staging_bytes, slot_size=MIB)


class DataStatesSink(Sink):
    """See Sink.

    Args:
        save_id, world_size: the same in all processes that write files of this checkpoint.
    """

    format = BACKEND

    def __init__(
        self,
        source: Source,
        directory: Path,
        window_bytes: int,
        progress: Progress,
        *,
        save_id: SaveId,
        world_size: int,
        options: Options,
    ) -> None:
        engine = StagingEngine(options)
        super().__init__(source, directory, engine, align_up(window_bytes, engine.slot_bytes), progress)
        self._save_id, self._world_size = save_id, world_size
        self._faults = Faults(options.faults)
        self._trust = options.trust_objects
        self._check = partial(check_stored, trust=self._trust)

    def write(self, number: int, contents: RankContents, group: int = 0) -> WrittenFile:
        """See Sink. Raises UnsafeObjectError for an object that loading would refuse.

        Args:
            group: which of the rank's data files it is.
        """
        if self.source.checkpoint is None:
            for key in contents.objects:
                self._check(self.source.read_object(key), key)
        fragments = [self.source.fragment(*one) for one in contents.fragments]
        items = [TailItem(Kind.OBJECT, key) for key in contents.objects]
        items += [TailItem(Kind.STREAM, key) for key in contents.streams]
        layout = plan_layout(fragments, [False] * len(fragments), items)
        placed = [
            _Placed(*contents.fragments[i], offset, fragments[i].bytes)
            for i, offset in zip(layout.order, layout.offsets.tolist(), strict=True)
        ]
        tail, end = self._place_tail(contents, layout.tensor_end)
        streams = {key: _Stream(self.source.open_stream(key)) for key in contents.streams}
        path = self.directory / self._save_id.data_file_name(number, group)
        file = StreamedFile(self._engine, path, end)
        try:
            header = Header(self._save_id, number, self._world_size, group=group).encode()
            for window in self._windows([*placed, *tail], streams, header, end):
                file.put(window)
            for stream in streams.values():
                stream.close()
            footer = self._footer((number, group), layout, tail, end, file.checksums())
            file.finish(footer)
        except BaseException:  # including an interrupt
            file.remove()
            raise
        _, _, crc = decode_trailer(footer[-TRAILER_BYTES:], path.name)
        entry = FileEntry(path.name, number, end + len(footer), end, crc, group=group)
        return WrittenFile(entry, layout.index)

    def _place_tail(self, contents: RankContents, begin: int) -> tuple[list[_Placed], int]:
        named = [(Kind.OBJECT, key, self.source.object_bytes(key)) for key in contents.objects]
        named += [(Kind.STREAM, key, self.source.stream_bytes(key)) for key in contents.streams]
        places, end = place_objects([size for _, _, size in named], begin)
        placed = zip(named, places, strict=True)
        return [_Placed(key, 0, place, size, kind) for (kind, key, size), place in placed], end

    def _windows(
        self, placed: Sequence[_Placed], streams: Mapping[str, _Stream], header: bytes, end: int
    ) -> Iterator[Bytes]:
        """Yields the file's bytes up to its footer, window by window."""
        starts, ends = [one.offset for one in placed], [one.offset + one.size for one in placed]
        window = np.empty(min(self.window_bytes, end), np.uint8)
        # A large object goes on in the next window, and is read only whole.
        read_object = lru_cache(maxsize=1)(self.source.read_object)
        for begin in range(0, end, len(window)):
            view = window[: min(len(window), end - begin)]
            view[:] = 0  # gaps between fragments
            if begin == 0:
                view[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
            here = placed[bisect_right(ends, begin) : bisect_left(starts, begin + len(view))]
            tensor_bytes = self._fill(view, begin, here, streams, read_object)
            yield view
            self.progress(tensor_bytes)

    def _fill(
        self,
        view: Bytes,
        begin: int,
        here: Sequence[_Placed],
        streams: Mapping[str, _Stream],
        read_object: Callable[[str], bytes],
    ) -> int:
        """Fills a window that starts at byte `begin` of the file; returns its number of tensor bytes."""
        ranges = []
        for key, number, offset, size, kind in here:
            low, high = max(offset, begin), min(offset + size, begin + len(view))
            if kind == Kind.FRAGMENT:
                ranges.append(FragmentRange(key, number, low - offset, high - low, low - begin))
            elif kind == Kind.STREAM:
                streams[key].fill(view[low - begin : high - begin])
            else:
                data = np.frombuffer(read_object(key), np.uint8)
                view[low - begin : high - begin] = data[low - offset : high - offset]
        self.source.read_ranges([part for part in ranges if part.size], view)
        return sum(part.size for part in ranges)

    def _footer(
        self, place: tuple[int, int], layout: Layout, tail: Sequence[_Placed], end: int, checksums: bytes
    ) -> bytes:
        entries = [
            TailEntry(one.kind, one.key, one.offset, one.size, one.size, sha256=self._sha256(one))
            for one in tail
        ]
        rank, group = place
        return Footer(
            self._save_id, rank, self._world_size, end, layout.digest, entries, checksums, group=group
        ).encode()

    def _sha256(self, placed: _Placed) -> bytes:
        """Returns the SHA-256 that the source has of an object or a stream."""
        checkpoint = self.source.checkpoint
        if checkpoint is None:
            return NOT_RECORDED
        find = checkpoint.stream_entry if placed.kind == Kind.STREAM else checkpoint.object_entry
        return find(placed.key)[1].sha256

    def publish(self, written: Sequence[WrittenFile]) -> None:
        self.write_metadata()  # before the manifest: writing that syncs the directory
        index = merge_layouts((entry.rank, own) for entry, own in written)
        write_whole(self.directory / index.entry.name, index.encoded, self._faults, self._save_id)
        old = self.source.manifest
        others = [*filter(self._is_named, self.source.other_files), *self._write_facts()]
        manifest = Manifest(
            run_id=f"{self._save_id.run_id:016x}",
            ordinal=self._save_id.ordinal,
            world_size=self._world_size,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            index=index.entry,
            files=[entry for entry, _ in written],
            iteration=old.iteration if old else iteration_in_name(self.source.directory.name),
            parallel=old.parallel if old else self._parallel(),
            others=[other_file_entry(self.directory / name, self._check) for name in others],
            providers=old.providers if old else [],
            writer={**(old.writer if old else {}), **releases()},  # with what was done to it since the save
            compatible=COMPATIBLE_CHECKSUMS,
        )
        write_whole(self.directory / MANIFEST_NAME, manifest.encode(), self._faults, self._save_id)

    def _is_named(self, name: str) -> bool:
        """Returns whether the manifest names another file; without that, it is there all the same."""
        return name == COMMON_FILE or (self.directory / name).stat().st_size <= _MOST_NAMED_BYTES

    def _write_facts(self) -> list[str]:
        """Writes what DCP knows of the checkpoint, such as its nesting; returns the name of the file."""
        facts = self.source.dcp_facts
        # Not for properties alone: with the file, Megatron would take its own checkpoint for one of DCP's.
        if facts is None or facts == Facts(properties=facts.properties):
            return []
        name = self._save_id.dcp_file_name()
        encoded = facts.encode(name, trust=self._trust)
        write_whole(self.directory / name, encoded, self._faults, self._save_id)
        return [name]

    def _parallel(self) -> dict[str, int]:
        """Returns the sizes of the parallel groups that the source's training arguments have."""
        try:
            return parallel_sizes(training_arguments(self.source))
        except DataStatesError:  # no arguments, which no conversion needs
            return {}
