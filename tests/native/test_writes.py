"""Data files: direct I/O where the file system has it, short writes, and errors that say where they occur."""

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.harness import (
    ALIGNMENT,
    FOOTER,
    KIB,
    MIB,
    Copy,
    Engines,
    Save,
    open_flags,
    random_bytes,
    save_whole,
    see_in_time,
)

COPIES = [Copy(random_bytes(300 * KIB), 0)]


@pytest.fixture
def direct_folder(tmp_path: Path) -> Path:
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"this file system has no direct I/O: {error}")
    return tmp_path


def test_direct_io_is_in_effect_where_the_disk_has_it(engines: Engines, direct_folder: Path) -> None:
    save = Save(engines(direct=True), direct_folder / "data", COPIES)
    save.job.close_input()
    save.expect(Milestone.WRITTEN)
    assert [flags & os.O_DIRECT for flags in open_flags(save.path)] == [os.O_DIRECT]
    assert save.status["direct"]
    save.finish()
    save.expect(Milestone.RELEASED)
    assert open_flags(save.path) == []
    assert save.status["direct"]  # also of a file that has been closed
    save.assert_stored()


def test_direct_io_can_be_switched_off(engines: Engines, tmp_path: Path) -> None:
    save = Save(engines(direct=False), tmp_path / "data", COPIES)
    save.job.close_input()
    save.expect(Milestone.WRITTEN)
    assert [flags & os.O_DIRECT for flags in open_flags(save.path)] == [0]
    save.finish()
    save.assert_stored()


def test_a_write_that_refuses_direct_io_is_repeated_without(engines: Engines, direct_folder: Path) -> None:
    save = Save(engines(direct=True, faults="write:1:EINVAL"), direct_folder / "data", COPIES)
    save.finish()
    save.assert_stored()
    assert not save.status["direct"]


def test_all_writers_get_over_the_refusal_of_direct_io(engines: Engines, direct_folder: Path) -> None:
    """The first write learns of it last, when another one has switched direct I/O off already."""
    faults = "write:1:stall=100,write:1:EINVAL,write:2:EINVAL"
    save = Save(engines(direct=True, faults=faults), direct_folder / "data", COPIES)
    save.finish()
    save.assert_stored()


@pytest.mark.parametrize("direct", [True, False])
def test_short_writes_are_resumed_where_they_stopped(engines: Engines, tmp_path: Path, direct: bool) -> None:
    engine = engines(direct=direct, faults="write:0:short")
    save_whole(engine, tmp_path / "data", COPIES)


def test_directories_are_made(engines: Engines, tmp_path: Path) -> None:
    save_whole(engines(), tmp_path / "a" / "b" / "data", COPIES)


def test_an_existing_file_is_never_touched(engines: Engines, tmp_path: Path) -> None:
    for direct in (True, False):
        path = tmp_path / f"data-{direct}"
        path.write_bytes(b"precious")
        save = Save(engines(direct=direct), path, COPIES)
        assert os.strerror(errno.EEXIST) in save.failure() and str(path) in save.error
        save.job.remove()
        assert path.read_bytes() == b"precious"


