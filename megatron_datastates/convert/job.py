"""Converts one checkpoint, with what workers and ranks there are.

Protocol:
  1. what cannot be done is refused before anything is written;
  2. all is written into a directory beside the target, `.NAME.converting`, that is locked and emptied first
     (what no conversion makes is never deleted);
  3. files are made by any process and thread; rank 0 commits them once all are durable, then all are re-read
     if that is wanted;
  4. the directory is renamed to the target's name, and the one around it is synced.
So a target is a whole checkpoint, or is not there. Ranks of torchrun agree after each of these steps.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import filecmp
import heapq
import os
import secrets
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_datastates.config import GIB, MIB, Options
from megatron_datastates.convert.open import open_source, require_utf8
from megatron_datastates.convert.sinks.datastates import DataStatesSink
from megatron_datastates.convert.sinks.sink import Moved, Sink, stretches
from megatron_datastates.convert.sinks.target import refuse_target, sync_tree
from megatron_datastates.convert.sinks.torch_dist import TorchDistSink
from megatron_datastates.convert.sources.source import Source, Stored
from megatron_datastates.convert.team import Team
from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.errors import CorruptDataError, FormatError, OptionError, StorageError
from megatron_datastates.files import open_regular
from megatron_datastates.format.directory import is_of_a_format
from megatron_datastates.format.values import SaveId, is_optimizer_map
from megatron_datastates.pipeline.runs import metadata_members
from megatron_datastates.plan.coverage import coverage_faults

FORMATS = (DataStatesSink.format, TorchDistSink.format)
_MOST_STAGING_BYTES = 256 * MIB
_MOST_WINDOW_BYTES = 64 * MIB
_LEAST_WORKER_BYTES = 64 * MIB  # a window, a second one to verify, and a reader's own memory
_READER_BYTES = 16 * MIB


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be done, the same on every rank."""

    source: Source
    target: Path
    format: str
    files: list[Stored]  # of the target, by rank of its world
    file_bytes: list[int]  # of the tensors in each

    @property
    def workplace(self) -> Path:
        return self.target.parent / f".{self.target.name}.converting"

    def files_of(self, team: Team) -> range:
        """Which files a process makes."""
        return range(team.rank, len(self.files), team.size)


