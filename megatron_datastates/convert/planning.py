"""Plans a conversion: checks all that can be checked before writing, and assigns fragments to files."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
from collections.abc import Sequence, Set
from pathlib import Path

from megatron_datastates.convert.sinks.datastates import DataStatesSink
from megatron_datastates.convert.sinks.target import refuse_target
from megatron_datastates.convert.sinks.torch_dist import TorchDistSink
from megatron_datastates.convert.sources.source import RankContents, Source
from megatron_datastates.convert.team import Team
from megatron_datastates.convert.uploads import refuse_object_target
from megatron_datastates.errors import FormatError, OptionError, StorageError
from megatron_datastates.files import folders_in, is_object, real_path, require_utf8
from megatron_datastates.format.directory import METADATA_NAME, TORCH_DIST_INDEX
from megatron_datastates.plan.coverage import coverage_faults

FORMATS = (DataStatesSink.format, TorchDistSink.format)
_MOST_FAULTS_LISTED = 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion that is about to run; the same on every rank."""

    source: Source
    target: Path
    format: str
    files: list[RankContents]  # one for each file of the target, in order of its ranks
    bytes: int  # of all tensors
    scratch: Path | None = None  # for a target in an object store: a directory of this process

    @property
    def work_directory(self) -> Path:
        """Returns the directory that everything is written to before it gets the target's name."""
        if self.scratch is not None:
            return self.scratch / self.target.name
        return _work_directory(self.target)

    def files_of(self, team: Team) -> range:
        """Returns the numbers of the files that this process writes."""
        return range(team.rank, len(self.files), team.size)


def _work_directory(target: Path) -> Path:
    return target.parent / f".{target.name}.converting"


def default_format(source_format: str, target: Path) -> str:
    """Returns the format that a checkpoint is converted to unless another one is requested."""
    if is_object(target):
        return DataStatesSink.format
    return next(name for name in FORMATS if name != source_format)


def plan_conversion(source: Source, target: Path, *, format: str = "", ranks: int = 0) -> Plan:
    """Plans a conversion and checks that it can be done; writes nothing.

    Args:
        format: format of the target (default: the one that the source does not have).
        ranks: number of files to distribute whole fragments over, balanced by bytes. With 0, each file holds
            what one rank of the source stored.

    Raises:
        OptionError: the format cannot be written, or cannot hold the source's streams, or `ranks` is
            negative.
        StorageError: the target exists, lies inside the source or has too little space, the source is where
            the target is made, one of its files is missing or truncated, or one of its directories is a
            symbolic link.
        FormatError: the source is damaged.
        CorruptDataError: one of its other files, such as common.pt, is not the one that was saved.
    """
    format = format or default_format(source.format, target)
    if format not in FORMATS:
        raise OptionError(f"format {format!r} cannot be written: expected one of {', '.join(FORMATS)}")
    if ranks < 0:
        raise OptionError(f"--ranks {ranks}: expected 1 or more, or 0 for one file per rank of the source")
    require_utf8(target)
    if is_object(target) and format != DataStatesSink.format:
        raise OptionError(
            f"{target} is in an object store: expected a directory of a file system for {format}. Convert "
            f"to one, and copy it to the store, {TORCH_DIST_INDEX} and then {METADATA_NAME} last; or choose "
            f"--to {DataStatesSink.format}"
        )
    place, read = real_path(target), real_path(source.directory)
    if place == read:
        raise StorageError(f"{target} is the source itself: choose another target")
    if place.is_relative_to(read):
        raise StorageError(f"{target} lies inside its source, {source.directory}: choose another target")
    if not is_object(target) and not is_object(read):
        _refuse_source_at(_work_directory(target), target, read)
    source.read_metadata()  # which a sink writes last; a damaged one is refused here
    _refuse_streams(source, format)
    _refuse_endless_links(source)
    _require_coverage(source)
    source.note_files()
    source.require_files()
    for name in source.other_files:
        source.check_other(name)
    files = source.stored_by_rank()
    if ranks:
        files = _distribute(source, files, ranks)
    tensor_bytes = sum(source.fragment(*one).bytes for file in files for one in file.fragments)
    needed = tensor_bytes + sum(source.object_bytes(key) for key in source.objects)
    needed += sum(source.stream_bytes(key) for key in source.streams)
    if is_object(target):
        refuse_object_target(target, needed, [*source.other_files, *source.other_directories])
    else:
        refuse_target(target, needed, makes_parents=True)
    return Plan(source, target, format, files, tensor_bytes)