def test_a_directory_that_cannot_be_made_is_named(engines: Engines, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    save = Save(engines(), tmp_path / "file" / "below" / "data", COPIES)
    assert str(tmp_path / "file") in save.failure()


@pytest.mark.parametrize(("folder", "code"), [("loop", errno.ELOOP), ("n" * 300, errno.ENAMETOOLONG)])
def test_a_directory_that_cannot_be_examined_is_named(
    engines: Engines, tmp_path: Path, folder: str, code: int
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    save = Save(engines(), tmp_path / folder / "below" / "data", COPIES)
    save.failure()
    failed = save.status["error"]
    assert (failed.errno, failed.operation) == (code, "make directory")
    assert Path(failed.path).is_relative_to(tmp_path / folder)


def test_a_path_need_not_be_utf8(engines: Engines, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"d\xe9") / "data"
    save_whole(engines(), path, COPIES)
    failed = Save(engines(), path, COPIES)
    assert str(path) in failed.failure() and failed.status["error"].path == str(path)


@pytest.mark.parametrize(
    ("operation", "code"),
    [("open", "EIO"), ("write", "EIO"), ("write", "ENOSPC"), ("write", "EDQUOT"), ("write", "EFBIG")],
)
def test_a_failure_names_operation_file_and_cause(
    engines: Engines, tmp_path: Path, operation: str, code: str
) -> None:
    save = Save(engines(faults=f"{operation}:1:{code}"), tmp_path / "data", COPIES)
    number = getattr(errno, code)
    error = save.failure()
    assert error.startswith(operation) and str(save.path) in error and os.strerror(number) in error
    failed = save.status["error"]
    assert (failed.errno, failed.path, failed.operation) == (number, str(save.path), operation)
    save.job.remove()
    assert not save.path.exists()


@pytest.mark.parametrize("operation", ["truncate", "sync", "sync directory"])
def test_a_file_that_was_not_synced_is_not_durable(engines: Engines, tmp_path: Path, operation: str) -> None:
    engine = engines(faults=f"{operation}:1:EIO")
    save = Save(engine, tmp_path / "data", COPIES)
    save.job.close_input()
    save.expect(Milestone.WRITTEN)
    engine.finish(job=save.job, footer=FOOTER, offset=save.end)
    assert save.failure(Milestone.DURABLE).startswith(operation)
    assert save.status["durable_at"] < 0
    save.job.remove()
    assert not save.path.exists()


def test_every_directory_that_was_made_is_synced_and_the_one_before(engines: Engines, tmp_path: Path) -> None:
    """Else the file might have no name after a power cut."""
    engine = engines(faults="sync directory:3:EIO")
    save = Save(engine, tmp_path / "a" / "b" / "data", COPIES)
    save.job.close_input()
    save.expect(Milestone.WRITTEN)
    engine.finish(job=save.job, footer=FOOTER, offset=save.end)
    assert save.failure(Milestone.DURABLE).startswith(f"sync directory {tmp_path}:")


def test_durable_comes_after_the_sync(engines: Engines, tmp_path: Path) -> None:

    def is_not_durable_before(milliseconds: int) -> bool:
        engine = engines(faults=f"sync:1:stall={milliseconds}")
        save = Save(engine, tmp_path / str(milliseconds), COPIES)
        save.job.close_input()
        save.expect(Milestone.WRITTEN)
        engine.finish(job=save.job, footer=FOOTER, offset=save.end)
        in_time = not save.reaches(Milestone.DURABLE, 0.1)
        save.expect(Milestone.DURABLE)
        return in_time

    see_in_time(is_not_durable_before)


def test_a_full_disk_is_found_before_the_first_write(engines: Engines, tmp_path: Path) -> None:
    save = Save(engines(faults="reserve:1:ENOSPC"), tmp_path / "data", COPIES, reserve=12345678)
    error = save.failure()
    assert error.startswith("reserve") and "12345678 bytes" in error and os.strerror(errno.ENOSPC) in error
    assert save.status["bytes_written"] == 0
    save.job.remove()
    assert not save.path.exists()


@pytest.mark.parametrize("code", ["EOPNOTSUPP", "EPERM"])
def test_where_space_cannot_be_reserved_the_free_space_must_do(
    engines: Engines, tmp_path: Path, code: str
) -> None:
    engine = engines(faults=f"reserve:0:{code}")
    save_whole(engine, tmp_path / "data", COPIES)
    save = Save(engine, tmp_path / "huge", COPIES, reserve=1 << 60)
    assert save.failure().startswith("reserve") and os.strerror(errno.ENOSPC) in save.error


@pytest.mark.parametrize("call", ["open", "reserve", "write", "truncate", "sync", "sync directory"])
def test_a_call_that_a_signal_interrupts_is_made_again(engines: Engines, tmp_path: Path, call: str) -> None:
    save_whole(engines(faults=f"{call}:1:EINTR,{call}:2:EINTR"), tmp_path / "data", COPIES)


@pytest.mark.parametrize(
    ("faults", "content", "is_taken"),
    [("open:1:EINTR", b"", True), ("open:1:EINTR", b"precious", False), ("", b"", False)],
)
def test_an_empty_file_is_its_own_after_an_open_that_a_signal_interrupted(
    engines: Engines, tmp_path: Path, faults: str, content: bytes, is_taken: bool
) -> None:
    """The call may have made the file before it was interrupted, on network file systems."""
    path = tmp_path / "data"
    path.write_bytes(content)
    if is_taken:
        save_whole(engines(faults=faults), path, COPIES)
    else:
        assert os.strerror(errno.EEXIST) in Save(engines(faults=faults), path, COPIES).failure()
        assert path.read_bytes() == content


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", bytes(folder), b"tmpfs", 0, b"size=4m") != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    yield folder
    libc.umount2(bytes(folder), 2)


def test_a_disk_that_is_really_full_fails_the_reservation(engines: Engines, small_disk: Path) -> None:
    engine = engines(direct=True)
    source = random_bytes(MIB)
    save = Save(engine, small_disk / "data", [Copy(source, i * MIB) for i in range(8)])
    assert os.strerror(errno.ENOSPC) in save.failure()
    assert save.status["bytes_written"] == 0
    save.job.remove()
    assert os.listdir(small_disk) == []
    save_whole(engine, small_disk / "smaller", [Copy(source, 0)])


def test_a_disk_that_fills_up_in_mid_save_fails_it(engines: Engines, small_disk: Path) -> None:
    """The reservation was too small, as that for objects of unknown size may be."""
    engine = engines(direct=True)
    save = Save(engine, small_disk / "data", [Copy(random_bytes(8 * MIB), 0)], reserve=ALIGNMENT)
    error = save.failure()
    assert error.startswith("write") and os.strerror(errno.ENOSPC) in error
    save.job.remove()
    save_whole(engine, small_disk / "smaller", [Copy(random_bytes(MIB), 0)])


@pytest.mark.parametrize("slot_bytes", [3 * ALIGNMENT, MIB, 3 * MIB])
def test_checksums_are_those_of_the_bytes_on_disk(engines: Engines, tmp_path: Path, slot_bytes: int) -> None:
    """Chunks and blocks of 1 MiB do not meet here, and objects begin in mid-block."""
    engine = engines(slot_bytes=slot_bytes, write_threads=3, faults="write:2:stall=20")
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(3 * MIB + 100), 50)])
    save.append([Copy(random_bytes(2 * MIB, 1), save.end + 64)])
    save.finish()
    stored = save.path.read_bytes()[: save.end]
    blocks = [stored[at : at + MIB] for at in range(0, len(stored), MIB)]
    found = np.frombuffer(save.job.block_checksums(), np.uint32).tolist()
    assert found == [native.crc32c_by_tables(block) for block in blocks]


