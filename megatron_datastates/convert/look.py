"""What the directories of a run show without reading data: which are complete, how large, of how many ranks.

Names and sizes of all files are compared with our manifest, or with DCP's `.metadata`. Damaged bytes in a
file of the right size are found by `datastates verify` only. Nothing here needs torch or numpy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import re
from collections.abc import Set
from pathlib import Path

import msgspec

from megatron_datastates import stores
from megatron_datastates.convert.sources.dcp_index import Record, Records, records_of, required_bytes
from megatron_datastates.convert.sources.pickles import load_metadata
from megatron_datastates.convert.stored_arguments import arguments_in, parallel_sizes
from megatron_datastates.errors import DataStatesError, FormatError, describe_error, some_of
from megatron_datastates.files import (
    MANIFEST_BYTES,
    METADATA_BYTES,
    OBJECT_BYTES,
    folders_in,
    is_denied,
    is_object,
    names_in,
    open_regular,
    read_regular,
)
from megatron_datastates.format.directory import (
    ARGUMENTS_KEY,
    BACKEND,
    COMMON_FILE,
    COMMON_STATE_KEY,
    LEGACY,
    METADATA_NAME,
    REMOVAL_NAME,
    TORCH_DIST,
    TORCH_DIST_INDEX,
    iteration_in_name,
)
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, digest_in_index_name, is_dcp_file_name
from megatron_datastates.pipeline.publishing.presence import missing_files
from megatron_datastates.pipeline.runs.branches import Point, point_of
from megatron_datastates.pipeline.runs.history import abandoned_among
from megatron_datastates.pipeline.runs.run_folders import checkpoint_directories, is_checkpoint_name
from megatron_datastates.pipeline.runs.runs import format_seen, metadata_members, stored_backend, stored_bytes
from megatron_datastates.pipeline.runs.tracker import tracked_name

COMPLETE, UNFINISHED, DAMAGED, UNREADABLE = "complete", "unfinished", "damaged", "unreadable"
_MEGATRONS_KEYS = (COMMON_STATE_KEY, ARGUMENTS_KEY)
_MOST_PARSED_BYTES = 16 << 20  # of `.metadata`, which takes a second for 7 MB; of a larger one only names
_MOST_NAMED = 3
_PLAIN = (
    f"it has no {METADATA_NAME}, as PyTorch writes none: its own loads need none, and Megatron's of "
    f"{TORCH_DIST} do not take it"
)
_OF_DCP = (
    f"it has no {METADATA_NAME}, as Megatron saved it through PyTorch's DCP, which writes none: Megatron "
    f"loads it with the --ckpt-format of that run, such as fsdp_dtensor, and not with {TORCH_DIST}"
)
_DROPPED = (
    "without its optimizer, which `datastates prune --drop-optimizer` removed: load it with --no-load-optim"
)
_DROPPED_OF_DCP = (
    "without its optimizer, which `datastates prune --drop-optimizer` removed: `datastates export`, ds.load "
    "and DCP read the weights; Megatron-FSDP with --bf16 or --fp16 does not start from them"
)
_EMPTY = (
    "it is empty: its save has just begun, or has failed, or only near tiers have it so far (--near DIR "
    "lists what that of a node has)"
)
_DISTCP_NAMES = re.compile(rb"[\w.-]+\.distcp")


@dataclasses.dataclass
class Look:
    """One checkpoint of a run, as far as names and sizes of its files show."""

    path: Path
    iteration: int | None  # None: it has another name, such as `release`
    format: str  # as --ckpt-format names it; "unknown" where nothing says
    state: str  # COMPLETE, UNFINISHED, DAMAGED or UNREADABLE, which says nothing about it
    bytes: int  # of all its files
    created: str  # UTC, ISO 8601; empty if it cannot be seen
    tracked: bool = False  # the run's tracker names it
    problem: str | None = None  # what is wrong
    note: str | None = None  # what is unusual, and does no harm
    ranks: int | None = None
    parallel: dict[str, int] = dataclasses.field(default_factory=dict)  # sizes of the parallel groups
    abandoned: bool = False  # known to be of a branch that a later job has left; not the tracked one
    point: Point | None = None  # where it stands in the run's history, if its manifest says so
    resumed: tuple[int, ...] = ()  # iterations that its job and the jobs before it resumed from; oldest first


class _FoundError(Exception):
    """Ends a look: a state other than COMPLETE, and what is wrong."""


def look_at_run(run: Path) -> list[Look]:
    """Looks at all checkpoints of a run, in order. A tracker that cannot be read names none.

    Raises:
        OSError: the run cannot be listed.
    """
    try:
        tracked = tracked_name(run)
    except DataStatesError:
        tracked = None
    looks = [look_at(path, tracked=path.name == tracked) for path in checkpoint_directories(run)]
    points = {look.path.name: look.point for look in looks if look.point is not None}
    left = abandoned_among(run, points, tracked)
    for look in looks:
        look.abandoned = look.path.name in left and not look.tracked
    return looks


def look_at_others(folder: Path) -> list[Look]:
    """Looks at a folder's checkpoints that have names of their own, such as `step_7`, in the order of names.

    A directory that cannot be listed may be one, and is there as UNREADABLE.

    Raises:
        OSError: the folder cannot be listed.
    """
    names = sorted(folders_in(folder, lambda name: not is_checkpoint_name(name)), key=_with_numbers)
    paths = [folder / name for name in names]
    return [look_at(path) for path in paths if format_seen(path) != "unknown" or _is_hidden(path)]


def _is_hidden(path: Path) -> bool:
    try:
        names_in(path)
    except OSError as error:
        return is_denied(error)
    return False


def _with_numbers(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts `step_10` after `step_9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def look_at(path: Path, *, tracked: bool = False, records: Records | None = None) -> Look:
    """Looks at one checkpoint. Damage is a part of the answer, and raises nothing.

    Args:
        records: of DCP's `.metadata`, if it has been read.
    """
    format = format_seen(path)
    look = Look(path, iteration_in_name(path.name), format, COMPLETE, 0, "", tracked)
    try:
        look.bytes, look.created = stored_bytes(path), _changed(path)
        names_in(path)  # an error is a permission that lacks
        if format == BACKEND:
            _look_at_ours(look)
        elif format == TORCH_DIST:
            _look_at_torch_dist(look, _MOST_PARSED_BYTES, records)
        else:
            _look_at_other(look)
    except _FoundError as found:
        look.state, look.problem = found.args
    except (DataStatesError, OSError) as error:
        look.state = UNREADABLE if is_denied(error) else DAMAGED
        look.problem = describe_error(error)
    return look


def _look_at_ours(look: Look) -> None:
    try:
        data = read_regular(look.path / MANIFEST_NAME, MANIFEST_BYTES)
    except FileNotFoundError:
        raise _FoundError(UNFINISHED, _unpublished(look.path)) from None
    manifest = Manifest.decode(data, str(look.path / MANIFEST_NAME))
    look.created, look.ranks, look.parallel = manifest.created, manifest.world_size, manifest.parallel
    if look.iteration is not None:
        look.point = point_of(manifest, look.iteration)
    if manifest.ancestors is not msgspec.UNSET:
        look.resumed = tuple(one.iteration for one in manifest.ancestors if one.iteration)
    others = {other.name: other.bytes for other in manifest.others}
    wrong = missing_files(look.path, manifest) + [
        name for name, size in others.items() if _size(look.path / name) != size
    ]
    if wrong:
        raise _FoundError(DAMAGED, f"missing or of another size: {some_of(wrong, _MOST_NAMED)}")
    metadata_members(look.path)  # which Megatron reads, too: FormatError if it is damaged
    is_megatrons = bool(manifest.parallel) or is_checkpoint_name(look.path.name)
    is_dcps = any(map(is_dcp_file_name, others))  # as Megatron-FSDP's, with which it writes none
    notes = [_DROPPED_OF_DCP if is_dcps else _DROPPED] if manifest.is_without_optimizer else []
    if is_megatrons and not is_dcps and not (look.path / METADATA_NAME).exists():
        notes.append(f"only {METADATA_NAME} is missing: it loads all the same")
    look.note = "; ".join(notes) or None


def _unpublished(path: Path) -> str:
    if any(map(digest_in_index_name, names_in(path))):
        return f"it has no {MANIFEST_NAME}: `datastates repair {path}` makes it if all data is there"
    return "its save did not finish"


def fault_of_torch_dist(path: Path) -> str | None:
    """Returns what is wrong with a checkpoint of torch_dist, as far as names and sizes of its files show.

    Compares the sizes of all files, however large `.metadata` is.

    Raises:
        FormatError: its index is damaged.
        OSError: something cannot be read.
    """
    try:
        _look_at_torch_dist(Look(path, None, TORCH_DIST, COMPLETE, 0, ""), METADATA_BYTES)
    except _FoundError as found:
        return f"{found.args[0]}: {found.args[1]}"
    return None


def _look_at_torch_dist(look: Look, most_parsed_bytes: int, records: Records | None = None) -> None:
    if is_object(look.path):
        raise _FoundError(UNREADABLE, f"{TORCH_DIST} is not read from object stores: copy it to a directory")
    index, is_marked = look.path / TORCH_DIST_INDEX, stored_backend(look.path) is not None
    size = _size(index)
    if size is None:
        raise _FoundError(*_without_index(look.path, is_marked))
    if records is None and size > most_parsed_bytes:
        keys = _require_named_files(look, index)
    else:
        records = _records(index) if records is None else records
        _require_sizes(look, required_bytes(one for found in records.values() for one in found.values()))
        common = next(iter(records.get(COMMON_STATE_KEY, {}).values()), None)
        if common is None:
            _require_common_file(look.path)
            common = next(iter(records.get(ARGUMENTS_KEY, {}).values()), None)
        _describe(look, common)
        keys = records.keys()
    if is_marked:
        return
    if _is_megatrons(look.path, keys):
        raise _FoundError(
            UNFINISHED,
            f"only {METADATA_NAME} is missing, without which Megatron does not load it: "
            f'{{"sharded_backend": "{TORCH_DIST}", "sharded_backend_version": 1}}',
        )
    look.note = "; ".join(filter(None, (look.note, _OF_DCP if ARGUMENTS_KEY in keys else _PLAIN)))


def _is_megatrons(path: Path, keys: Set[str]) -> bool:
    """Returns whether Megatron's torch_dist has written a checkpoint, of which no file says so."""
    # Megatron's torch_dcp and fsdp_dtensor write what PyTorch does, with the training arguments in it.
    is_named = is_checkpoint_name(path.name) and ARGUMENTS_KEY not in keys
    return is_named or COMMON_STATE_KEY in keys or (path / COMMON_FILE).is_file()


