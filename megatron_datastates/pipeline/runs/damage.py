"""What is wrong with a checkpoint, in words that name its files, the ranks that wrote them, and keys.

Belongs here: texts of errors. Does not belong here: finding that something is wrong.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import DataStatesError, some_of
from megatron_datastates.files import is_object, names_in
from megatron_datastates.format.directory import TORCH_DIST_INDEX, iteration_in_name
from megatron_datastates.format.footer import Footer
from megatron_datastates.format.index import Index
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.tables import Words
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.format.values import BLOCK_BYTES, MANIFEST_NAME, is_of_a_checkpoint

_MOST_NAMED = 4  # of what is corrupt, in one message
_MOST_LOOKED_AT = 1000  # directories below one that is no checkpoint


class OpenFiles(Protocol):
    """What a description needs of an open checkpoint."""

    manifest: Manifest
    index: Index

    def file_path(self, file: int) -> Path: ...
    def footer(self, file: int) -> Footer: ...


def what_rank_wrote(manifest: Manifest, index: Index, file: int) -> str:
    """Names the rank of a data file, and keys of what is in it."""
    tensors = (key for key, entry in readable_tensors(index) if file in entry.files)
    others = (
        key for places in (index.objects, index.streams) for key, holder in places.items() if holder == file
    )
    return f"Rank {manifest.files[file].rank} wrote {_listed([*tensors, *others])} to it"


def readable_tensors(
    index: Index, errors: dict[str, DataStatesError] | None = None
) -> Iterator[tuple[str, TensorEntry]]:
    """Yields tensors whose entries can be read: a bad entry must not hide what a message says of others.

    Args:
        errors: gets those of the others.
    """
    with contextlib.suppress(DataStatesError):  # one read of the index, not one for each key
        index.preload(index.tensors)
    for key in index.tensors:
        try:
            entry = index.tensors[key]
        except DataStatesError as error:
            if errors is not None:
                errors[key] = error
            continue
        yield key, entry


def describe_blocks(checkpoint: OpenFiles, bad_blocks: Sequence[tuple[int, int]]) -> str:
    """Names what is in blocks whose checksums differ, each (file, block), by file."""
    by_file: dict[int, list[int]] = defaultdict(list)
    for file, block in bad_blocks:
        by_file[file].append(block)
    described = [
        describe_in_file(checkpoint, file, blocks) for file, blocks in list(by_file.items())[:_MOST_NAMED]
    ]
    more = f" So are {len(by_file) - _MOST_NAMED} more files." if len(by_file) > _MOST_NAMED else ""
    these = "this block" if len(bad_blocks) == 1 else "these blocks"
    return (
        f"{' '.join(described)}{more} Nothing from {these} was used: "
        "load an older checkpoint, or restore what is corrupt."
    )


def describe_in_file(checkpoint: OpenFiles, file: int, blocks: Sequence[int]) -> str:
    """Names a data file, the rank that wrote it, and what is in its blocks whose checksums differ."""
    places = some_of([str(block * BLOCK_BYTES) for block in blocks], _MOST_NAMED)
    keys = _listed(keys_in_blocks(checkpoint, file, blocks))
    rank = checkpoint.manifest.files[file].rank
    where = f"{checkpoint.file_path(file)}, which rank {rank} wrote, is corrupt:"
    if len(blocks) == 1:
        return (
            f"{where} the 1 MiB block at byte offset {places} has a wrong checksum. It holds data of {keys}."
        )
    return (
        f"{where} the 1 MiB blocks at byte offsets {places} have wrong checksums. They hold data of {keys}."
    )


def keys_in_blocks(checkpoint: OpenFiles, file: int, blocks: Sequence[int]) -> list[str]:
    """Returns the names of tensors, objects and streams with bytes in these blocks of a data file."""
    bad, footer = np.array(sorted(blocks), np.int64), checkpoint.footer(file)
    keys = []
    for key, entry in readable_tensors(checkpoint.index):
        mine = entry.files == file
        starts, sizes = stored_extents(
            entry.file_offsets[mine], entry.file_bytes[mine], entry.encoded, footer
        )
        if touches(starts, starts + sizes, bad):
            keys.append(key)
    for one in footer.entries:
        if one.name and touches(one.offset, one.offset + one.stored_bytes, bad):
            keys.append(one.name)
    return keys


def stored_extents(
    places: Words, sizes: Words, encoded: bool, footer: Footer
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the offsets and stored bytes of fragments of one data file.

    Args:
        places, sizes: as TensorEntry has them. An encoded fragment that the footer lacks has no bytes.
    """
    if not encoded:
        return places.astype(np.int64), sizes.astype(np.int64)
    none = np.array([(0, 0)], np.int64)
    known = np.array([(entry.offset, entry.stored_bytes) for entry in footer.fragments], np.int64)
    table = np.concatenate([known.reshape(-1, 2), none])
    found = table[np.minimum(places, np.uint64(len(known))).astype(np.int64)]
    return found[:, 0], found[:, 1]


def why_no_checkpoint(path: Path) -> str:
    """Says what is in a directory that has no manifest."""
    try:
        names = names_in(path)
    except FileNotFoundError:
        return f"{path} does not exist"
    except NotADirectoryError:
        return f"{path} is not a directory"
    except OSError as error:
        return f"{path} cannot be listed: {error.strerror}"
    if MANIFEST_NAME in names:
        return f"{path / MANIFEST_NAME} cannot be read, or is not a file"
    if any(map(is_of_a_checkpoint, names)):
        return (
            f"{path} holds an unfinished datastates checkpoint: it has data files but no {MANIFEST_NAME}, "
            "so its save was killed or failed. Load an older one; if only the manifest was lost, "
            "`datastates repair` makes it anew."
        )
    if TORCH_DIST_INDEX in names:
        return (
            f"{path} holds a checkpoint of torch_dist or DCP, not a datastates one: load it with DCP's "
            "FileSystemReader, or convert it with `datastates convert`; the other commands read both"
        )
    iterations = [(iteration, name) for name in names if (iteration := iteration_in_name(name)) is not None]
    if iterations:
        return (
            f"{path} is the directory of a run, and each iteration in it is a checkpoint: choose one, as "
            f"{path / max(iterations)[1]}"
        )
    below = [] if is_object(path) else sorted(names)[:_MOST_LOOKED_AT]
    for name in below:  # directories that a program has named, with `ds.save`
        with contextlib.suppress(OSError):  # it may be another user's
            if (path / name / MANIFEST_NAME).is_file():
                return f"{path} is no checkpoint, but has some in it: choose one, as {path / name}"
    return f"{path} holds no datastates checkpoint: there is no {MANIFEST_NAME} in it"


def _listed(keys: Sequence[str]) -> str:
    return some_of([repr(key) for key in keys], _MOST_NAMED) or "no tensor"


def touches(starts: np.ndarray | int, ends: np.ndarray | int, blocks: np.ndarray) -> bool:
    """Returns whether bytes from `starts` to `ends` lie in any of the blocks, which are sorted."""
    first = np.searchsorted(blocks, starts // BLOCK_BYTES)
    last = np.searchsorted(blocks, (ends - 1) // BLOCK_BYTES, side="right")
    return bool(np.any((last > first) & (ends > starts)))
