"""Pieces of a file arrive where they are wanted, checked; bad bytes never arrive."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_datastates.engine import _native as native
from tests.native.harness import ALIGNMENT, MIB, random_bytes

DATA = random_bytes(5 * MIB + 3 * ALIGNMENT, 11)
UNTOUCHED = 0x5A
Places = Sequence[tuple[int, int]]  # offset, bytes


def checksums_of(data: np.ndarray) -> bytes:
    blocks = (data[at : at + MIB].tobytes() for at in range(0, len(data), MIB))
    return np.array([native.crc32c_by_tables(block) for block in blocks], np.uint32).tobytes()


CHECKSUMS = checksums_of(DATA)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data and a footer behind it, as in a data file."""
    path = tmp_path_factory.mktemp("reader") / "data"
    path.write_bytes(DATA.tobytes() + bytes(ALIGNMENT))
    return path


class Read:
    """One call of read_pieces, and what it left in memory of ours."""

    def __init__(self, path: Path, places: Places, **options: object) -> None:
        starts = np.cumsum([0, *(size for _, size in places)])
        self.places = places
        self.memory = np.full(int(starts[-1]) + 1, UNTOUCHED, np.uint8)
        self.bounds = [(int(a), int(b)) for a, b in itertools.pairwise(starts)]
        defaults: dict[str, object] = {
            "data_bytes": len(DATA), "checksums": CHECKSUMS, "direct": False, "threads": 3,
            "buffer_bytes": MIB, "faults": "",
        }  # fmt: skip
        self.bytes_read, self.bad_blocks, self.error = native.read_pieces(
            path=str(path),
            offsets=np.array([offset for offset, _ in places], np.uint64),
            bytes=np.array([size for _, size in places], np.uint64),
            targets=np.uint64(self.memory.ctypes.data) + starts[:-1].astype(np.uint64),
            **(defaults | options),
        )

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
    buffers=st.integers(1, 3),
    short=st.booleans(),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_pieces_are_those_bytes_of_the_file(
    stored: Path, places: Places, checked: bool, direct: bool, threads: int, buffers: int, short: bool
) -> None:
    Read(
        stored,
        places,
        checksums=CHECKSUMS if checked else b"",
        direct=direct,
        threads=threads,
        buffer_bytes=buffers * MIB,
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
def test_a_truncated_file_is_told_with_its_place(tmp_path: Path, length: int, direct: bool) -> None:
    path = tmp_path / "short"
    path.write_bytes(DATA[:length].tobytes())
    read = Read(path, [(len(DATA) - 20, 20)], direct=direct)
    assert str(path) in read.error and "truncated" in read.error
    assert read.is_untouched(0)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    read = Read(tmp_path / "missing", [(0, 10)])
    assert read.error.startswith(f"open {tmp_path / 'missing'}: No such file")
    assert read.is_untouched(0)


def test_a_directory_is_told(tmp_path: Path) -> None:
    assert str(tmp_path) in Read(tmp_path, [(0, 10)]).error


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_of_the_disk_is_told(stored: Path, threads: int) -> None:
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


@pytest.mark.parametrize(
    ("places", "options", "what"),
    [
        ([(len(DATA) - 5, 6)], {}, "leaves the"),
        ([((1 << 64) - 8, 16)], {}, "leaves the"),
        ([(16, (1 << 64) - 8)], {}, "leaves the"),
        ([(0, 1)], {"checksums": CHECKSUMS[:-4]}, "number of checksums"),
        ([(0, 1)], {"buffer_bytes": MIB + 1}, "multiple of 1 MiB"),
        ([(0, 1)], {"buffer_bytes": 0}, "multiple of 1 MiB"),
    ],
)
def test_a_plan_that_leaves_the_file_is_refused(
    stored: Path, places: Places, options: dict[str, object], what: str
) -> None:
    nowhere = np.zeros(len(places), np.uint64)
    defaults: dict[str, object] = {
        "data_bytes": len(DATA), "checksums": CHECKSUMS, "direct": False, "threads": 1,
        "buffer_bytes": MIB, "faults": "",
    }  # fmt: skip
    with pytest.raises(OSError, match=what):
        native.read_pieces(
            path=str(stored),
            offsets=np.array([offset for offset, _ in places], np.uint64),
            bytes=np.array([size for _, size in places], np.uint64),
            targets=nowhere,
            **(defaults | options),
        )