def _without_index(path: Path, is_marked: bool) -> tuple[str, str]:
    if (path / REMOVAL_NAME).exists():
        return UNFINISHED, "`datastates prune` was ended while it removed it: call that again"
    if is_marked:
        return DAMAGED, f"{TORCH_DIST_INDEX} is missing"
    return UNFINISHED, "its save did not finish"


def _require_common_file(path: Path) -> None:
    """Requires the file of the common state, if Megatron says that it wrote one, as before 0.19."""
    if "common_backend" in metadata_members(path) and not (path / COMMON_FILE).is_file():
        raise _FoundError(DAMAGED, f"{COMMON_FILE} is missing")


def _records(index: Path) -> Records:
    try:
        return records_of(load_metadata(index), index)
    except (AttributeError, TypeError, ValueError) as error:
        raise FormatError(f"{index} is damaged: {error}") from error


def _require_sizes(look: Look, wanted: dict[str, int]) -> None:
    sizes = {name: _size(look.path / name) for name in sorted(wanted)}
    wrong = [
        f"{name} is missing" if size is None else f"{name} has {size} bytes, expected at least {wanted[name]}"
        for name, size in sizes.items()
        if size is None or size < wanted[name]
    ]
    if wrong:
        raise _FoundError(DAMAGED, some_of(wrong, _MOST_NAMED))


