"""Drops the optimizer's state from a checkpoint: what stays is rewritten in its own directory.

Protocol:
  1. write the journal, which names what will be made and what will be replaced, and lock it;
  2. write data files of what stays, under names that are new; a file that holds no optimizer state stays;
  3. once these are durable, replace the index (the manifest, or `.metadata`) by renaming: until then the
     checkpoint is the old one, from then on the new one, and both are whole. If a save has written into the
     directory meanwhile, it is not replaced: torch_dist uses the names of files again;
  4. remove what the index does not name of what the journal names, unless a save has written to it; write
     the sums of the new files to Megatron's integrity.json, if there is one; then remove the journal.
A call that finds a journal does step 4 first. So a kill leaves a whole checkpoint, and the next call removes
what is left beside it. Whether a rule lets a checkpoint be rewritten at all: pipeline/upkeep/retention.py.

In an object store there is no journal: files are made in the directory for temporary files and uploaded, and
the new manifest replaces the old one in one request. What a kill leaves there is what no manifest names; any
later call of prune removes that once it is old enough. Two things follow:
  - no later call writes to integrity.json, so before step 3 it loses the sums that will not hold;
  - a request that has failed may still be carried out: once the new manifest was sent, the files that it
    names stay, also where the old one is still there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from megatron_datastates import stores
from megatron_datastates.convert.integrity_file import encode_sums, renewed_sums, require_sums, stored_sums
from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.rewriting import Rewriting, names_in_index, rewriting_of
from megatron_datastates.convert.sinks.sink import Progress, write_synced
from megatron_datastates.convert.sinks.target import require_scratch
from megatron_datastates.convert.sources.source import RankContents, Source
from megatron_datastates.convert.workers import Workers
from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import DataStatesError, FormatError, OptionError, StorageError
from megatron_datastates.files import (
    DOCUMENT_BYTES,
    Status,
    is_object,
    lock,
    names_in,
    read_regular,
    status_of,
)
from megatron_datastates.format.directory import BACKEND, INTEGRITY_NAME, JOURNAL_NAME, TORCH_DIST_INDEX
from megatron_datastates.format.values import (
    MANIFEST_NAME,
    SaveId,
    is_of_optimizer,
    is_optimizer_map,
    save_id_in_name,
)
from megatron_datastates.pipeline.runs.runs import stored_bytes


class UnfinishedError(StorageError):
    """A checkpoint was rewritten, or may have been, and then something failed. It is complete."""


@dataclasses.dataclass(frozen=True)
class DropPlan:
    """What is dropped from a checkpoint, and what has to be written for that."""

    source: Source
    save_id: SaveId
    kept: list[RankContents]  # what stays of each data file
    changed: list[int]  # numbers of the files that do not stay as they are
    dropped_bytes: int  # of tensors and objects
    seen: dict[str, Status | None]  # the files in the directory, before any was read

    @property
    def written(self) -> list[int]:
        """Returns the numbers of the files that are written anew: what would hold nothing is left out."""
        return [n for n in self.changed if not self.kept[n].is_empty]

    @property
    def written_bytes(self) -> int:
        """Returns the bytes of tensors that are written anew."""
        return sum(self.source.fragment(*one).bytes for n in self.written for one in self.kept[n].fragments)


@dataclasses.dataclass(frozen=True)
class _Journal:
    """The names in a directory that a rewriting makes and replaces."""

    format: str
    save_id: str
    made: list[str]
    replaced: list[str]  # data files, which only the old index names
    beside: list[str]  # other files that go with these
    seen: dict[str, Status | None]  # these, where a save may use their names again


_JOURNAL = msgspec.json.Decoder(_Journal)  # made at import, as in manifest.py


def plan_drop(directory: Path) -> DropPlan | None:
    """Plans to drop the optimizer's state of a checkpoint; returns None if it has none. Writes nothing.

    Raises:
        DataStatesError, OSError: it cannot be read, is damaged, or holds nothing else.
    """
    seen = {} if is_object(directory) else {name: status_of(directory / name) for name in names_in(directory)}
    source = open_source(directory)
    source.require_files()
    save_id = SaveId(secrets.randbits(63), 1)
    before = rewriting_of(source, save_id).contents
    kept = [_weights_of(contents) for contents in before]
    changed = {n for n, each in enumerate(kept) if each != before[n]}
    if not changed:
        return None
    if not any(each.fragments for each in kept):
        raise OptionError(f"{directory} holds no weights, only the optimizer's state")
    changed |= _coupled(source, kept, changed)
    return DropPlan(source, save_id, kept, sorted(changed), _dropped(source, before), seen)


def _coupled(source: Source, kept: list[RankContents], changed: set[int]) -> set[int]:
    """Returns the files with encoded tensors if one of them is written anew: what is written is decoded."""
    encoded = {key for key, entry in source.tensors.items() if getattr(entry, "encoded", False)}
    holders = {n for n, each in enumerate(kept) if any(key in encoded for key, _ in each.fragments)}
    return holders if holders & changed else set()


def _weights_of(contents: RankContents) -> RankContents:
    return RankContents(
        [one for one in contents.fragments if not is_of_optimizer(one[0])],
        [key for key in contents.objects if not is_of_optimizer(key) and not is_optimizer_map(key)],
        [key for key in contents.streams if not is_of_optimizer(key)],
    )


def _dropped(source: Source, contents: list[RankContents]) -> int:
    fragments = [one for each in contents for one in each.fragments if is_of_optimizer(one[0])]
    objects = {key for each in contents for key in each.objects} - {
        key for each in contents for key in _weights_of(each).objects
    }
    return sum(source.fragment(*one).bytes for one in fragments) + sum(map(source.object_bytes, objects))


def drop_optimizer(plan: DropPlan, progress: Progress = lambda bytes_done: None, faults: str = "") -> int:
    """Carries out a plan; returns by how many bytes the directory is smaller.

    Args:
        progress: called with how many more bytes of tensors were written, from any thread.

    Raises:
        StorageError: another call is rewriting the checkpoint.
        UnfinishedError: it failed once the new index was in place, or in an object store may have been.
        DataStatesError, OSError: it failed. The checkpoint is as it was.
    """
    directory, points, limits = plan.source.directory, Faults(faults), Limits()
    before = stored_bytes(directory)
    with _place_for_files(plan) as folder:
        workers = Workers(limits.worker_count(len(plan.written) or 1), progress)
        files = rewriting_of(plan.source, plan.save_id, workers.progress, folder, plan.seen)
        sums = stored_sums(directory) or {}
        require_sums(directory, sums, [*_replaced(plan, files), _index_of(plan.source.format)])
        points.point("write journal")
        journal = _journal_of(plan, files)
        if not is_object(directory):
            _write_journal(directory, journal)
        try:
            files.begin(limits, len(plan.written) or 1)
            if is_object(directory) and sums:
                gone = {*journal.replaced, *journal.beside, _index_of(journal.format)}
                _write_sums(directory, {name: one for name, one in sums.items() if name not in gone})
            _rewrite(plan, files, workers, points)
        except BaseException as error:  # including an interrupt
            _clean_up(directory, journal, files, sums, error)
            raise
        finally:
            files.close()
        try:
            _finish(directory, journal, points)
        except (DataStatesError, OSError) as error:
            raise _unfinished(error) from error
    return before - stored_bytes(directory)


def _clean_up(
    directory: Path, journal: _Journal, files: Rewriting, sums: dict[str, str], error: BaseException
) -> None:
    """Removes what a failed call has made. Raises UnfinishedError if its index is in place, or may be."""
    is_far, is_new = is_object(directory), files.is_sent
    with contextlib.suppress(Exception):
        is_replaced = _finish(directory, journal, Faults(""), is_sent=files.is_sent and is_far)
        is_new = files.is_sent and (is_replaced or is_far)
        if is_far and sums and not is_replaced and not files.is_sent:
            _write_sums(directory, sums)
    if is_new and isinstance(error, DataStatesError | OSError):
        raise _unfinished(error) from error


def _unfinished(error: Exception) -> UnfinishedError:
    return UnfinishedError(f"perhaps without its optimizer's state already, but whole: {error}")


@contextlib.contextmanager
def _place_for_files(plan: DropPlan) -> Iterator[Path]:
    """Yields where new files are written: the checkpoint's directory, whose journal is locked meanwhile."""
    directory = plan.source.directory
    if not is_object(directory):
        with _locked_journal(directory):
            yield directory
        return
    require_scratch(plan.written_bytes)
    with tempfile.TemporaryDirectory(prefix="datastates-prune-") as scratch:
        yield Path(scratch)