def _refuse_source_at(work_directory: Path, target: Path, source: Path) -> None:
    """Raises StorageError if the source is in the directory that is emptied first, as after a kill."""
    with contextlib.suppress(OSError):  # there is none, or making it says what is wrong
        made = work_directory.stat()
        if any(os.path.samestat(made, one.stat()) for one in (source, *source.parents)):
            raise StorageError(
                f"{source} is in {work_directory}, where {target} is made: rename it, or choose another "
                "target"
            )


def _refuse_streams(source: Source, format: str) -> None:
    if source.streams and format != DataStatesSink.format:
        some = ", ".join(map(repr, source.streams[:_MOST_FAULTS_LISTED]))
        raise OptionError(
            f"{source.directory} has streams, such as {some}, and {format} holds none: "
            f"choose --to {DataStatesSink.format}"
        )


def _refuse_endless_links(source: Source) -> None:
    """Raises StorageError for a link to a directory that it is in: a copy would have no end."""
    if not is_object(source.directory):
        for name in source.other_directories:
            _refuse_endless(source.other_path(name), {os.path.realpath(source.directory)})


def _refuse_endless(directory: Path, above: Set[str]) -> None:
    real = os.path.realpath(directory)
    if real in above:
        raise StorageError(
            f"{directory} is a symbolic link to a directory that it is in, and a conversion copies what "
            "links name: remove it"
        )
    for name in folders_in(directory):
        _refuse_endless(directory / name, above | {real})


def _require_coverage(source: Source) -> None:
    faults = [fault for key, entry in source.tensors.items() for fault in coverage_faults(key, entry)]
    for key, entry in source.tensors.items():
        if not len(entry.offsets) and 0 in entry.global_shape:  # nothing of it would be written
            faults.append(
                f"tensor {key!r} of shape {entry.global_shape} has no fragment, expected an empty one"
            )
    if faults:
        raise FormatError(f"{source.directory} is damaged: {'; '.join(faults[:_MOST_FAULTS_LISTED])}")


def _distribute(source: Source, files: Sequence[RankContents], ranks: int) -> list[RankContents]:
    """Assigns each fragment, the largest first, to the file with the fewest bytes; keeps order in a file."""
    fragments = [fragment for file in files for fragment in file.fragments]
    sizes = [source.fragment(*fragment).bytes for fragment in fragments]
    # More files than fragments, objects and streams would be empty.
    ranks = min(ranks, len(fragments) + sum(len(file.objects) + len(file.streams) for file in files))
    assigned, heap = [0] * len(fragments), [(0, rank) for rank in range(ranks)]  # heap of (bytes, rank)
    for i in sorted(range(len(fragments)), key=lambda i: (-sizes[i], i)):
        held, assigned[i] = heap[0]
        heapq.heapreplace(heap, (held + sizes[i], assigned[i]))
    distributed = [RankContents([], []) for _ in range(ranks)]
    for fragment, rank in zip(fragments, assigned, strict=True):
        distributed[rank].fragments.append(fragment)
    for n, key in enumerate(key for file in files for key in file.objects):
        distributed[n % ranks].objects.append(key)
    for n, key in enumerate(key for file in files for key in file.streams):
        distributed[-1 - n % ranks].streams.append(key)
    return [file for file in distributed if not file.is_empty]
