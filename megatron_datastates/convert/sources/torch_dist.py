"""Reads `--ckpt-format torch_dist`, which torch.distributed.checkpoint (DCP) writes, without DCP's reader.

`.metadata` has the place of each fragment and object: an offset and a length in a `.distcp` file. The bytes
of a tensor are an archive of torch.save. Everything is unpickled by convert/sources/pickles.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_datastates.convert.integrity_file import require_sums, stored_sums
from megatron_datastates.convert.optimizer_maps import read_maps
from megatron_datastates.convert.sources.dcp_checks import (
    UNCOVERED,
    index_faults,
    paths_of,
    unnamed_bytes,
    unusual_keys,
)
from megatron_datastates.convert.sources.dcp_index import Record, records_of, required_bytes
from megatron_datastates.convert.sources.pickles import BytesStorage, Metadata, TensorStorage, load_metadata
from megatron_datastates.convert.sources.source import (
    FragmentRange,
    RankContents,
    Source,
    fragment_with,
)
from megatron_datastates.errors import FormatError, StorageError, some_of
from megatron_datastates.files import names_in, open_regular, size_of
from megatron_datastates.format.directory import (
    ARGUMENTS_KEY,
    COMMON_FILE,
    COMMON_STATE_KEY,
    METADATA_NAME,
    OPTIMIZER_MAPS_NAME,
    TORCH_DIST_INDEX,
    iteration_in_name,
)
from megatron_datastates.format.values import DTYPES, element_bytes
from megatron_datastates.plan.boxes import Box, checked_slice, first_overlap, intersect, slices_of

if TYPE_CHECKING:
    import torch

    from megatron_datastates.convert.sources.archives import Archive
    from megatron_datastates.dcp.facts import Facts

_OWN_PLANNER_DATA = (
    f"the planner data in {TORCH_DIST_INDEX} are left out: the program that saved made them with a planner "
    "of its own. Megatron and DCP's planner load without them; if that program needs them, keep the source"
)

_NEWER = (
    f"some files are newer than {TORCH_DIST_INDEX}, which a save writes last: this is a copy with times of "
    "its own, or a save into it is under way or was killed, and it holds parts of two saves"
)
_MOST_NAMED = 3
_WITHOUT_CHECKSUMS = (TORCH_DIST_INDEX, METADATA_NAME, COMMON_FILE)  # of their own, as archives have


@dataclasses.dataclass(frozen=True)
class TorchDistTensor:
    """See SourceTensor. `records` has one record per fragment, in order; None where DCP wrote none."""

    dtype: str
    global_shape: tuple[int, ...]
    offsets: npt.NDArray[np.int64]
    shapes: npt.NDArray[np.int64]
    records: list[Record | None]

    @property
    def files(self) -> npt.NDArray[np.int64]:
        """Returns, by fragment, a number for its file; -1 where DCP wrote none."""
        names = sorted({record.file for record in self.records if record is not None})
        numbers = {name: number for number, name in enumerate(names)}
        return np.array([numbers[one.file] if one is not None else -1 for one in self.records], np.int64)


class TorchDistSource(Source):
    """Reads `.metadata` when it is created, and data on request.

    Its constructor and methods raise FormatError for a checkpoint that is damaged, hostile or written by an
    extension of DCP, and StorageError for a file that is missing or truncated.
    """

    format = "torch_dist"
    uncovered = UNCOVERED

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        path = directory / TORCH_DIST_INDEX
        self._note(path)
        metadata = load_metadata(path)
        self._paths, self._version = paths_of(metadata), metadata.version
        self._has_own_planner_data = self._paths is None and metadata.planner_data not in (None, {})
        self.tensors: dict[str, TorchDistTensor] = {}
        self._objects: dict[str, Record] = {}
        self._properties: dict[str, dict[str, bool]] = {}  # by key, those that are not usual
        try:
            self._read_entries(metadata, path)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(f"{path} is damaged: {error}") from error
        self._maps = read_maps(directory)
        if self._maps.keys() & (self._objects.keys() | self.tensors.keys()):
            raise FormatError(f"{path} has the key of an optimizer map that is in {OPTIMIZER_MAPS_NAME}, too")

    def _read_entries(self, metadata: Metadata, path: Path) -> None:
        self.dcp_records = records = records_of(metadata, path)
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(key, str):
                raise FormatError(f"{path}: a key is {key!r}, expected a string")
            key.encode()  # raises for half of a surrogate pair
            if isinstance(entry, TensorStorage):
                self.tensors[key] = _tensor(key, entry, records.get(key, {}), path)
                if properties := _unusual(entry.properties.others):
                    self._properties[key] = properties
            elif isinstance(entry, BytesStorage) and records.get(key):
                self._objects[key] = next(iter(records[key].values()))
            else:
                raise FormatError(f"{path}: {key!r} is neither a stored tensor nor a stored object")

    def files_of(self, key: str) -> npt.NDArray[np.int64]:
        return self._found(self.tensors, "tensor", key).files

    @property
    def objects(self) -> Sequence[str]:
        return [*self._objects, *self._maps]

    @property
    def dcp_facts(self) -> Facts | None:
        from megatron_datastates.dcp.facts import Facts  # imports torch

        version = self._version if isinstance(self._version, str) and self._paths is not None else None
        facts = Facts(self._paths, self._properties, version=version)
        return None if facts == Facts() else facts

    @property
    def left_out(self) -> str:
        return _OWN_PLANNER_DATA if self._has_own_planner_data else ""

    @property
    def doubt(self) -> str:
        index = self._noted[self.directory / TORCH_DIST_INDEX]
        newer = [path.name for path, noted in self._noted.items() if noted and index and noted[1] > index[1]]
        return f"{_NEWER}: {some_of(newer, _MOST_NAMED)}" if newer else ""

    def read_tensor(
        self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        import torch  # here, so that commands that only look need none

        from megatron_datastates.pipeline.loading.dtypes import torch_dtype

        entry = self._found(self.tensors, "tensor", key)
        offset, shape = checked_slice(key, entry.global_shape, offset, shape)
        boxes = zip(entry.offsets.tolist(), entry.shapes.tolist(), strict=True)
        found = [(n, intersect(*box, offset, shape)) for n, box in enumerate(boxes)]
        cuts = [(n, box) for n, box in found if box is not None]
        wanted, covered = math.prod(shape), sum(math.prod(lengths) for _, (_, lengths) in cuts)
        if covered < wanted:
            raise FormatError(
                f"tensor {key!r} has holes: {covered} of the {wanted} requested elements are stored"
            )
        overlap = first_overlap(entry.offsets, entry.shapes) if len(cuts) > 1 else None
        if overlap is not None:
            raise FormatError(f"tensor {key!r}: two fragments both hold the element at {overlap}")
        target = np.empty(shape, f"V{element_bytes(entry.dtype)}")
        for n, (begin, lengths) in cuts:
            place: tuple[Any, ...] = (..., *slices_of((begin, lengths), offset))
            inner = [b - o for b, o in zip(begin, entry.offsets[n].tolist(), strict=True)]
            record = self._place(key, n)
            with self._open(record.file) as file:
                self._open_archive(file, key, n, record).read_box(inner, target[place])
        data = torch.from_numpy(target.reshape(-1).view(np.uint8))
        return data.view(torch_dtype(entry.dtype, key)).reshape(shape)

    def place(self, key: str, offset: Sequence[int]) -> tuple[str, int]:
        entry = self._found(self.tensors, "tensor", key)
        number = fragment_with(entry, offset)
        record = None if number is None else entry.records[number]
        return ("", 0) if record is None else (record.file, record.offset)

    def read_ranges(self, ranges: Sequence[FragmentRange], window: npt.NDArray[np.uint8]) -> None:
        by_file: dict[str, list[tuple[FragmentRange, Record]]] = defaultdict(list)
        for part in ranges:
            record = self._place(part.key, part.fragment)
            by_file[record.file].append((part, record))
        for name, wanted in by_file.items():
            with self._open(name) as file:
                for part, record in wanted:
                    archive = self._open_archive(file, part.key, part.fragment, record)
                    archive.read_into(part.begin, window[part.at : part.at + part.size])

    def _open_archive(self, file: BinaryIO, key: str, number: int, record: Record) -> Archive:
        from megatron_datastates.convert.sources.archives import open_archive

        where = f"{self.directory / record.file}, tensor {key!r} at byte {record.offset}"
        archive, fragment = open_archive(file, record.offset, record.bytes, where), self.fragment(key, number)
        if (archive.dtype, archive.shape) != (fragment.dtype, fragment.shape):
            raise FormatError(
                f"{where}: it has dtype {archive.dtype} and shape {archive.shape}, expected "
                f"{fragment.dtype} and {fragment.shape} according to {TORCH_DIST_INDEX}"
            )
        return archive

    def fragment_crc(self, key: str, number: int) -> tuple[int, str] | None:
        record = self._place(key, number)
        with self._open(record.file) as file:
            archive = self._open_archive(file, key, number, record)
        return None if archive.crc is None else (archive.crc, archive.where)

    def read_object(self, key: str) -> bytes:
        if key in self._maps:
            return self._maps[key]
        record = self._found(self._objects, "object", key)
        with self._open(record.file) as file:
            is_there = record.offset + record.bytes <= size_of(file)  # checked before memory is allocated
            file.seek(record.offset)
            data = file.read(record.bytes) if is_there else b""
        if len(data) != record.bytes:
            raise StorageError(f"{self.directory / record.file} is truncated: it ends within object {key!r}")
        return data

    def object_bytes(self, key: str) -> int:
        return len(self._maps[key]) if key in self._maps else self._found(self._objects, "object", key).bytes

    def require_files(self) -> None:
        """See Source. Raises CorruptDataError for an index that differs from its sum in integrity.json."""
        sums = stored_sums(self.directory) or {}
        require_sums(self.directory, sums, _WITHOUT_CHECKSUMS)
        if TORCH_DIST_INDEX in sums:
            self.uncovered = ""
        for name, end in required_bytes(record for _, _, record in self.records()).items():
            with self._open(name) as file:
                size = size_of(file)
            if size < end:
                raise StorageError(
                    f"{self.directory / name} is truncated: it has {size} bytes, expected at least {end}"
                )

    def _reused_files(self) -> Iterable[Path]:
        stored = [one for entry in self.tensors.values() for one in entry.records if one is not None]
        names = {one.file for one in [*stored, *self._objects.values()]}
        return [self.directory / name for name in (TORCH_DIST_INDEX, COMMON_FILE, *sorted(names))]

    def stored_by_rank(self) -> list[RankContents]:
        fragments: dict[tuple[int, str], list[tuple[str, int, str, int]]] = defaultdict(list)
        objects: dict[tuple[int, str], list[str]] = defaultdict(list)
        for key, number, record in self.records():
            if number is None:
                objects[_rank_of(record.file)].append(key)
            else:
                fragments[_rank_of(record.file)].append((record.file, record.offset, key, number))
        ranks = sorted(fragments.keys() | objects.keys())
        if self._maps:
            objects[ranks[0] if ranks else (0, "")] += self._maps
        return [
            RankContents([(key, n) for _, _, key, n in sorted(fragments[rank])], objects[rank])
            for rank in sorted(fragments.keys() | objects.keys())
        ]

    def structure_faults(self) -> Iterator[str]:
        names = names_in(self.directory)
        if METADATA_NAME not in names and self._has_common_state(names):
            yield (
                f"{self.directory / METADATA_NAME} is missing, and Megatron does not load the checkpoint "
                "without it: `datastates ls` of the run prints what to write into it"
            )
        yield from index_faults(self.directory, list(self.records()))

    def _has_common_state(self, names: Collection[str]) -> bool:
        return COMMON_STATE_KEY in self._objects or COMMON_FILE in names

    def structure_notes(self) -> Iterator[str]:
        # DCP writes no such file, and with ARGUMENTS_KEY Megatron has left the writing to DCP.
        is_of_run = iteration_in_name(self.directory.name) is not None and ARGUMENTS_KEY not in self._objects
        names = names_in(self.directory)
        if is_of_run and METADATA_NAME not in names and not self._has_common_state(names):
            yield f"{METADATA_NAME} is missing: Megatron does not load the checkpoint without it"
        self.note_files()
        if self.doubt:
            yield self.doubt
        yield from unusual_keys([*self.tensors, *self._objects])
        yield from unnamed_bytes(self.directory, self.records())

    def records(self) -> Iterator[tuple[str, int | None, Record]]:
        """Yields the key, number and place of each fragment; of each object, with None for the number."""
        for key, entry in self.tensors.items():
            for n in range(len(entry.records)):
                yield key, n, self._place(key, n)
        for key, record in self._objects.items():
            yield key, None, record

    def _open(self, name: str) -> BinaryIO:
        try:
            return open_regular(self.directory / name)
        except OSError as error:
            path = self.directory / name
            raise StorageError.of(error, path, f"{path} cannot be read: {error.strerror}") from error

    def _place(self, key: str, number: int) -> Record:
        record = self._found(self.tensors, "tensor", key).records[number]
        if record is None:
            raise FormatError(f"{self.directory / TORCH_DIST_INDEX} has no place for a fragment of {key!r}")
        return record


def _rank_of(file: str) -> tuple[int, str]:
    """Returns a sort key for the rank in a file's name; any other file counts as a rank of its own."""
    match = re.fullmatch(r"__(\d{1,9})_\d+\.distcp", file, re.ASCII)
    return (int(match[1]), "") if match else (1 << 62, file)


