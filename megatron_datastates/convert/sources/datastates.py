"""Reads checkpoints of the datastates format."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_datastates.config import Options
from megatron_datastates.convert.sources.source import (
    FragmentRange,
    RankContents,
    Slice,
    Source,
    fragment_with,
)
from megatron_datastates.engine.reader import Reader
from megatron_datastates.files import is_in_memory
from megatron_datastates.format.directory import COMMON_FILE, is_of_a_format
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.plan.reads import ScheduledRead, plan_bytes

if TYPE_CHECKING:
    import torch

    from megatron_datastates.dcp.facts import Facts
    from megatron_datastates.format.manifest import Manifest


class _Readers(threading.local):
    """A thread's readers, with memory of their own, by their options."""

    def __init__(self) -> None:
        self.made: dict[Options, Reader] = {}


_readers = _Readers()


class DataStatesSource(Source):
    """See Source."""

    format = "datastates"
    checkpoint: Checkpoint
    manifest: Manifest

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._options = Options.from_environment()
        self.checkpoint = Checkpoint.open(directory, self._options)
        self.manifest, self.tensors = self.checkpoint.manifest, self.checkpoint.index.tensors

    def preload(self, keys: Iterable[str]) -> None:
        self.checkpoint.index.preload(keys)

    def files_of(self, key: str) -> npt.NDArray[np.uint32]:
        return self.checkpoint.index.tensor(key).files

    @property
    def objects(self) -> Sequence[str]:
        return list(self.checkpoint.index.objects)

    @property
    def other_files(self) -> Sequence[str]:
        # Frameworks add files once it is published, as Bridge does. Another common.pt is a left-over.
        added = {name for name in super().other_files if name != COMMON_FILE}
        named = {o.name for o in self.manifest.others if not is_of_a_format(o.name)}
        return sorted(added | named)

    @property
    def dcp_facts(self) -> Facts | None:
        from megatron_datastates.dcp.facts import read_facts  # imports torch

        return read_facts(self.checkpoint)

    def read_tensor(
        self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        return self.checkpoint.read_tensors([(key, offset, shape)], self.reader())[0]

    def read_tensors(self, slices: Sequence[Slice]) -> list[torch.Tensor]:
        return self.checkpoint.read_tensors(slices, self.reader())

    def reader(self) -> Reader:
        """Returns this thread's reader, which sources share: its memory is not made anew for every slice."""
        made = _readers.made
        if self._read_options not in made:
            made[self._read_options] = Reader(self._read_options)
        return made[self._read_options]

    @functools.cached_property
    def _read_options(self) -> Options:
        """The options, without direct I/O if the page cache has the first data file."""
        files = self.checkpoint.manifest.files
        if not files or not is_in_memory(self.checkpoint.file_path(0)):
            return self._options
        return dataclasses.replace(self._options, direct_io=False)

    def place(self, key: str, offset: Sequence[int]) -> tuple[str, int]:
        entry = self.checkpoint.index.tensor(key)
        number = fragment_with(entry, offset)
        return ("", 0) if number is None else (f"{entry.files[number]:09d}", int(entry.file_offsets[number]))

    def read_ranges(self, ranges: Sequence[FragmentRange], window: npt.NDArray[np.uint8]) -> None:
        address, scheduled = window.ctypes.data, []
        for key, fragment, begin, size, at in ranges:
            entry = self.checkpoint.index.tensor(key)
            scheduled.append(ScheduledRead(plan_bytes(entry, fragment, begin, size), address + at))
        self.checkpoint.read(scheduled, self.reader())

    def read_object(self, key: str) -> bytes:
        return self.checkpoint.read_object_bytes(key)

    def object_bytes(self, key: str) -> int:
        return self.checkpoint.object_entry(key)[1].bytes

    def object_file(self, key: str) -> int:
        return self.checkpoint.object_entry(key)[0]

    @property
    def streams(self) -> Sequence[str]:
        return self.checkpoint.streams

    def open_stream(self, key: str) -> Iterator[memoryview]:
        return self.checkpoint.open_stream(key)

    def stream_bytes(self, key: str) -> int:
        return self.checkpoint.stream_entry(key)[1].bytes

    def require_files(self) -> None:
        self.checkpoint.require(range(len(self.checkpoint.manifest.files)))

    def check_other(self, name: str) -> None:
        if any(one.name == name for one in self.manifest.others):
            self.checkpoint.read_other(name)

    def stored_by_file(self) -> list[RankContents]:
        """Returns what each data file holds, in the order of its bytes."""
        index, files = self.checkpoint.index, self.checkpoint.manifest.files
        places: list[list[tuple[bool, int, str, int]]] = [[] for _ in files]
        for key, entry in index.tensors.items():
            found = zip(entry.files.tolist(), entry.file_offsets.tolist(), strict=True)
            for n, (file, at) in enumerate(found):
                places[file].append((entry.encoded, at, key, n))
        contents = [RankContents([(key, n) for *_, key, n in sorted(place)], []) for place in places]
        for key, file in index.objects.items():
            contents[file].objects.append(key)
        for key, file in index.streams.items():
            contents[file].streams.append(key)
        return contents

    def stored_by_rank(self) -> list[RankContents]:
        return [contents for _, contents in sorted(self.contents_of_ranks().items())]

    def contents_of_ranks(self) -> dict[int, RankContents]:
        """Returns the contents of the files of each rank that has stored anything."""
        by_rank: dict[int, RankContents] = {}
        for file, contents in zip(self.checkpoint.manifest.files, self.stored_by_file(), strict=True):
            if not contents.is_empty:
                rank = by_rank.setdefault(file.rank, RankContents([], []))
                rank.fragments.extend(contents.fragments)
                rank.objects.extend(contents.objects)
                rank.streams.extend(contents.streams)
        return by_rank
