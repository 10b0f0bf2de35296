"""Rebuilds a lost or damaged manifest from the data files and the index, and from nothing else.

Three things together prove that a directory holds one complete save, durable on every rank:
  1. all data files in it belong to one save and one world size, and each has its footer, which is written
     only when no source can have changed before it was copied. Where a checkpoint shares files of earlier
     saves, only its manifest says which: without it, a left-over of the same layout could take their place.
     So files of several saves are refused, and the message says which of them fit together;
  2. the parts of an index have exactly the digests that the footers name, file for file. An index is written
     only after all ranks are durable, and it says which files there are: a rank without a file stored
     nothing;
  3. the checks of `verify` with this manifest: every block's checksum, every extent, no hole, no overlap.
Without these proofs nothing is written. What the files do not say is left out of the new manifest, and noted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from megatron_datastates.config import Options
from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.engine.reader import read_footer, read_small
from megatron_datastates.errors import (
    DataStatesError,
    FormatError,
    NotACheckpointError,
    RepairRefusedError,
    StorageError,
    UnsafeObjectError,
    describe_error,
)
from megatron_datastates.files import (
    INDEX_BYTES,
    MANIFEST_BYTES,
    OBJECT_BYTES,
    is_object,
    names_in,
    path_of,
    sha256_of,
)
from megatron_datastates.format.directory import (
    BACKEND,
    COMMON_FILE,
    COMMON_STATE_KEY,
    ITERATION_KEY,
    METADATA_NAME,
    REMOVAL_NAME,
    TORCH_DIST_INDEX,
    is_through_dcp,
    iteration_in_name,
)
from megatron_datastates.format.features import COMPATIBLE_CHECKSUMS
from megatron_datastates.format.footer import Footer
from megatron_datastates.format.index import Index, index_entry
from megatron_datastates.format.manifest import DROPPED, REPAIRED, FileEntry, IndexEntry, Manifest, OtherFile
from megatron_datastates.format.values import (
    MANIFEST_NAME,
    SaveId,
    digest_in_index_name,
    is_data_file_name,
    is_dcp_file_name,
    is_of_optimizer,
    save_id_in_name,
)
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publishing.documents import releases
from megatron_datastates.pipeline.runs.runs import metadata_members, stored_backend
from megatron_datastates.pipeline.upkeep.verify import Progress, extra_names, verify_checkpoint
from megatron_datastates.providers.members import check_archive

_MAX_LISTED = 3
_WITHOUT_FACTS = (
    "Without it, Megatron-FSDP cannot resume: restore it from a copy, or load another checkpoint of the run"
)
_ANY_FILES = 1 << 32  # the number of files is checked after decoding


@dataclasses.dataclass(frozen=True)
class Repair:
    """The new manifest, and notes about what it lacks or could not be proven."""

    manifest: Manifest
    bytes_checked: int
    notes: list[str]


def repair(
    directory: str | os.PathLike[str],
    *,
    progress: Progress = lambda bytes_done: None,
    options: Options | None = None,
) -> Repair:
    """Writes a manifest for the one complete save in `directory`, which has none or a damaged one.

    Raises:
        NotACheckpointError: no data file of ours is there.
        UnsupportedFormatError: a file was written by a later release.
        RepairRefusedError: the manifest is undamaged, or it is not proven that a complete save is there.
        StorageError: a file cannot be read, or the manifest cannot be written.
    """
    # What near tiers have of it would be read in place of the files that are to be checked.
    options = dataclasses.replace(options or Options.from_environment(), checksums=True, near="")
    path = path_of(directory)
    names = _data_files(path)
    _refuse_sound_manifest(path)  # before any advice about files that only a lost manifest would name
    footers = _sealed_files(path, names)
    index, entry = _proven_index(path, list(footers.values()))
    notes: list[str] = []
    first = next(iter(footers.values()))
    manifest = Manifest(
        run_id=f"{first.save_id.run_id:016x}",
        ordinal=first.save_id.ordinal,
        world_size=first.world_size,
        created=_last_change(path, footers, notes),
        index=entry,
        files=[_file_entry(path / name, footer) for name, footer in footers.items()],
        others=[*_others(path, index, notes), *_dcp_facts(path, index, first.save_id, notes)],
        writer={
            "megatron-datastates": releases().get("megatron-datastates", "unknown"),
            "manifest": REPAIRED,
        },
        compatible=COMPATIBLE_CHECKSUMS,
    )
    notes.append(
        "the sizes of the parallel groups, the state providers, and what the job resumed from are left out: "
        "data files do not contain them"
    )
    checkpoint = Checkpoint(path, manifest, index, options)
    strange = extra_names(checkpoint)
    if strange:
        notes.append(f"the lost manifest may have named other files; the new one does not: {_some(strange)}")
    verdict = verify_checkpoint(checkpoint, options, progress=progress)
    if not verdict.good:
        _refuse(path, f"it has faults: {_some([*verdict.faults, *verdict.unread])}")
    manifest = _with_replaced(path, _with_facts_of_state(checkpoint, notes), notes)
    try:
        write_whole(
            path / MANIFEST_NAME,
            manifest.encode(),
            Faults(options.faults),
            manifest.save_id,
            before_rename=lambda: _refuse_sound_manifest(path),  # which a save has published meanwhile
        )
    except OSError as error:
        raise StorageError(f"the manifest of {path} was not written: {describe_error(error)}") from error
    with contextlib.suppress(OSError):  # beside a manifest it is a left-over
        (path / REMOVAL_NAME).unlink(missing_ok=True)  # it is being kept now
    return Repair(manifest, verdict.bytes_checked, [*verdict.notes, *notes])


def _refuse(path: Path, why: str) -> NoReturn:
    raise RepairRefusedError(f"{path} is not repaired, and nothing was written: {why}")


def _some(texts: Sequence[str]) -> str:
    more = f" (and {len(texts) - _MAX_LISTED} more)" if len(texts) > _MAX_LISTED else ""
    return "; ".join(texts[:_MAX_LISTED]) + more


def _refuse_sound_manifest(path: Path) -> None:
    """Lets UnsupportedFormatError and StorageError pass: a file that cannot be read need not be damaged."""
    if MANIFEST_NAME in names_in(path):
        try:
            Manifest.decode(read_small(path / MANIFEST_NAME, MANIFEST_BYTES), str(path / MANIFEST_NAME))
        except FormatError:
            pass
        else:
            _refuse(path, "its manifest is undamaged. `datastates verify` checks the rest")
    backend = stored_backend(path)
    if backend not in (None, BACKEND):
        _refuse(path, f"its {METADATA_NAME} says that it is a checkpoint in the format {backend}")


# -- data files -----------------------------------------------------------------------------------------


def _data_files(path: Path) -> list[str]:
    try:
        names = sorted(filter(is_data_file_name, names_in(path)))
    except OSError as error:
        raise NotACheckpointError(f"{path} cannot be listed: {error.strerror}") from error
    if not names:
        raise NotACheckpointError(f"{path} holds no data file of datastates: there is nothing to repair")
    return names


def _sealed_files(path: Path, names: Sequence[str]) -> dict[str, Footer]:
    """Returns the footers of all data files by name, in the order of a manifest, if they are of one save."""
    saves = sorted({str(save_id_in_name(name)) for name in names})
    if len(saves) > 1:
        _refuse(
            path,
            f"it holds data files of {len(saves)} saves ({_some(saves)}), and only the lost manifest said "
            f"which belong together. {_advice(path, names)}",
        )
    footers = {name: _footer(path, name) for name in names}
    in_order = sorted(footers.items(), key=lambda item: (item[1].rank, item[1].group))
    first = in_order[0][1]
    for name, footer in in_order:
        own = first.save_id.data_file_name(footer.rank, footer.group)
        if name != own or footer.rank >= first.world_size:
            _refuse(path, f"{name} was written as rank {footer.rank} of save {footer.save_id}")
        if footer.world_size != first.world_size:
            _refuse(
                path, f"{name} is of a save by {footer.world_size} ranks, others are by {first.world_size}"
            )
        if not footer.block_checksums:
            _refuse(path, f"{name} was saved without checksums: nothing proves that its data are undamaged")
    return dict(in_order)


def _advice(path: Path, names: Sequence[str]) -> str:
    """Returns what to do about data files of several saves."""
    footers = _footers_of_sealed(path, names)
    texts = []
    for save in sorted({footer.save_id for footer in footers.values()}, key=lambda save: -save.ordinal):
        own = [name for name, footer in footers.items() if footer.save_id == save]
        if _find_index(path, _in_order(footers[name] for name in own))[0] is not None:
            others = [name for name in names if name not in own]
            texts.append(
                f"The data files of save {save} are complete by themselves: to make a checkpoint of them, "
                f"move the others ({', '.join(others)}) to another directory, and repair again"
            )
            continue
        missing = _shared_with(save, footers)
        both = _in_order(footers[name] for name in (*own, *missing))
        if missing and _find_index(path, both)[0] is not None:
            texts.append(
                f"Save {save} may have shared {', '.join(missing)} of earlier saves, whose layouts fit, but "
                "nothing here proves that it shared these very bytes: restore its manifest from a copy, or "
                "load another checkpoint of the run"
            )
    return ". ".join(texts) or "No save has all its files here: load another checkpoint"


def _footers_of_sealed(path: Path, names: Sequence[str]) -> dict[str, Footer]:
    found = {}
    for name in names:
        with contextlib.suppress(DataStatesError, OSError):
            found[name] = read_footer(path / name, (path / name).stat().st_size)
    return found


def _shared_with(save: SaveId, footers: Mapping[str, Footer]) -> list[str]:
    """Returns files of earlier saves for the ranks and groups of which a save has none; the last of each."""
    own = {(footer.rank, footer.group) for footer in footers.values() if footer.save_id == save}
    earlier = [
        (footer.save_id.ordinal, (footer.rank, footer.group), name)
        for name, footer in footers.items()
        if footer.save_id.run_id == save.run_id and footer.save_id.ordinal < save.ordinal
    ]
    return list({place: name for _, place, name in sorted(earlier) if place not in own}.values())


def _in_order(footers: Iterable[Footer]) -> list[Footer]:
    return sorted(footers, key=lambda footer: (footer.rank, footer.group))


def _footer(path: Path, name: str) -> Footer:
    try:
        return read_footer(path / name, (path / name).stat().st_size)
    except FormatError as error:
        _refuse(path, f"{error}. Nothing proves that its rank had saved everything")
    except OSError as error:
        raise StorageError(f"data file {path / name} cannot be opened: {error.strerror}") from error


def _file_entry(path: Path, footer: Footer) -> FileEntry:
    size = path.stat().st_size
    return FileEntry(path.name, footer.rank, size, footer.data_bytes, footer.crc, group=footer.group)


def _last_change(path: Path, names: Mapping[str, Footer], notes: list[str]) -> str:
    newest = max((path / name).stat().st_mtime for name in names)
    notes.append("the time of the save is that of the last change of a data file")
    return datetime.datetime.fromtimestamp(newest, datetime.UTC).isoformat(timespec="seconds")


# -- the index ------------------------------------------------------------------------------------------


def _proven_index(path: Path, footers: Sequence[Footer]) -> tuple[Index, IndexEntry]:
    """Returns the index that these footers were written with."""
    found, reasons = _find_index(path, footers)
    if found is not None:
        return found
    why = _some(reasons) or "there is none"
    _refuse(
        path,
        f"only the index of this save says where its tensors are, and {why}. {_absent(footers)}Restore what "
        "is missing from a copy, or load another checkpoint: data files alone are not enough. (One from "
        "which keys were removed has another index, and cannot be repaired, either.)",
    )


def _absent(footers: Sequence[Footer]) -> str:
    save, ranks = footers[0].save_id, {footer.rank for footer in footers}
    names = [save.data_file_name(rank) for rank in range(footers[0].world_size) if rank not in ranks]
    return f"Not there (a rank that stored nothing has none): {_some(names)}. " if names else ""


def _find_index(path: Path, footers: Sequence[Footer]) -> tuple[tuple[Index, IndexEntry] | None, list[str]]:
    """Returns the index that these footers were written with, if it is there, and why others are not."""
    reasons = []
    for name in sorted(name for name in names_in(path) if digest_in_index_name(name)):
        try:
            index, entry = _decoded(path / name, len(footers))
        except DataStatesError as error:
            reasons.append(str(error))
            continue
        strange = [file for file, footer in enumerate(footers) if not _belongs(index, file, footer)]
        if not strange:
            return (index, entry), reasons
        reasons.append(f"{path / name} is not the layout that rank {footers[strange[0]].rank} saved by")
    return None, reasons


def _decoded(path: Path, files: int) -> tuple[Index, IndexEntry]:
    data = read_small(path, INDEX_BYTES)
    index = Index.decode(data, str(path), _ANY_FILES)
    entry = msgspec.structs.replace(index_entry(data), name=path.name)
    if digest_in_index_name(path.name) != entry.sha256[:32]:
        raise FormatError(f"{path} is damaged: its SHA-256 differs")
    index.preload(index.tensors)
    holders = {*index.objects.values(), *index.streams.values()}
    holders |= {int(file) for entry in index.tensors.values() for file in entry.files}
    if holders != set(range(files)):
        raise FormatError(f"{path} places data in {len(holders)} data files, and {files} are there")
    return index, entry


def _belongs(index: Index, file: int, footer: Footer) -> bool:
    own = index.own_index(file, footer.format_version)
    return hashlib.sha256(own).digest()[:16] == footer.layout_digest


# -- what else a manifest has ---------------------------------------------------------------------------


def _others(path: Path, index: Index, notes: list[str]) -> list[OtherFile]:
    """Returns Megatron's file of the common state, if there is one. Its digest was in the lost manifest."""
    if COMMON_STATE_KEY in index.objects:
        return []
    common = path / COMMON_FILE
    names = names_in(path)
    if common.name in names:
        data = read_small(common, OBJECT_BYTES)
        try:
            check_archive(data)  # of torch.save's: a zip file, whose every member has a CRC
        except FormatError as error:
            _refuse(path, f"{common} is damaged: {error}. Without it, Megatron cannot load the checkpoint")
        notes.append(f"{common} is taken as it is: nothing proves that it is the file that was saved")
        return [OtherFile.of(common.name, data)]
    if METADATA_NAME in names and "common_backend" in _metadata(path):  # Megatron wrote one
        _refuse(path, f"{common} is missing: without it, Megatron cannot load the checkpoint")
    if not is_through_dcp(index.objects) and not any(map(is_dcp_file_name, names)):  # DCP's have none
        notes.append(f"it has no common state: neither {COMMON_FILE} nor an object {COMMON_STATE_KEY!r}")
    return []


