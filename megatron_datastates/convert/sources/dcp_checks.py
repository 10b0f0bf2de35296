"""Checks DCP's `.metadata` against itself and against the files beside it, as it has no checksum.

A fault is what torch or Megatron would refuse, or what contradicts another part of the checkpoint. What
agrees with all else, such as another name for a tensor, cannot be found.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_datastates.convert.sources.dcp_index import Record
from megatron_datastates.convert.sources.pickles import (
    BytesStorage,
    Chunk,
    Index,
    Member,
    Metadata,
    Properties,
    StorageInfo,
    StorageMeta,
    TensorStorage,
    load_metadata,
)
from megatron_datastates.files import names_in, open_regular, size_of
from megatron_datastates.format.directory import (
    COMMON_FILE,
    COMMON_STATE_KEY,
    METADATA_NAME,
    TORCH_DIST,
    TORCH_DIST_INDEX,
)
from megatron_datastates.pipeline.runs.runs import metadata_members

UNCOVERED = "index: no checksum in this format, its structure was checked"

_PROPERTIES = ["layout", bool, "_MEM_FORMAT_ENCODING", bool]  # after the dtype

# What every release of DCP writes of a class, and what only later ones do.
_ATTRIBUTES: dict[type, tuple[set[str], set[str]]] = {
    Metadata: ({"state_dict_metadata", "planner_data", "storage_data"}, {"storage_meta", "version"}),
    TensorStorage: ({"properties", "size", "chunks"}, set()),
    BytesStorage: (set(), set()),
    Chunk: ({"offsets", "sizes"}, set()),
    Index: ({"fqn", "index"}, {"offset"}),  # that of an object has none
    StorageInfo: ({"relative_path", "offset", "length"}, {"transform_descriptors"}),
    StorageMeta: ({"checkpoint_id", "save_id", "load_id"}, {"modules"}),
}
_MEGATRONS = {"mcore_data", "all_local_plans"}  # which some releases of Megatron add to Metadata
_SHARD = re.compile(r"(?P<key>.*)/shard_(?P<at>\d+(\.\d+)*)_(?P<of>\d+(\.\d+)*)", re.ASCII | re.DOTALL)
_VERSION = re.compile(r"\d+(\.\d+)*", re.ASCII)
_COMMON = {"common_backend", "common_backend_version"}  # both or none, by Megatron's release


def index_faults(directory: Path, records: Iterable[tuple[str, int | None, Record]]) -> Iterator[str]:
    """Yields what is wrong with `.metadata` and metadata.json of a checkpoint that could be opened.

    Args:
        records: where all fragments and objects lie.

    Raises:
        FormatError: torch would not load `.metadata`, or metadata.json is damaged.
        OSError: a file cannot be read.
    """
    path = directory / TORCH_DIST_INDEX
    metadata = load_metadata(path, strict=True)
    try:
        for fault in (*_class_faults(metadata), *_record_faults(metadata), *_planner_faults(metadata)):
            yield f"{path} is damaged: {fault}"
    except (AttributeError, TypeError, ValueError) as error:
        yield f"{path} is damaged: {error}"
    for fault in _shard_faults(metadata.state_dict_metadata):
        yield f"{path}: {fault}"
    yield from _overlaps(directory, records)
    yield from _config_faults(directory, COMMON_STATE_KEY in metadata.state_dict_metadata)


def unnamed_bytes(directory: Path, records: Iterable[tuple[str, int | None, Record]]) -> Iterator[str]:
    """Yields which files hold bytes that `.metadata` does not name. Raises OSError.

    That is no fault: where several ranks write the same tensor, DCP's index keeps one of them, and the bytes
    of the others stay in their files. Nothing says what they are, so nothing can check them.
    """
    named = _by_file(records)
    for name in sorted({*named, *(one for one in names_in(directory) if one.endswith(".distcp"))}):
        with open_regular(directory / name) as file:
            unnamed = size_of(file) - sum(record.bytes for _, record in named.get(name, []))
        if unnamed > 0:
            yield (
                f"{directory / name} has {unnamed} bytes that {TORCH_DIST_INDEX} does not name: no load "
                "reads them, and they were not checked"
            )


def unusual_keys(keys: Iterable[str]) -> Iterator[str]:
    """Yields which keys no program is likely to have meant. They load: that is no fault."""
    for key in keys:
        if not key.isprintable():
            yield f"the key {key!r} has control characters: if no program chose it so, it is damaged"


def _class_faults(metadata: Metadata) -> Iterator[str]:
    yield from _attribute_faults(metadata)
    for key, entry in metadata.state_dict_metadata.items():
        yield from _attribute_faults(entry)
        if isinstance(entry, TensorStorage):
            for chunk in entry.chunks:
                yield from _attribute_faults(chunk)
            yield from _property_faults(key, entry.properties)
    for index, info in metadata.storage_data.items():
        yield from _attribute_faults(index)
        yield from _attribute_faults(info)
        if index.index is not None and not isinstance(index.index, int):
            yield f"{index.fqn!r} has the number {index.index!r}, expected an integer"
    meta, version = metadata.storage_meta, metadata.version
    if meta is not None:
        yield from _attribute_faults(meta)
    if version is not None and not (isinstance(version, str) and _VERSION.fullmatch(version)):
        yield f"its version is {version!r}"


def _attribute_faults(value: Any) -> Iterator[str]:
    """Yields attributes that are missing. An unknown one beside all known is of a later release."""
    if not isinstance(value, tuple(_ATTRIBUTES)):
        yield f"it has an object {type(value).__name__} in a place where DCP has none"
        return
    (required, later), found = _ATTRIBUTES[type(value)], vars(value).keys()
    unknown = found - required - later - _MEGATRONS
    missing = required - found or (later - found if unknown else set())
    if missing:
        seen = f", and has {', '.join(map(repr, sorted(map(str, unknown))))}" if unknown else ""
        yield f"an object {type(value).__name__} lacks {', '.join(sorted(missing))}{seen}"


def _property_faults(key: str, properties: Any) -> Iterator[str]:
    others = properties.others if isinstance(properties, Properties) else ()
    kinds = [one.of if isinstance(one, Member) else type(one) for one in others]
    before, strides = kinds[:4], kinds[4:]  # from torch 2.15 on
    if before != _PROPERTIES or strides not in ([], [tuple], [type(None)]):
        yield f"tensor {key!r} has properties {others}, expected DCP's five or six"


def _record_faults(metadata: Metadata) -> Iterator[str]:
    """Yields where what there is and where it lies differ."""
    wanted: set[tuple[Any, Any]] = set()
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorage):
            wanted |= {(key, tuple(chunk.offsets)) for chunk in entry.chunks}
        else:
            wanted.add((key, None))
    recorded = {(one.fqn, None if one.offset is None else tuple(one.offset)) for one in metadata.storage_data}
    # A whole tensor has an offset of zeros, and none in old releases.
    whole = {(key, offset) for key, offset in wanted - recorded if offset is not None and not any(offset)}
    old = {(key, None) for key, _ in whole} & recorded
    missing = wanted - recorded - {one for one in whole if (one[0], None) in old}
    for key, offset in sorted(missing, key=str):
        yield f"{key!r}{_at(offset)} has no place"
    for key, offset in sorted(recorded - wanted - old, key=str):
        yield f"there is a place for {key!r}{_at(offset)}, which is not in the checkpoint"


def _at(offset: Any) -> str:
    return "" if offset is None else f" at {offset}"


def _planner_faults(metadata: Metadata) -> Iterator[str]:
    """Yields where DCP's own planner names a key otherwise than by the path to it in the saved state."""
    data = metadata.planner_data
    odd = [key for key in data if not isinstance(key, str)] if isinstance(data, dict) else []
    if odd:
        yield f"its planner has a path of {odd[0]!r}, expected a key"
    for key, path in (paths_of(metadata) or {}).items():
        if key not in metadata.state_dict_metadata or ".".join(map(str, path)) != key:
            yield f"its planner has the path {path} of {key!r}, which is not in the checkpoint"