def _rewrite(plan: DropPlan, files: Rewriting, workers: Workers, points: Faults) -> None:
    """Does steps 2 and 3."""

    def write(number: int) -> Any:
        points.point("write weights")
        return files.write(number, plan.kept[number])

    written = dict(workers.run(plan.written, write, files.close)) if plan.written else {}
    if not is_object(plan.source.directory):
        sync_directory(plan.source.directory)
    same = [n for n in range(len(plan.kept)) if n not in set(plan.changed)]
    files.publish(written, same, points)


def _journal_of(plan: DropPlan, files: Rewriting) -> _Journal:
    replaced = _replaced(plan, files)
    return _Journal(
        plan.source.format,
        str(plan.save_id),
        [files.new_name(n) for n in plan.written],
        replaced,
        files.beside,
        {} if plan.source.format == BACKEND else {name: plan.seen.get(name) for name in replaced},
    )


def _replaced(plan: DropPlan, files: Rewriting) -> list[str]:
    return [files.names[n] for n in plan.changed]


def _index_of(format: str) -> str:
    return MANIFEST_NAME if format == BACKEND else TORCH_DIST_INDEX


def finish_drop(directory: Path) -> bool:
    """Removes what a call that was killed has left in a directory; returns whether there was anything.

    Raises:
        StorageError: a call that is not dead is rewriting the checkpoint.
        DataStatesError, OSError: it cannot be read, or not be removed.
    """
    if not (directory / JOURNAL_NAME).exists():
        return False
    with _locked_journal(directory):
        journal = _read_journal(directory)
        if journal is None:  # a kill has ended its writing: nothing followed
            (directory / JOURNAL_NAME).unlink(missing_ok=True)
        else:
            _finish(directory, journal, Faults(""))
    return True


