"""A checkpoint of any format, to be read: what is in it, and slices of its tensors.

Sources open files when something in them is asked for, and hold no tensor. They need no torch.distributed.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.config import Options
from megatron_datastates.errors import NotACheckpointError
from megatron_datastates.pipeline.load import Checkpoint, is_published


class StoredTensor(Protocol):
    """One global tensor and the n boxes that it is stored in, of d dimensions."""

    @property
    def dtype(self) -> str: ...  # as torch names it, such as bfloat16
    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def offsets(self) -> npt.NDArray[np.int64]: ...  # (n, d), elements
    @property
    def shapes(self) -> npt.NDArray[np.int64]: ...  # (n, d), elements


class Source(ABC):
    """Raises (all methods that read) DataStatesError's kinds: what is missing, damaged or not plain data."""

    format: str  # as --ckpt-format names it

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors, by key."""

    @property
    @abstractmethod
    def objects(self) -> Sequence[str]:
        """Keys of all objects, the common state among them (`common_state/shard_0_1`, if it is one)."""

    @property
    @abstractmethod
    def other_files(self) -> Sequence[str]:
        """Names of other files that belong to the checkpoint, such as `common.pt` before Megatron 0.19."""

    @abstractmethod
    def read_tensor(
        self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A slice of a global tensor (all of it by default), in host memory, in its stored dtype.

        Raises:
            MissingKeyError: no such tensor.
            MismatchError: the slice leaves the tensor.
            FormatError: the checkpoint holds only a part of it.
        """

    @abstractmethod
    def read_object(self, key: str) -> bytes:
        """An object as it is stored: what `torch.save([value])` gave. Raises MissingKeyError."""


class DataStatesSource(Source):
    """Of our own format."""

    format = "datastates"

    def __init__(self, directory: Path, options: Options | None = None) -> None:
        super().__init__(directory)
        self.checkpoint = Checkpoint.open(directory, options)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self.checkpoint.index.tensors

    @property
    def objects(self) -> Sequence[str]:
        return list(self.checkpoint.index.objects)

    @property
    def other_files(self) -> Sequence[str]:
        return [other.name for other in self.checkpoint.manifest.others]

    def read_tensor(
        self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        return self.checkpoint.read_tensor(key, offset, shape)

    def read_object(self, key: str) -> bytes:
        return self.checkpoint.read_object_bytes(key)


def open_source(directory: str | os.PathLike[str]) -> Source:
    """The checkpoint that lies in `directory`, whatever its format.

    Raises:
        NotACheckpointError: nothing is there that can be read.
    """
    path = Path(directory)
    if is_published(path):
        return DataStatesSource(path)
    raise NotACheckpointError(f"{path} holds no checkpoint of a known format")
