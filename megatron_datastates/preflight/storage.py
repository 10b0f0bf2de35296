"""Checks of a directory: the calls that a save makes there, and whether all ranks see the same files."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from megatron_datastates.engine.atomic_files import sync_directory
from megatron_datastates.engine.memory import unescaped
from megatron_datastates.pipeline.publishing.presence import VISIBLE_SECONDS
from megatron_datastates.preflight.checks import Check, failed, noted, ok, tried
from megatron_datastates.units import size_text

_BLOCK = 4096
# Errors that end a save where it reserves space; any other says that this file system cannot (data_file.cc).
_LACKING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM)
_SECONDS = 30.0  # for which ranks look for the files of others
_SLOW_SECONDS = 1.0
_LOOK_SECONDS = 0.01


def file_system(directory: Path, wanted_bytes: int) -> Check:
    """Returns what the directory is on, and whether it has room for so many bytes."""
    facts = os.statvfs(directory)
    free = facts.f_bavail * facts.f_frsize
    text = f"{_kind(directory)}, {size_text(free)} free"
    if free < wanted_bytes:
        return failed("file system", f"{text}: expected {size_text(wanted_bytes)} for this trial; see --size")
    return ok("file system", text)


def _kind(directory: Path) -> str:
    """Returns the type of the file system, such as lustre."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    # Spaces and the like are escaped there; what is mounted later is over what was there.
    inside = [(len(at), kind) for at, kind in mounts if directory.resolve().is_relative_to(unescaped(at))]
    return max(reversed(inside), key=lambda mount: mount[0])[1] if inside else "an unknown file system"


def calls(folder: Path, rank: int, token: str) -> list[Check]:
    """Tries, with files of this rank's own, what saves rely on. Places the one that other ranks look for."""
    path = folder / f"calls-{rank}"
    return [
        tried("direct I/O", lambda: _direct(path)),
        tried("reserved space", lambda: _reserve(path)),
        tried("rename", lambda: _rename(path, _placed(folder, rank), token)),
        tried("hard links", lambda: _link(path)),
        tried("sync", lambda: _sync(path)),
    ]


def _direct(path: Path) -> Check:
    block = mmap.mmap(-1, _BLOCK)
    block[:] = os.urandom(_BLOCK)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
        try:
            os.pwrite(descriptor, block, 0)
            back = mmap.mmap(-1, _BLOCK)
            os.preadv(descriptor, [back], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return noted("direct I/O", "refused: files are written through the page cache, which is slower")
    if back[:] != block[:]:
        return failed("direct I/O", "what was read is not what was written")
    return ok("direct I/O", "works")


def _reserve(path: Path) -> Check:
    with path.open("wb") as file:
        try:
            _fallocate(file.fileno(), 256 * _BLOCK)
        except OSError as error:
            if error.errno in _LACKING:
                raise
            text = "cannot be reserved: saves look at the free space before, which others may take meanwhile"
            return noted("reserved space", text)
    return ok("reserved space", "works")


def _fallocate(descriptor: int, count: int) -> None:
    """Calls the system: where that cannot reserve, os.posix_fallocate writes, and succeeds."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(count)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _rename(path: Path, old: Path, token: str) -> Check:
    new = path.with_name(f"{path.name}-new")
    old.write_text("old")
    new.write_text(token)
    with old.open() as reader:
        new.replace(old)
        held = reader.read()
    if old.read_text() != token or new.exists():
        return failed("rename", "a renamed file did not replace the one that had its name")
    return ok("rename", "replaces files" + ("" if held == "old" else ", of readers, too"))


def _link(path: Path) -> Check:
    first, second = path.with_name(f"{path.name}-first"), path.with_name(f"{path.name}-second")
    first.write_text("linked")
    again = "frozen tensors are written again in every checkpoint"
    try:
        os.link(first, second)
    except OSError as error:
        return noted("hard links", f"refused ({error.strerror}): {again}")
    if not second.samefile(first):
        return noted("hard links", f"a link is not the file that it was made of: {again}")
    return ok("hard links", "work")


def _sync(path: Path) -> Check:
    before = time.perf_counter()
    with path.open("wb") as file:
        file.write(bytes(_BLOCK))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)
    took = time.perf_counter() - before
    if took > _SLOW_SECONDS:
        return noted("sync", f"a file of 4 kB and its directory took {took:.1f} s to sync")
    return ok("sync", "works")


def _placed(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def visibility(folder: Path, rank: int, nodes: list[str], token: str) -> Check:
    """Looks for the files that `calls` has placed: rank 0 for those of all, the others for rank 0's."""
    name = "shared directory"
    wanted = dict(enumerate(nodes)) if rank == 0 else {0: nodes[0]}
    begin = time.perf_counter()
    missing = _awaited(wanted, lambda other: _is_there(_placed(folder, other), token))
    if missing:
        count = f"{len(missing)} ranks" if len(missing) > 1 else "1 rank"
        return failed(
            name,
            f"after {_SECONDS:.0f} s, this rank does not see the files of {count}, first of rank "
            f"{missing[0]} on node {nodes[missing[0]]}: give a directory that all nodes share",
        )
    took = time.perf_counter() - begin
    if took > _SLOW_SECONDS:
        text = f"files of others were seen after {took:.1f} s; saves wait {VISIBLE_SECONDS:g} s for them"
        return failed(name, text) if took > VISIBLE_SECONDS else noted(name, text)
    if len(nodes) == 1:
        return ok(
            name, "there is one rank: with torchrun, on all nodes, this finds out whether they share it"
        )
    return ok(name, "all ranks see the same files")


def _awaited(wanted: dict[int, str], is_there: Callable[[int], bool]) -> list[int]:
    deadline, missing = time.monotonic() + _SECONDS, list(wanted)
    while True:
        missing = [other for other in missing if not is_there(other)]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_LOOK_SECONDS)


def _is_there(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except (OSError, UnicodeDecodeError):  # on this rank alone: the others wait for its result
        return False