def _dcp_facts(path: Path, index: Index, save_id: SaveId, notes: list[str]) -> list[OtherFile]:
    """Returns the file that PyTorch's distributed checkpoint wrote for this save, if it is complete.

    Without it, Megatron cannot resume where it has saved through DCP: there is no common state, either.
    """
    facts = path / save_id.dcp_file_name()
    is_required = is_through_dcp(index.objects) and COMMON_FILE not in names_in(path)
    if facts.name not in names_in(path):
        if is_required:
            _refuse(path, f"{facts} is missing. {_WITHOUT_FACTS}")
        return []
    data = read_small(facts, OBJECT_BYTES)
    try:
        check_archive(data)
    except FormatError as error:
        if is_required:
            _refuse(path, f"{facts} is damaged: {error}. {_WITHOUT_FACTS}")
        notes.append(f"{facts} is left out, as it is damaged ({error}): for DCP, keys have no nesting")
        return []
    return [OtherFile.of(facts.name, data)]


def _metadata(path: Path) -> dict[str, object]:
    try:
        return metadata_members(path)
    except FormatError:
        return {}
    except OSError as error:
        raise StorageError(f"{path / METADATA_NAME} cannot be read: {error.strerror}") from error


def _with_replaced(path: Path, manifest: Manifest, notes: list[str]) -> Manifest:
    """Returns the manifest of a checkpoint that counts, also beside an index of DCP that is there."""
    other = path / TORCH_DIST_INDEX
    if is_object(path) or not other.is_file() or (path / METADATA_NAME).exists():
        return manifest
    notes.append(
        f"{TORCH_DIST_INDEX} of a checkpoint of DCP is there, too: from now on this one counts, and not "
        f"that; if it should, remove {MANIFEST_NAME}"
    )
    return msgspec.structs.replace(manifest, replaced=sha256_of(other))