def test_checksums_can_be_switched_off(engines: Engines, tmp_path: Path) -> None:
    save = save_whole(engines(checksums=False), tmp_path / "data", COPIES)
    assert save.job.block_checksums() == b""


def test_a_write_limit_is_kept(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=16 * KIB, write_limit=MIB)
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(256 * KIB), 0)])
    save.finish()
    assert save.status["written_at"] > 0.2


def test_a_broken_fault_plan_is_refused(engines: Engines) -> None:
    for plan in ("write", "write:1", "write:1:EWHAT", "write:first:EIO"):
        with pytest.raises((OSError, ValueError)):
            engines(faults=plan)


def test_counters_count_the_bytes_that_were_staged_and_written(engines: Engines, tmp_path: Path) -> None:
    save = save_whole(engines(), tmp_path / "data", COPIES)
    status = save.status
    assert status["bytes_planned"] == status["bytes_staged"] == status["bytes_written"] == save.end
    times = [status[f"{name}_at"] for name in ("reserved", "enqueued", "staged", "written", "durable")]
    assert times == sorted(times) and times[0] > 0
    save.expect(Milestone.RELEASED)


def test_an_engine_that_discards_leaves_no_footer(engines: Engines, tmp_path: Path) -> None:
    copies = [Copy(random_bytes(300 * KIB), 0)]
    save = Save(engines(discard=True, checksums=True), tmp_path / "data", copies)
    save.job.close_input()
    save.expect(Milestone.WRITTEN)
    assert save.status["bytes_written"] == save.end
    assert len(save.job.block_checksums()) > 0  # all of a save happens but for the writes
    assert save.path.stat().st_blocks == 0  # no space was reserved either
    save.engine.finish(job=save.job, footer=FOOTER, offset=save.end)
    assert save.reaches(Milestone.RELEASED)
    assert "option 'discard' stores nothing" in save.error
    assert save.status["durable_at"] < 0
    assert save.path.stat().st_size == 0
