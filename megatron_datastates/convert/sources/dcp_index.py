"""Where DCP's `.metadata` says that everything lies. Nothing here needs torch or numpy."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from megatron_datastates.convert.sources.pickles import Metadata
from megatron_datastates.errors import FormatError


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """Contiguous bytes of a `.distcp` file."""

    file: str
    offset: int
    bytes: int


Records = dict[str, dict[tuple[int, ...], Record]]  # by key and then by the fragment's offset


def records_of(metadata: Metadata, path: Path) -> Records:
    """Returns all records by key and then by the fragment's offset."""
    records: Records = defaultdict(dict)
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise FormatError(
                f"{path}: {index.fqn!r} was written through {info.transform_descriptors}, "
                "which is not supported: write the checkpoint without extensions of DCP"
            )
        file, place = info.relative_path, (info.offset, info.length)
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise FormatError(f"{path}: {index.fqn!r} is in {file!r}, expected a file in the same directory")
        file.encode()  # raises for half of a surrogate pair
        if not all(isinstance(number, int) and 0 <= number < 1 << 62 for number in place):
            raise FormatError(
                f"{path}: {index.fqn!r} has offset and length {place} in {file}, expected integers below 2^62"
            )
        records[index.fqn][tuple(index.offset or ())] = Record(file, *place)
    return records


def required_bytes(records: Iterable[Record]) -> dict[str, int]:
    """Returns the least size of each file that holds these records."""
    ends: dict[str, int] = {}
    for record in records:
        ends[record.file] = max(ends.get(record.file, 0), record.offset + record.bytes)
    return ends