@dataclasses.dataclass(frozen=True)
class Means:
    """What a conversion may use, in each process."""

    memory_bytes: int = 2 * GIB
    workers: int = 0  # 0: as many as there are cores and memory

    def __post_init__(self) -> None:
        if self.memory_bytes < _LEAST_WORKER_BYTES + 2 * MIB or self.workers < 0:
            raise OptionError(
                f"{self.memory_bytes} bytes of memory and {self.workers} workers: a conversion takes one "
                f"worker and {_LEAST_WORKER_BYTES // MIB + 2} MiB"
            )

    @property
    def staging_bytes(self) -> int:
        return min(max(self.memory_bytes // 8, 2 * MIB), _MOST_STAGING_BYTES)

    def worker_count(self, files: int) -> int:
        room = (self.memory_bytes - self.staging_bytes) // _LEAST_WORKER_BYTES
        return max(1, min(self.workers or os.cpu_count() or 1, files, room))

    def window_bytes(self, files: int) -> int:
        """Of one worker, which has two of them when it verifies."""
        each = (self.memory_bytes - self.staging_bytes) // self.worker_count(files)
        return min((each - 2 * _READER_BYTES) // 2 // MIB * MIB, _MOST_WINDOW_BYTES)


def default_format(source_format: str) -> str:
    """To which a checkpoint is converted if nobody says to which."""
    return next(name for name in FORMATS if name != source_format)


def plan_conversion(source: Source, target: Path, *, format: str = "", ranks: int = 0) -> Plan:
    """Looks at all that can be wrong before anything is written.

    Args:
        format: of the target; by default the one that the source does not have.
        ranks: whole fragments are dealt out to so many files by their bytes; 0: a file holds what a rank
            stored.

    Raises:
        OptionError, StorageError: it cannot be done.
        FormatError: the source is damaged.
    """
    format = format or default_format(source.format)
    if format not in FORMATS:
        raise OptionError(f"format {format!r} cannot be written: there are {' and '.join(FORMATS)}")
    if ranks < 0:
        raise OptionError(f"{ranks} files cannot be made")
    require_utf8(target)
    if target.resolve().is_relative_to(source.directory.resolve()):
        raise StorageError(f"{target} lies within {source.directory}, its source: give another target")
    metadata_members(source.directory)
    faults = [fault for key, entry in source.tensors.items() for fault in coverage_faults(key, entry)]
    if faults:
        raise FormatError(f"{source.directory} is not whole: {'; '.join(faults[:3])}")
    source.require_files()
    files = source.stored_by_rank()
    if ranks:
        files = _dealt(source, files, ranks)
    sizes = [sum(source.fragment(*one).bytes for one in stored.fragments) for stored in files]
    needed = sum(sizes) + sum(source.object_bytes(key) for key in source.objects)
    refuse_target(target, needed, makes_parents=True)
    return Plan(source, target, format, files, sizes)


def _dealt(source: Source, files: Sequence[Stored], ranks: int) -> list[Stored]:
    """Each fragment goes to the file with the fewest bytes, the largest first; within one, order is kept."""
    fragments = [one for stored in files for one in stored.fragments]
    sizes = [source.fragment(*one).bytes for one in fragments]
    ranks = min(ranks, len(fragments) + sum(len(stored.objects) for stored in files))  # more would be empty
    dealt, filled = [0] * len(fragments), [(0, rank) for rank in range(ranks)]  # a heap: of bytes and ranks
    for i in sorted(range(len(fragments)), key=lambda i: (-sizes[i], i)):
        held, dealt[i] = filled[0]
        heapq.heapreplace(filled, (held + sizes[i], dealt[i]))
    found = [Stored([], []) for _ in range(ranks)]
    for one, rank in zip(fragments, dealt, strict=True):
        found[rank].fragments.append(one)
    for n, key in enumerate(key for stored in files for key in stored.objects):
        found[n % ranks].objects.append(key)
    return [stored for stored in found if stored.fragments or stored.objects]


def nothing_told(bytes_done: int) -> None:
    """For nobody who wants to know."""


def convert(
    plan: Plan,
    means: Means,
    *,
    verify: bool = False,
    moved: Moved = nothing_told,
    team: Team | None = None,
) -> None:
    """Does what was planned. Ranks of `team` call this alike.

    Args:
        verify: re-read all that was written, and compare it with the source, before it appears; also check
            what checksums a source has that are not checked whenever it is read.
        moved: told of bytes as they are written (and again as they are re-read), by any thread.

    Raises:
        DataStatesError, OSError: it could not be done, and there is no target. CorruptDataError: what was
            written is not what was read.
    """
    team = team or Team()
    mine = plan.files_of(team)
    workers = _Workers(means.worker_count(len(mine)), moved)
    with ExitStack() as held:
        team.first(lambda: held.enter_context(_taken(plan)))
        save_id = SaveId(team.first(lambda: secrets.randbits(63)), 1)
        sink = team.every(lambda: _sink(plan, means, save_id, workers.moved))
        try:
            parts = team.every_told(
                lambda: workers.run(mine, lambda n: sink.write(n, plan.files[n]), sink.close)
            )
            written = dict(pair for part in parts for pair in part)
            team.first(lambda: _commit(plan, sink, [written[n] for n in range(len(plan.files))]))
        finally:
            sink.close()
        if verify:
            team.every(lambda: _verify(plan, means, mine, workers))
        team.first(lambda: _appear(plan.workplace, plan.target))


@contextmanager
def _taken(plan: Plan) -> Iterator[None]:
    """An empty directory of this job alone. What is there in the end is removed.

    Raises:
        StorageError: another conversion is at it, or it is not the directory of any.
    """
    workplace = plan.workplace
    descriptor = _open_workplace(workplace)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"another conversion writes into {workplace}: wait for it, or end it"
            ) from None
        except OSError:  # a file system without locks: nobody can tell
            pass
        _empty(workplace, _companions(plan.source))
        try:
            yield
        finally:
            shutil.rmtree(workplace, ignore_errors=True)  # by now it has the target's name, or failed
    finally:
        os.close(descriptor)


def _open_workplace(path: Path) -> int:
    try:
        if not path.is_symlink():
            path.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTDIR, errno.ELOOP):
            raise
        raise StorageError(
            f"{path} is not a directory, and a conversion needs one there: remove it"
        ) from None


def _empty(directory: Path, companions: Sequence[str]) -> None:
    """Raises StorageError: it holds what no conversion of this source made. Then all is left."""
    paths = list(directory.iterdir())
    of_others = [p for p in paths if not is_of_a_format(p.name) and p.name not in companions]
    if of_others:
        raise StorageError(
            f"{directory} was to be emptied, and holds {of_others[0].name!r}, which this conversion does not "
            "make: remove the directory first"
        )
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sink(plan: Plan, means: Means, save_id: SaveId, moved: Moved) -> Sink:
    window = means.window_bytes(len(plan.files))
    if plan.format == TorchDistSink.format:
        return TorchDistSink(plan.source, plan.workplace, window, moved)
    options = dataclasses.replace(Options.from_environment(), staging_memory=0, slot_size=MIB)
    options = dataclasses.replace(options, staging_memory=means.staging_bytes)
    return DataStatesSink(
        plan.source,
        plan.workplace,
        window,
        moved,
        save_id=save_id,
        world_size=len(plan.files),
        options=options,
    )


class _Workers:
    """Threads that stop at the next window once one of them has failed, or somebody has interrupted them."""

    def __init__(self, count: int, moved: Moved) -> None:
        self._count, self._moved = count, moved
        self._stop = threading.Event()

    def moved(self, bytes_done: int) -> None:
        if self._stop.is_set():
            raise CancelledError
        self._moved(bytes_done)

    def run(
        self, numbers: Sequence[int], work: Callable[[int], Any], on_error: Callable[[], None] = lambda: None
    ) -> list[tuple[int, Any]]:
        """What `work` gives for each number. Raises the first error, when all threads have stopped."""
        with ThreadPoolExecutor(self._count) as pool:
            futures = [pool.submit(work, number) for number in numbers]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                return [(number, future.result()) for number, future in zip(numbers, futures, strict=True)]
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                on_error()
                raise


def _commit(plan: Plan, sink: Sink, written: Sequence[Any]) -> None:
    for name in _companions(plan.source):
        of, to = plan.source.directory / name, plan.workplace / name
        if of.is_dir():
            shutil.copytree(of, to, copy_function=_copy_regular)
        else:
            _copy_regular(of, to)
        sync_tree(to)
    sync_directory(plan.workplace)
    sink.commit(written)


def _copy_regular(of: str | Path, to: str | Path) -> None:
    """Copies a file. Raises OSError, also for what is no regular one: a device has no end."""
    with open_regular(of) as source, open(to, "xb") as target:
        shutil.copyfileobj(source, target, MIB)
    shutil.copymode(of, to)


def _companions(source: Source) -> list[str]:
    """Files and directories of others that belong to the checkpoint."""
    return [*source.other_files, *source.other_directories]


def _appear(workplace: Path, target: Path) -> None:
    refuse_target(target)
    workplace.rename(target)
    sync_directory(target.parent)


def _verify(plan: Plan, means: Means, mine: Sequence[int], workers: _Workers) -> None:
    written = open_source(plan.workplace)
    window = means.window_bytes(len(plan.files))
    workers.run(mine, lambda n: _compare(plan.source, written, plan.files[n], window, workers.moved))
    for name in plan.source.other_files:
        if not filecmp.cmp(plan.source.directory / name, plan.workplace / name, shallow=False):
            raise CorruptDataError(f"file {name!r} was not written as it was read")


def _compare(source: Source, written: Source, stored: Stored, window_bytes: int, moved: Moved) -> None:
    """Raises CorruptDataError: something of what one rank stored is not what was written."""
    there = [(key, _number_there(source, written, key, number)) for key, number in stored.fragments]
    windows = (np.empty(window_bytes, np.uint8), np.empty(window_bytes, np.uint8))
    pairs = zip(
        stretches(source, stored.fragments, windows[0]), stretches(written, there, windows[1]), strict=True
    )
    stored_crc: tuple[int, str] | None = None
    crc = 0
    for (piece, before), (_, after) in pairs:
        if piece.begin == 0:
            stored_crc, crc = source.fragment_crc(piece.key, piece.fragment), 0
        if stored_crc is not None:
            crc = zlib.crc32(before, crc)
            if piece.begin + piece.size == source.fragment(piece.key, piece.fragment).bytes:
                _check_crc(crc, *stored_crc)
        if not np.array_equal(before, after):
            raise CorruptDataError(
                f"tensor {piece.key!r} was not written as it was read: nothing was published"
            )
        moved(piece.size)
    for key in stored.objects:
        if is_optimizer_map(key) and key not in written.objects:
            continue
        if source.read_object(key) != written.read_object(key):
            raise CorruptDataError(f"object {key!r} was not written as it was read: nothing was published")


def _check_crc(found: int, stored: int, where: str) -> None:
    if found != stored:
        raise CorruptDataError(
            f"{where}: its CRC-32 is {found:08x}, and {stored:08x} was stored with it: it is corrupt, and "
            "nothing was published"
        )


def _number_there(source: Source, written: Source, key: str, number: int) -> int:
    fragment, entry = source.fragment(key, number), written.tensors[key]
    same = (entry.offsets == np.array(fragment.offset, np.int64)).all(axis=1) & (
        entry.shapes == np.array(fragment.shape, np.int64)
    ).all(axis=1)
    found = np.flatnonzero(same)
    if not len(found) or (entry.dtype, entry.global_shape) != (fragment.dtype, fragment.global_shape):
        raise CorruptDataError(f"tensor {key!r} was written without its fragment at {fragment.offset}")
    return int(found[0])
