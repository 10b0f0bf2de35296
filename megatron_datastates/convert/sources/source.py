"""The interface of a format that can be read: its contents, and slices of its tensors.

Sources open files only when something in them is requested, and keep no tensors. They need no
torch.distributed.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import MissingKeyError, StorageError
from megatron_datastates.files import files_in, folders_in
from megatron_datastates.format.directory import COMMON_FILE, is_of_a_format
from megatron_datastates.format.values import Fragment
from megatron_datastates.pipeline.runs.runs import metadata_members
from megatron_datastates.plan.coverage import StoredBoxes

if TYPE_CHECKING:
    import torch

    from megatron_datastates.convert.sources.dcp_index import Records
    from megatron_datastates.dcp.facts import Facts
    from megatron_datastates.format.manifest import Manifest
    from megatron_datastates.pipeline.loading.load import Checkpoint


T = TypeVar("T")


class SourceTensor(StoredBoxes, Protocol):
    """One global tensor of d dimensions, and the n boxes that it is stored in."""

    @property
    def dtype(self) -> str: ...  # as torch names it, such as bfloat16


Slice = tuple[str, Sequence[int], Sequence[int]]  # key, offset, shape


class FragmentRange(NamedTuple):
    """Bytes [begin, begin + size) of a stored fragment in row-major order, and their place in a window.

    They are those of whole elements.
    """

    key: str
    fragment: int  # row of the tensor's offsets and shapes
    begin: int
    size: int
    at: int  # first byte in the window


@dataclasses.dataclass(frozen=True)
class RankContents:
    """The fragments, objects and streams of one rank, in the order of its files."""

    fragments: list[tuple[str, int]]  # key, row of the tensor's offsets and shapes
    objects: list[str]
    streams: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.fragments or self.objects or self.streams)


class Source(ABC):
    """A checkpoint that can be read.

    All methods that read raise a subclass of DataStatesError for what is missing, damaged or not plain data.
    """

    format: str  # as --ckpt-format names it
    uncovered = ""  # what checks cannot find in this format
    checkpoint: Checkpoint | None = None  # the same as loads open it, if it is of our format
    manifest: Manifest | None = None  # of the save, in our format
    dcp_records: Records | None = None  # of DCP's `.metadata`, in its format
    tensors: Mapping[str, SourceTensor]  # all, by key

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._noted: dict[Path, tuple[int, float] | None] = {}  # bytes, time of the last change

    def _found(self, places: Mapping[str, T], what: str, key: str) -> T:
        """Returns what `places` has of a tensor or an object. Raises MissingKeyError."""
        if key not in places:
            raise MissingKeyError(f"{self.directory} contains no {what} {key!r}")
        return places[key]

    def preload(self, keys: Iterable[str]) -> None:  # noqa: B027 - most have nothing to read
        """Reads what the index has of these tensors at once, where it is read on demand."""

    def files_of(self, key: str) -> npt.NDArray[np.integer[Any]] | None:
        """Returns, by fragment, a number for its file (-1: none); None where the format does not say."""
        return None

    @property
    @abstractmethod
    def objects(self) -> Sequence[str]:
        """Returns the keys of all objects, with the common state if it is one (`common_state/shard_0_1`)."""

    @property
    def streams(self) -> Sequence[str]:
        """Returns the keys of all streams."""
        return []

    @property
    def other_files(self) -> Sequence[str]:
        """Returns the names of the checkpoint's other files, such as `common.pt` before Megatron 0.19."""
        return sorted(name for name in files_in(self.directory) if not is_of_a_format(name))

    def read_metadata(self) -> dict[str, Any]:
        """Returns the members of Megatron's metadata.json. Raises FormatError, OSError."""
        return metadata_members(self.directory)

    def other_path(self, name: str) -> Path:
        """Returns where one of the other files is."""
        return self.directory / name

    @property
    def dcp_facts(self) -> Facts | None:
        """Returns what PyTorch's distributed checkpoints know of the state and its tensors, if known."""
        return None

    @property
    def left_out(self) -> str:
        """Returns what a conversion does not keep, and what follows from it; empty if it keeps all."""
        return ""

    @property
    def doubt(self) -> str:
        """Returns what speaks against its being of one save, once files are noted; empty if nothing does."""
        return ""

    @property
    def other_directories(self) -> Sequence[str]:
        """Returns the names of directories that others have added to the checkpoint, such as ModelOpt's."""
        return sorted(folders_in(self.directory))

    @abstractmethod
    def read_tensor(
        self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Reads a slice of a global tensor (by default all of it) to host memory, in its stored dtype.

        Raises:
            MissingKeyError: there is no such tensor.
            MismatchError: the slice exceeds the tensor.
            FormatError: parts of the slice are not stored.
        """

    def read_tensors(self, slices: Sequence[Slice]) -> list[torch.Tensor]:
        """Reads several slices, each (key, offset, shape). Raises as read_tensor."""
        return [self.read_tensor(*one) for one in slices]

    def place(self, key: str, offset: Sequence[int]) -> tuple[str, int]:
        """Returns the file of an element and where it is there, as far as known: the order for fast reads."""
        return "", 0

    @abstractmethod
    def read_ranges(self, ranges: Sequence[FragmentRange], window: npt.NDArray[np.uint8]) -> None:
        """Reads ranges of fragments to their places in `window`; leaves other bytes alone. Thread-safe."""

    @abstractmethod
    def read_object(self, key: str) -> bytes:
        """Returns the bytes of an object, as `torch.save([value])` wrote them. Raises MissingKeyError."""

    def object_bytes(self, key: str) -> int:
        """Returns the size of what read_object returns. Raises MissingKeyError."""
        return len(self.read_object(key))

    def object_file(self, key: str) -> int | None:
        """Returns the number of the data file of an object; None where files have no numbers."""
        return None

    def open_stream(self, key: str) -> Iterator[memoryview]:
        """Yields the bytes of a stream. Raises MissingKeyError."""
        raise MissingKeyError(f"{self.directory} contains no stream {key!r}")

    def stream_bytes(self, key: str) -> int:
        """Returns the size of a stream. Raises MissingKeyError."""
        raise MissingKeyError(f"{self.directory} contains no stream {key!r}")

    @abstractmethod
    def stored_by_rank(self) -> list[RankContents]:
        """Returns all fragments, objects and streams, by rank; ranks that stored none are left out."""

    @abstractmethod
    def require_files(self) -> None:
        """Checks, before any data is read, that all files are there and long enough.

        Raises:
            StorageError, FormatError: a file is missing or truncated.
        """

    def note_files(self) -> None:
        """Notes, before any data is read, what shows `require_unchanged` a later save. Raises OSError."""
        for path in self._reused_files():
            self._note(path)

    def _reused_files(self) -> Iterable[Path]:
        """Returns the checkpoint's own files to which another save would write under the same names."""
        return [self.other_path(name) for name in self.other_files if name == COMMON_FILE]

    def _note(self, path: Path) -> None:
        if path not in self._noted:
            self._noted[path] = _written(path)

    def require_unchanged(self) -> None:
        """Checks, once all was read, that all was of one save. Raises OSError.

        Raises:
            StorageError: a save has written to files since they were noted.
        """
        for path, noted in self._noted.items():
            if _written(path) != noted:
                raise StorageError(
                    f"{path} has changed since it was opened: a save into the directory is under way, or "
                    "was. Call again once it has ended"
                )

    def check_other(self, name: str) -> None:  # noqa: B027 - most have nothing to compare with
        """Checks one of the other files. Raises CorruptDataError if it is not the one that was saved."""

    def structure_faults(self) -> Iterable[str]:
        """Returns what is wrong with the index, besides what keeps it from opening. Raises FormatError."""
        return []

    def structure_notes(self) -> Iterable[str]:
        """Returns what is unusual there, and no fault. Raises OSError."""
        return []

    def fragment_crc(self, key: str, number: int) -> tuple[int, str] | None:
        """Returns a fragment's CRC-32 and where it lies; None if reading checks it or none is stored."""
        return None

    def fragment(self, key: str, number: int) -> Fragment:
        """Returns fragment `number` of a tensor."""
        entry = self.tensors[key]
        offset, shape = entry.offsets[number].tolist(), entry.shapes[number].tolist()
        return Fragment(key, entry.dtype, entry.global_shape, tuple(offset), tuple(shape))


def _written(path: Path) -> tuple[int, float] | None:
    """Returns the bytes and the time of the last change of a file, links followed; None if it is gone.

    No inode: some mounts number a file anew at any time.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime


def fragment_with(entry: StoredBoxes, offset: Sequence[int]) -> int | None:
    """Returns the number of the box that holds an element; None if none does."""
    inside = (entry.offsets <= offset) & (offset < entry.offsets + entry.shapes)
    (found,) = inside.all(axis=1).nonzero()
    return int(found[0]) if len(found) else None