def _require_named_files(look: Look, index: Path) -> Set[str]:
    """Looks for the files that a large `.metadata` names, without parsing it.

    Returns which of the keys that Megatron's checkpoints have are there.
    """
    data = read_regular(index, METADATA_BYTES)
    names = {name.decode() for name in _DISTCP_NAMES.findall(data)}
    missing = sorted(names - set(names_in(look.path)))
    if missing:
        raise _FoundError(DAMAGED, f"missing: {some_of(missing, _MOST_NAMED)}")
    look.note = f"sizes were not compared, as {TORCH_DIST_INDEX} is large"
    return {key for key in _MEGATRONS_KEYS if any(length + key.encode() in data for length in _lengths(key))}


def _lengths(key: str) -> tuple[bytes, bytes]:
    """Returns what a pickle has before a string: BINUNICODE or SHORT_BINUNICODE, and its length."""
    return b"X" + len(key).to_bytes(4, "little"), b"\x8c" + bytes([len(key)])


def _describe(look: Look, record: Record | None) -> None:
    """Fills in ranks and parallelism. That they cannot be read is no damage that names and sizes show.

    Args:
        record: of the common state, or of the arguments alone; None where it is in a file of its own.
    """
    with contextlib.suppress(DataStatesError, OSError):
        if record is None:
            data = read_regular(look.path / COMMON_FILE, OBJECT_BYTES)
        else:
            with open_regular(look.path / record.file) as file:
                file.seek(record.offset)
                data = file.read(record.bytes)
        arguments = arguments_in(data, str(look.path))
        ranks = arguments.get("world_size")
        look.ranks = ranks if isinstance(ranks, int) else None
        look.parallel = parallel_sizes(arguments)


def _look_at_other(look: Look) -> None:
    if not names_in(look.path):
        raise _FoundError(UNFINISHED, _EMPTY)
    if look.format == LEGACY:
        raise _FoundError(UNREADABLE, "it is of Megatron's legacy format, which only Megatron reads")
    if stored_backend(look.path) is None:
        raise _FoundError(UNFINISHED, "it holds no checkpoint of a known format")


def _changed(path: Path) -> str:
    """Returns when a checkpoint was finished: metadata.json is written last."""
    try:
        at = (path / METADATA_NAME).stat().st_mtime
    except OSError:
        if is_object(path):
            at = max((one.changed_at for one in stores.objects_below(path)), default=0.0)
        else:
            at = path.stat().st_mtime
    when = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return when.isoformat(timespec="seconds")


def _size(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return None