def paths_of(metadata: Metadata) -> dict[str, tuple[str | int, ...]] | None:
    """Returns the path of each key in the nested state, as DCP's own planner saves it; None of any other."""
    data = metadata.planner_data
    if not isinstance(data, dict) or not data:
        return None
    plain = all(
        isinstance(key, str)
        and isinstance(path, tuple)
        and all(isinstance(part, str | int) and not isinstance(part, bool) for part in path)
        for key, path in data.items()
    )
    return dict(data) if plain else None


def _shard_faults(keys: Mapping[str, Any]) -> Iterator[str]:
    """Yields objects of Megatron's of which a rank's part is missing."""
    parts: dict[tuple[str, str], int] = collections.Counter()
    for key, entry in keys.items():
        match = _SHARD.fullmatch(key) if isinstance(entry, BytesStorage) else None
        if match is None:
            continue
        shape = [int(number) for number in match["of"].split(".")]
        at = [int(number) for number in match["at"].split(".")]
        if len(at) != len(shape) or any(number >= size for number, size in zip(at, shape, strict=True)):
            yield f"the object {key!r} is beyond the number of its parts"
        parts[match["key"], match["of"]] += 1
    for (key, of), count in parts.items():
        expected = math.prod(int(number) for number in of.split("."))
        if count != expected:
            yield f"the object {key!r} has {count} of its {expected} parts"


def _by_file(records: Iterable[tuple[str, int | None, Record]]) -> dict[str, list[tuple[str, Record]]]:
    """Returns the records of each file, in its order."""
    found: dict[str, list[tuple[str, Record]]] = collections.defaultdict(list)
    for key, _, record in records:
        found[record.file].append((key, record))
    return {name: sorted(places, key=lambda one: one[1].offset) for name, places in sorted(found.items())}


def _overlaps(directory: Path, records: Iterable[tuple[str, int | None, Record]]) -> Iterator[str]:
    for name, places in _by_file(records).items():
        end, previous = 0, ""
        for key, record in places:
            if record.bytes and record.offset < end:
                yield f"{directory / name}: {key!r} overlaps {previous!r}, as {TORCH_DIST_INDEX} has them"
            if record.offset + record.bytes > end:
                end, previous = record.offset + record.bytes, key


def _config_faults(directory: Path, has_common_state: bool) -> Iterator[str]:
    """Yields what Megatron would not accept in metadata.json. DCP's own checkpoints have no such file."""
    members = metadata_members(directory)
    if not members:
        return
    unknown = members.keys() - _COMMON - {"sharded_backend", "sharded_backend_version"}
    is_whole = "sharded_backend_version" in members and members.keys() & _COMMON in (set(), _COMMON)
    if unknown and not is_whole:  # an unknown one beside all known is of a later release
        names = ", ".join(map(repr, sorted(unknown)))
        yield f"{directory / METADATA_NAME} has {names}, which Megatron refuses"
    if "common_backend" in members and not has_common_state and not (directory / COMMON_FILE).is_file():
        yield f"{directory / COMMON_FILE} is missing"
    format = members.get("sharded_backend"), members.get("sharded_backend_version", 1)
    if format != (TORCH_DIST, 1):
        yield f"{directory / METADATA_NAME} names {format}, expected {(TORCH_DIST, 1)}"