def _tensor(
    key: str, entry: TensorStorage, records: Mapping[tuple[int, ...], Record], path: Path
) -> TorchDistTensor:
    dtype, shape = str(entry.properties.dtype).removeprefix("torch."), _numbers(entry.size)
    if dtype not in DTYPES:
        raise FormatError(f"{path}: tensor {key!r} has dtype {dtype}, which is not supported")
    boxes = _with_places([(_numbers(chunk.offsets), _numbers(chunk.sizes)) for chunk in entry.chunks])
    for offset, size in boxes:
        fits = len(offset) == len(size) == len(shape)
        if not fits or any(o + n > s for o, n, s in zip(offset, size, shape, strict=True)):
            raise FormatError(
                f"{path}: tensor {key!r} of shape {shape} does not contain its fragment {size} at {offset}"
            )
    if element_bytes(dtype) * int(np.prod(shape, dtype=object)) >= 1 << 62:
        raise FormatError(f"{path}: tensor {key!r} of shape {shape} is larger than 2^62 bytes")
    offsets = np.array([offset for offset, _ in boxes], np.int64).reshape(len(boxes), len(shape))
    shapes = np.array([size for _, size in boxes], np.int64).reshape(len(boxes), len(shape))
    return TorchDistTensor(dtype, shape, offsets, shapes, [_record(o, records) for o, _ in boxes])


def _with_places(boxes: Sequence[Box]) -> list[Box]:
    """Returns the boxes without those that have no elements and share their offset with another one.

    DCP's index has one archive at each offset, so theirs has no place.
    """
    taken = {offset for offset, size in boxes if 0 not in size}
    found = []
    for offset, size in boxes:
        if 0 not in size or offset not in taken:
            found.append((offset, size))
            taken.add(offset)
    return found


def _unusual(others: Sequence[Any]) -> dict[str, bool]:
    """Returns the properties that are true. Layout and memory format are the same for all that DCP writes."""
    found = dict(zip(("layout", "requires_grad", "memory_format", "pin_memory"), others, strict=False))
    return {name: True for name in ("requires_grad", "pin_memory") if found.get(name) is True}


def _numbers(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(values)
    if not all(isinstance(value, int) and value >= 0 for value in found):
        raise TypeError(f"{found} is not an offset or shape")
    return found


def _record(offset: tuple[int, ...], records: Mapping[tuple[int, ...], Record]) -> Record | None:
    # A whole tensor, not a shard, is stored under an offset of zeros, and under none by old releases.
    found: Any = records.get(offset)
    return found or (records.get(()) if not any(offset) else None)