def _with_facts_of_state(checkpoint: Checkpoint, notes: list[str]) -> Manifest:
    """Takes the iteration from the state, or else from the directory's name; and notes what it lacks."""
    state = _state(checkpoint)
    iteration = _iteration_of(state)
    if iteration is None:
        iteration = iteration_in_name(checkpoint.directory.absolute().name)
        named = iteration is not None
        source = "is the one that the directory is named after" if named else "is left out: it is not known"
        notes.append(f"the iteration {source}")
    writer = checkpoint.manifest.writer
    index = checkpoint.index
    has_optimizer = any(map(is_of_optimizer, [*index.tensors, *index.objects, *index.streams]))
    if isinstance(state, dict) and "optimizer" in state and not has_optimizer:
        writer = writer | {"optimizer": DROPPED}
        notes.append("it is without its optimizer's state, which `datastates prune` has removed")
    return msgspec.structs.replace(checkpoint.manifest, iteration=iteration, writer=writer)


def _state(checkpoint: Checkpoint) -> object:
    """Returns the common state, or the iteration; None also for classes that only Megatron may load."""
    try:
        if COMMON_STATE_KEY in checkpoint.index.objects:
            return checkpoint.read_object(COMMON_STATE_KEY)[0]
        if COMMON_FILE in checkpoint.manifest.names:
            return checkpoint.read_other_object(COMMON_FILE)
        if is_through_dcp(checkpoint.index.objects) and ITERATION_KEY in checkpoint.index.objects:
            return {"iteration": checkpoint.read_object(ITERATION_KEY)}
    except (UnsafeObjectError, LookupError, TypeError):
        pass
    return None


def _iteration_of(state: object) -> int | None:
    try:
        found = int(state["iteration"]) if isinstance(state, dict) else -1
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    return found if 0 <= found < 1 << 63 else None