@contextlib.contextmanager
def _locked_journal(directory: Path) -> Iterator[None]:
    """Makes the journal, empty if there is none, and locks it; removes an empty one at the end."""
    path = directory / JOURNAL_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if not lock(descriptor):
            raise StorageError(
                f"another call is rewriting {directory}: wait until it has finished, or stop it"
            )
        if os.fstat(descriptor).st_nlink == 0:
            raise StorageError(f"another call has just rewritten {directory}: call again")
        yield
        if path.exists() and path.stat().st_size == 0:
            path.unlink()
    finally:
        os.close(descriptor)


def _write_journal(directory: Path, journal: _Journal) -> None:
    write_synced(directory / JOURNAL_NAME, msgspec.json.encode(journal))
    sync_directory(directory)


def _read_journal(directory: Path) -> _Journal | None:
    """Returns the journal; None if it is incomplete. Raises OSError."""
    try:
        return _JOURNAL.decode(read_regular(directory / JOURNAL_NAME, DOCUMENT_BYTES))
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None


def _finish(directory: Path, journal: _Journal, points: Faults, is_sent: bool = False) -> bool:
    """Does step 4: removes new files that no index names and, once the old one is replaced, the old ones.

    Args:
        is_sent: a request that failed may still put the new index in place.

    Returns whether the old one is replaced.
    """
    named = names_in_index(directory, journal.format)
    is_old = not named.isdisjoint(journal.replaced)
    if is_old and is_sent:
        return False
    of_save = [name for name in names_in(directory) if str(save_id_in_name(name)) == journal.save_id]
    names = [*journal.made, *of_save]  # those that are in use are named; none is if another save came between
    names += [] if is_old else [*journal.replaced, *journal.beside]
    for name in names:
        if "/" in name or name in ("", ".", ".."):
            raise FormatError(f"{directory / JOURNAL_NAME} is damaged: it names {name!r}")
        if name not in named and not _is_overwritten(directory / name, journal):
            points.point("remove replaced")
            (directory / name).unlink(missing_ok=True)
    if not is_old:
        renewed = {_index_of(journal.format), *named.intersection([*journal.made, *of_save])}
        _renew_sums(directory, renewed, points)
    if not is_object(directory):
        sync_directory(directory)
        (directory / JOURNAL_NAME).unlink()
        sync_directory(directory)
    return not is_old


def _is_overwritten(path: Path, journal: _Journal) -> bool:
    """Returns whether a save has begun to write to a file that it has in common with the old checkpoint."""
    return path.name in journal.seen and status_of(path) != journal.seen[path.name]


def _renew_sums(directory: Path, renewed: Collection[str], points: Faults) -> None:
    sums = stored_sums(directory)
    if sums is not None:
        points.point("renew sums")
        _write_sums(directory, renewed_sums(directory, sums, renewed))


def _write_sums(directory: Path, sums: dict[str, str]) -> None:
    encoded = encode_sums(sums)
    if is_object(directory):
        stores.write(directory / INTEGRITY_NAME, encoded)
        return
    temporary = directory / f".{INTEGRITY_NAME}.tmp"
    write_synced(temporary, encoded)
    temporary.rename(directory / INTEGRITY_NAME)
