"""A checkpoint of any format, to be read: what is in it, and slices of its tensors.

Sources open files when something in them is asked for, and hold no tensor. They need no torch.distributed.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.format.values import Fragment


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


class Piece(NamedTuple):
    """Bytes [begin, begin + size) of a stored fragment, in row-major order, on their way to a window."""

    key: str
    fragment: int  # row of the tensor's offsets and shapes
    begin: int
    size: int
    at: int  # where in the window they go


@dataclasses.dataclass(frozen=True)
class Stored:
    """What one rank stored, in the order of its files."""

    fragments: list[tuple[str, int]]  # key, row of the tensor's offsets and shapes
    objects: list[str]


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

    @property
    def other_directories(self) -> Sequence[str]:
        """Names of directories of others that belong to the checkpoint, such as ModelOpt's."""
        with os.scandir(self.directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

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
    def read_pieces(self, pieces: Sequence[Piece], window: npt.NDArray[np.uint8]) -> None:
        """Fills `window` with pieces; what lies between them is left alone. Any thread may call it."""

    @abstractmethod
    def read_object(self, key: str) -> bytes:
        """An object as it is stored: what `torch.save([value])` gave. Raises MissingKeyError."""

    @abstractmethod
    def object_bytes(self, key: str) -> int:
        """How long it is. Raises MissingKeyError."""

    @abstractmethod
    def stored_by_rank(self) -> list[Stored]:
        """All fragments and objects, of each rank that stored any."""

    @abstractmethod
    def require_files(self) -> None:
        """Raises StorageError, FormatError: a file is missing or ends early; told before any data moves."""

    def fragment_crc(self, key: str, number: int) -> tuple[int, str] | None:
        """CRC-32 of a fragment's bytes, and where it lies; None where reading checks it, or there is none."""
        return None

    def fragment(self, key: str, number: int) -> Fragment:
        """One of a tensor's fragments."""
        entry = self.tensors[key]
        offset, shape = entry.offsets[number].tolist(), entry.shapes[number].tolist()
        return Fragment(key, entry.dtype, entry.global_shape, tuple(offset), tuple(shape))
