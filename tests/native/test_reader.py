"""Pieces of a file arrive where they are wanted, checked; bad bytes never arrive."""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_datastates.engine import _native as native
from megatron_datastates.files import open_regular
from tests.native.harness import (
    ALIGNMENT,
    MIB,
    Request,
    descriptors_of,
    finish_read,
    make_reader,
    open_flags,
    random_bytes,
    see_in_time,
    start_read,
)
from tests.support.waiting import eventually

DATA = random_bytes(5 * MIB + 3 * ALIGNMENT, 11)
UNTOUCHED = 0x5A
Places = Sequence[tuple[int, int]]  # offset, bytes


def checksums_of(data: np.ndarray) -> bytes:
    blocks = (data[at : at + MIB].tobytes() for at in range(0, len(data), MIB))
    return np.array([native.crc32c_by_tables(block) for block in blocks], np.uint32).tobytes()


CHECKSUMS = checksums_of(DATA)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data and a footer after it, as in a data file."""
    path = tmp_path_factory.mktemp("reader") / "data"
    path.write_bytes(DATA.tobytes() + bytes(ALIGNMENT))
    return path


class Read:
    """One read of single pieces of a file, and what it left in memory of ours."""

    def __init__(self, path: Path, places: Places, checksums: bytes = CHECKSUMS, **options: object) -> None:
        starts = np.cumsum([0, *(size for _, size in places)])
        self.places = places
        self.memory = np.full(int(starts[-1]) + 1, UNTOUCHED, np.uint8)
        self.bounds = [(int(a), int(b)) for a, b in itertools.pairwise(starts)]
        base = self.memory.ctypes.data
        requests = [
            Request(offset, size, base + int(at)) for (offset, size), at in zip(places, starts, strict=False)
        ]
        source = (str(path), len(DATA), checksums)
        self.bytes_read, bad, self.error = finish_read(start_read(make_reader(**options), [source], requests))
        self.bad_blocks = [block for _, block in bad]

    def piece(self, i: int) -> np.ndarray:
        begin, end = self.bounds[i]
        return self.memory[begin:end]

    def assert_delivered(self) -> None:
        assert (self.bad_blocks, self.error) == ([], "")
        for i, (offset, size) in enumerate(self.places):
            assert np.array_equal(self.piece(i), DATA[offset : offset + size]), (offset, size)
        assert self.memory[-1] == UNTOUCHED

    def is_untouched(self, i: int) -> bool:
        return bool((self.piece(i) == UNTOUCHED).all())


def place(offset: int, size: int) -> tuple[int, int]:
    return offset, min(size, len(DATA) - offset)


sizes = st.one_of(st.integers(0, 200), st.integers(0, 3 * MIB))
places = st.lists(st.builds(place, st.integers(0, len(DATA)), sizes), max_size=12)


@given(
    places=places,
    checked=st.booleans(),
    direct=st.booleans(),
    threads=st.integers(1, 4),
    slots=st.integers(1, 3),
    short=st.booleans(),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_pieces_are_those_bytes_of_the_file(
    stored: Path, places: Places, checked: bool, direct: bool, threads: int, slots: int, short: bool
) -> None:
    Read(
        stored,
        places,
        checksums=CHECKSUMS if checked else b"",
        direct=direct,
        threads=threads,
        slot_bytes=slots * MIB,
        faults="read:0:short" if short else "",
    ).assert_delivered()


def test_a_hundred_thousand_small_pieces(stored: Path) -> None:
    offsets = np.random.default_rng(1).integers(0, len(DATA) - 40, 100_000)
    read = Read(stored, [(int(offset), 40) for offset in offsets])
    wanted = DATA[offsets[:, None] + np.arange(40)]
    assert np.array_equal(read.memory[:-1].reshape(-1, 40), wanted)
    assert read.bytes_read == len(DATA)  # every block once


def test_overlapping_pieces_are_read_once(stored: Path) -> None:
    read = Read(stored, [(100, MIB), (0, 2 * MIB), (MIB, MIB), (50, 10)])
    read.assert_delivered()
    assert read.bytes_read == 2 * MIB


def test_only_the_blocks_in_question_are_read(stored: Path) -> None:
    read = Read(stored, [(10, 5), (4 * MIB - 1, 2)])
    read.assert_delivered()
    assert read.bytes_read == 3 * MIB
    unchecked = Read(stored, [(10, 5), (4 * MIB - 1, 2)], checksums=b"")
    unchecked.assert_delivered()
    assert unchecked.bytes_read == 3 * ALIGNMENT


def test_nothing_is_read_for_nothing(stored: Path) -> None:
    for places in ([], [(5, 0), (len(DATA), 0)]):
        read = Read(stored, places)
        read.assert_delivered()
        assert read.bytes_read == 0


def test_a_last_block_that_is_not_whole_is_checked(stored: Path) -> None:
    last = [(len(DATA) - 10, 10)]
    Read(stored, last).assert_delivered()
    wrong = CHECKSUMS[:-4] + bytes(4)
    assert Read(stored, last, checksums=wrong).bad_blocks == [5]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("flipped", [0, MIB - 1, MIB, 3 * MIB + 12345, len(DATA) - 1])
def test_a_flipped_bit_is_found_and_nothing_of_its_block_delivered(
    stored: Path, tmp_path: Path, flipped: int, direct: bool
) -> None:
    damaged = DATA.copy()
    damaged[flipped] ^= 1
    path = tmp_path / "damaged"
    path.write_bytes(damaged.tobytes() + bytes(ALIGNMENT))
    block = flipped // MIB
    inside = place(block * MIB, 100)
    elsewhere = ((block + 2) % 5 * MIB + 7, 1000)
    read = Read(path, [inside, elsewhere], direct=direct)
    assert (read.bad_blocks, read.error) == ([block], "")
    assert read.is_untouched(0)
    assert np.array_equal(read.piece(1), DATA[elsewhere[0] :][:1000])
    # Nobody asked for the bad block: nobody is bothered.
    assert Read(path, [elsewhere]).bad_blocks == []


def test_every_bad_block_is_reported_once_and_in_order(stored: Path) -> None:
    wrong = bytearray(CHECKSUMS)
    for block in (4, 1, 3):
        wrong[4 * block] ^= 0xFF
    slow_start = "read:2:stall=100"  # another thread comes to the last blocks first
    read = Read(stored, [(0, len(DATA)), (100, 3 * MIB)], checksums=bytes(wrong), faults=slow_start)
    assert read.bad_blocks == [1, 3, 4]


def test_damage_is_not_seen_with_checksums_off(stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(bytes(len(DATA)))
    read = Read(path, [(0, 100)], checksums=b"")
    assert (read.bad_blocks, read.error) == ([], "")
    assert not read.piece(0).any()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("length", [0, 1, MIB, 2 * MIB + 5, len(DATA) - ALIGNMENT])
def test_a_truncated_file_is_named_with_the_offset(tmp_path: Path, length: int, direct: bool) -> None:
    path = tmp_path / "short"
    path.write_bytes(DATA[:length].tobytes())
    read = Read(path, [(len(DATA) - 20, 20)], direct=direct)
    assert str(path) in read.error and "truncated" in read.error
    assert read.is_untouched(0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    read = Read(tmp_path / "missing", [(0, 10)])
    assert read.error.startswith(f"open {tmp_path / 'missing'}: No such file")
    assert read.is_untouched(0)


def test_a_directory_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path) in Read(tmp_path, [(0, 10)]).error


LEASE_HOLDER = """
import fcntl, os, signal, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
signal.signal(signal.SIGIO, lambda *_: fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK))
fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_file_that_another_process_has_leased_is_waited_for(stored: Path) -> None:
    """As servers of NFS and Samba do: the system asks for the lease back when somebody opens the file."""
    for opens in (
        lambda: Read(stored, [(0, 100)]).assert_delivered(),
        lambda: open_regular(stored).close(),
    ):
        with subprocess.Popen(
            [sys.executable, "-c", LEASE_HOLDER, str(stored)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder:
            assert holder.stdin is not None and holder.stdout is not None
            if holder.stdout.readline() != b"held\n":
                pytest.skip("this file system has no leases")
            opens()


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_of_the_disk_is_reported(stored: Path, threads: int) -> None:
    read = Read(stored, [(0, len(DATA))], threads=threads, faults="read:3:EIO")
    assert read.error == f"read {stored}: at offset {error_offset(read.error)}: Input/output error (errno 5)"


def error_offset(error: str) -> int:
    return int(error.split("at offset ")[1].split(":")[0])


@pytest.mark.parametrize("effect", ["EINTR", "EINVAL"])
def test_a_read_that_was_interrupted_or_refused_direct_io_is_repeated(stored: Path, effect: str) -> None:
    try:
        os.close(os.open(stored, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"this file system has no direct I/O: {error}")
    faults = f"read:1:stall=100,read:1:{effect},read:2:{effect}"
    Read(stored, [(0, len(DATA))], direct=True, threads=2, faults=faults).assert_delivered()


@pytest.mark.parametrize("through_cache", [False, True])
def test_what_others_read_too_is_read_through_the_page_cache(stored: Path, through_cache: bool) -> None:
    try:
        os.close(os.open(stored, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"this file system has no direct I/O: {error}")

    def sees_flags(milliseconds: int) -> bool:
        memory = np.full(len(DATA), UNTOUCHED, np.uint8)
        request = Request(0, len(DATA), memory.ctypes.data)
        reader = make_reader(direct=True, faults=f"read:1:stall={milliseconds}")
        job = start_read(
            reader, [(str(stored), len(DATA), CHECKSUMS)], [request], through_cache=through_cache
        )
        eventually(lambda: descriptors_of(stored) or job.wait(0), "the file is open")
        flags = open_flags(stored)
        assert finish_read(job) == (len(DATA), [], "")
        assert np.array_equal(memory, DATA)
        assert all(bool(one & os.O_DIRECT) is not through_cache for one in flags)
        return bool(flags)

    see_in_time(sees_flags)


def test_an_open_that_a_signal_interrupts_is_made_again(stored: Path) -> None:
    Read(stored, [(0, len(DATA))], direct=True, faults="open:1:EINTR,open:2:EINTR").assert_delivered()


# -- strided spans, of several files -----------------------------------------------------------------------


@st.composite
def grids(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """Pieces that fit into DATA: offset, bytes of each, how many, step in the file, more bytes in memory."""
    piece = draw(st.one_of(st.integers(1, 9), st.integers(1, 3 * MIB)))
    step = piece + draw(st.one_of(st.integers(0, 100), st.integers(0, 2 * MIB)))
    pieces = draw(st.integers(1, min(5000, 1 + (len(DATA) - piece) // step)))
    room = len(DATA) - (pieces - 1) * step - piece
    return draw(st.integers(0, room)), piece, pieces, step, draw(st.integers(0, 40))


def rows_of(memory: np.ndarray, offset: int, piece: int, pieces: int, step: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(memory[offset:], (pieces, piece), (step, 1))


@given(
    grids=st.lists(st.tuples(st.integers(0, 1), grids()), max_size=5),
    checked=st.booleans(),
    direct=st.booleans(),
    threads=st.integers(1, 4),
    slots=st.integers(1, 3),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_strided_spans_of_several_files_arrive(
    stored: Path, grids: Sequence, checked: bool, direct: bool, threads: int, slots: int
) -> None:
    memories, requests = [], []
    for file, (offset, piece, pieces, step, more) in grids:
        memories.append(np.full(pieces * (piece + more), UNTOUCHED, np.uint8))
        address = memories[-1].ctypes.data
        requests.append(Request(offset, piece, address, pieces, step, piece + more, file))
    sources = [(str(stored), len(DATA), CHECKSUMS if checked and n == 0 else b"") for n in range(2)]
    reader = make_reader(direct=direct, threads=threads, slot_bytes=slots * MIB)
    _, bad, error = finish_read(start_read(reader, sources, requests))
    assert (bad, error) == ([], "")
    for memory, (_, (offset, piece, pieces, step, more)) in zip(memories, grids, strict=True):
        found = memory.reshape(pieces, piece + more)
        assert np.array_equal(found[:, :piece], rows_of(DATA, offset, piece, pieces, step))
        assert (found[:, piece:] == UNTOUCHED).all()


def read_rows(path: Path, piece: int, pieces: int, step: int, checksums: bytes) -> int:
    """Reads rows from 0 on; returns how many bytes that took."""
    target = np.zeros((pieces, piece), np.uint8)
    request = Request(0, piece, target.ctypes.data, pieces, step, piece)
    read, _, error = finish_read(start_read(make_reader(), [(str(path), len(DATA), checksums)], [request]))
    assert error == "" and np.array_equal(target, rows_of(DATA, 0, piece, pieces, step))
    return read


GAP = 32 << 10  # kReadGapBytes


def test_small_holes_are_read_and_large_ones_left_out(stored: Path) -> None:
    assert read_rows(stored, ALIGNMENT, 2, ALIGNMENT + GAP, b"") == 2 * ALIGNMENT + GAP
    assert read_rows(stored, ALIGNMENT, 2, 2 * ALIGNMENT + GAP, b"") == 2 * ALIGNMENT
    # Blocks that are checked are read whole.
    assert read_rows(stored, 10, 2, 2 * MIB, CHECKSUMS) == 2 * MIB
    assert read_rows(stored, 10, 30, 2 * ALIGNMENT + GAP, CHECKSUMS) == 2 * MIB


def test_holes_between_spans_count_like_those_within(stored: Path) -> None:
    far, near = GAP + 2 * ALIGNMENT, GAP + ALIGNMENT
    assert Read(stored, [(0, 10), (far, 10)], checksums=b"").bytes_read == 2 * ALIGNMENT
    assert Read(stored, [(near, 10), (0, 10)], checksums=b"").bytes_read == near + ALIGNMENT


def test_good_blocks_beside_a_bad_one_are_delivered(stored: Path) -> None:
    wrong = CHECKSUMS[:4] + bytes(4) + CHECKSUMS[8:]
    read = Read(stored, [(0, 3 * MIB)], checksums=wrong, slot_bytes=4 * MIB)
    assert read.bad_blocks == [1]
    assert np.array_equal(read.piece(0)[:MIB], DATA[:MIB])
    assert (read.piece(0)[MIB : 2 * MIB] == UNTOUCHED).all()
    assert np.array_equal(read.piece(0)[2 * MIB :], DATA[2 * MIB : 3 * MIB])


def many_files(stored: Path, count: int, target: np.ndarray) -> tuple[list, list[Request]]:
    """Returns the same data under many names, of which everything is read."""
    paths = [stored.parent / f"link{number}" for number in range(count)]
    for path in paths:
        if not path.exists():
            os.link(stored, path)
    sources = [(str(path), len(DATA), CHECKSUMS) for path in paths]
    return sources, [Request(0, len(DATA), target[n].ctypes.data, file=n) for n in range(count)]


def test_bad_blocks_of_all_files_are_reported(stored: Path) -> None:
    target = np.zeros((4, len(DATA)), np.uint8)
    sources, requests = many_files(stored, 4, target)
    for number, block in ((1, 5), (3, 0), (3, 2)):
        path, size, checksums = sources[number]
        sources[number] = (path, size, checksums[: 4 * block] + bytes(4) + checksums[4 * block + 4 :])
    assert finish_read(start_read(make_reader(), sources, requests))[1] == [(1, 5), (3, 0), (3, 2)]


def test_no_more_files_are_open_than_threads_read(stored: Path) -> None:
    target = np.zeros((12, len(DATA)), np.uint8)
    sources, requests = many_files(stored, 12, target)

    def most_that_are_open(milliseconds: int) -> int:
        job = start_read(make_reader(threads=2, faults=f"read:0:stall={milliseconds}"), sources, requests)
        before, most = set(), 0
        while not job.wait(0.001):
            now = {path for path, _, _ in sources if descriptors_of(Path(path))}
            # One look is not one moment. What two looks have seen was open between them: each is opened once.
            most, before = max(most, len(before & now)), now
        job.close()
        assert job.result()[1:] == ([], None) and (target == DATA).all()
        assert most <= 2
        assert not any(descriptors_of(Path(path)) for path, _, _ in sources)
        return most

    assert any(map(most_that_are_open, (2, 20, 200))), "no open file was seen"


def test_a_missing_file_among_others_ends_the_read(stored: Path) -> None:
    target = np.zeros((6, len(DATA)), np.uint8)
    sources, requests = many_files(stored, 6, target)
    missing = str(stored.parent / "missing")
    sources[2] = (missing, len(DATA), b"")
    _, _, error = finish_read(start_read(make_reader(threads=1), sources, requests))
    assert error.startswith(f"open {missing}: No such file")
    assert not target[3:].any()


def test_a_job_that_is_closed_early_releases_everything(stored: Path) -> None:
    target = np.zeros((6, len(DATA)), np.uint8)
    sources, requests = many_files(stored, 6, target)

    def ends_early(milliseconds: int) -> bool:
        target[:] = 0
        job = start_read(make_reader(faults=f"read:0:stall={milliseconds}"), sources, requests)
        eventually(lambda: descriptors_of(Path(sources[0][0])) or job.wait(0.0), "it has begun")
        job.close()
        assert job.wait(0.0)
        assert not any(descriptors_of(Path(path)) for path, _, _ in sources)
        job.close()  # again
        return not target[5].any()

    assert any(map(ends_early, (20, 200, 2000)))


def test_a_reader_serves_one_job_after_the_other_and_two_at_once(stored: Path) -> None:
    reader, target = make_reader(threads=2), np.zeros((4, len(DATA)), np.uint8)
    sources, requests = many_files(stored, 4, target)
    finish_read(start_read(reader, sources, requests[:1]))
    jobs = [start_read(reader, sources, requests[n : n + 1]) for n in (1, 2, 3)]
    del reader
    assert all(finish_read(job)[1:] == ([], "") for job in jobs)
    assert (target == DATA).all()


HUGE = (1 << 64) - 8


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (Request(len(DATA) - 5, 6, 0), "leaves the"),
        (Request(HUGE, 16, 0), "leaves the"),
        (Request(16, HUGE, 0), "leaves the"),
        (Request(0, 10, 0, rows=3, file_step=len(DATA) // 2), "leaves the"),
        (Request(0, 10, 0, rows=(1 << 32) + 1, file_step=1 << 32), "leaves the"),
        (Request(0, 10, 0, rows=HUGE, file_step=10), "leaves the"),
        (Request(0, 10, 0, rows=2, file_step=9), "overlaps itself"),
        (Request(0, 1, 0, file=1), "file 1: expected a file number below 1"),
    ],
)
def test_a_span_that_leaves_its_file_is_refused(stored: Path, request_: Request, what: str) -> None:
    with pytest.raises(OSError, match=what):
        start_read(make_reader(), [(str(stored), len(DATA), CHECKSUMS)], [request_])


def test_checksums_that_are_not_one_a_block_are_refused(stored: Path) -> None:
    with pytest.raises(OSError, match=f"{stored}.*the number of checksums does not match"):
        start_read(make_reader(), [(str(stored), len(DATA), CHECKSUMS[:-4])], [])


@pytest.mark.parametrize("options", [{"slot_bytes": MIB + 1}, {"slot_bytes": 0}, {"threads": 0}])
def test_options_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(OSError, match=r"multiple of 1 MiB, found .*threads must be at least 1, found"):
        make_reader(**options)


def test_a_path_need_not_be_utf8(stored: Path, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"d\xe9")
    assert str(path) in Read(path, [(5, 100)]).error
    path.symlink_to(stored)
    Read(path, [(5, 100)]).assert_delivered()
