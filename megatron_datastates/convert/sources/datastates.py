"""Reads checkpoints of the datastates format."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.config import Options
from megatron_datastates.convert.sources.source import FragmentRange, RankContents, Source, SourceTensor
from megatron_datastates.engine.reader import Reader
from megatron_datastates.format.directory import is_of_a_format
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.plan.reads import ScheduledRead, plan_bytes


class DataStatesSource(Source):
    """See Source."""

    format = "datastates"

    def __init__(self, directory: Path, options: Options | None = None) -> None:
        super().__init__(directory)
        self.checkpoint = Checkpoint.open(directory, options)
        self._local = threading.local()  # each thread has a reader with its own memory

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self.checkpoint.index.tensors

    @property
    def objects(self) -> Sequence[str]:
        return list(self.checkpoint.index.objects)

    @property
    def other_files(self) -> Sequence[str]:
        return [o.name for o in self.checkpoint.manifest.others if not is_of_a_format(o.name)]

    def read_tensor(
        self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        return self.checkpoint.read_tensor(key, offset, shape)

    def read_ranges(self, ranges: Sequence[FragmentRange], window: npt.NDArray[np.uint8]) -> None:
        if not hasattr(self._local, "reader"):
            self._local.reader = self.checkpoint.new_reader()
        reader: Reader = self._local.reader
        address, scheduled = window.ctypes.data, []
        for key, fragment, begin, size, at in ranges:
            entry = self.checkpoint.index.tensor(key)
            scheduled.append(ScheduledRead(plan_bytes(entry, fragment, begin, size), address + at))
        self.checkpoint.read(scheduled, reader)

    def read_object(self, key: str) -> bytes:
        return self.checkpoint.read_object_bytes(key)

    def object_bytes(self, key: str) -> int:
        return self.checkpoint.object_entry(key)[1].bytes

    def require_files(self) -> None:
        self.checkpoint.require(range(len(self.checkpoint.manifest.files)))

    def stored_by_rank(self) -> list[RankContents]:
        places: dict[int, list[tuple[int, str, int]]] = {}
        for key, entry in self.checkpoint.index.tensors.items():
            for n, (file, at) in enumerate(
                zip(entry.files.tolist(), entry.file_offsets.tolist(), strict=True)
            ):
                places.setdefault(file, []).append((at, key, n))
        objects: dict[int, list[str]] = {}
        for key, file in self.checkpoint.index.objects.items():
            objects.setdefault(file, []).append(key)
        return [
            RankContents([(key, n) for _, key, n in sorted(places.get(file, []))], objects.get(file, []))
            for file in sorted(places.keys() | objects.keys())
        ]
