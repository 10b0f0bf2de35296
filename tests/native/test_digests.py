"""Digests of staged blocks: SHA-256, taken while a file is written or instead of writing it."""

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_datastates.engine._native import Milestone, NativeError, Output, sha256, sha256_portable
from tests.native.harness import (
    KIB,
    MIB,
    Copy,
    Save,
    expected_bytes,
    make_engine,
    random_bytes,
    threads_named,
)

DATA = random.Random(8).randbytes(3000)


def test_instruction_and_portable_code_agree_with_hashlib_at_every_length() -> None:
    for length in range(300):
        expected = hashlib.sha256(DATA[:length]).digest()
        assert sha256(DATA[:length]) == sha256_portable(DATA[:length]) == expected, length
    for data in (DATA, DATA * 1000):
        assert sha256(data) == sha256_portable(data) == hashlib.sha256(data).digest()


def digests_of(data: bytes) -> bytes:
    """What FORMAT.md says: blocks of the file, without the header."""
    blocks = [data[max(at, 4 * KIB) : at + MIB] for at in range(0, len(data), MIB)]
    return b"".join(hashlib.sha256(block).digest() for block in blocks)


def copies_of(size: int, seed: int = 0, **options: Any) -> list[Copy]:
    """A header and `size` bytes at an odd place, so that blocks mix tensors and gaps."""
    return [Copy(random_bytes(4 * KIB, 99), 0), Copy(random_bytes(size, seed), 64 * 1001, **options)]


@pytest.fixture
def engine() -> Any:
    engine = make_engine(slot_bytes=2 * MIB, most_slots=3)
    yield engine
    engine.close()


@pytest.mark.parametrize("size", [1, MIB - 64 * 1001, 5 * MIB + 12345])
def test_digests_of_a_written_file_are_those_of_its_blocks(engine: Any, tmp_path: Path, size: int) -> None:
    save = Save(engine, tmp_path / "file", copies_of(size), output=Output.FILE_AND_DIGESTS)
    save.finish()
    save.assert_stored()
    assert save.job.block_digests() == digests_of((tmp_path / "file").read_bytes()[: save.end])
    assert len(save.job.block_checksums()) == 4 * -(-save.end // MIB)


def test_a_digest_pass_writes_nothing_and_finds_the_same_digests(engine: Any, tmp_path: Path) -> None:
    copies = copies_of(7 * MIB + 1)
    save = Save(engine, tmp_path / "folder" / "file", copies, output=Output.DIGESTS)
    save.job.close_input()
    save.expect(Milestone.WRITTEN)
    assert save.reaches(Milestone.RELEASED)
    assert save.job.block_digests() == digests_of(expected_bytes(copies))
    assert save.job.block_checksums() == b"" and save.status["bytes_written"] == 0
    assert list(tmp_path.iterdir()) == []


def test_the_header_has_no_part_in_digests_and_every_other_byte_has(engine: Any, tmp_path: Path) -> None:
    def digests(copies: list[Copy]) -> bytes:
        save = Save(engine, tmp_path / "file", copies, output=Output.DIGESTS)
        save.job.close_input()
        save.expect(Milestone.WRITTEN)
        return bytes(save.job.block_digests())

    copies = copies_of(3 * MIB)
    before = digests(copies)
    copies[0].source[:] ^= 255
    assert digests(copies) == before
    for at in (0, MIB, 3 * MIB - 1):
        copies[1].source[at] ^= 1
        assert digests(copies) != before
        copies[1].source[at] ^= 1
    assert digests(copies) == before


def test_a_digest_pass_needs_no_more_than_one_slot_and_returns_it(tmp_path: Path) -> None:
    engine = make_engine(slot_bytes=MIB, most_slots=1)
    save = Save(engine, tmp_path / "file", copies_of(9 * MIB), output=Output.DIGESTS)
    save.job.close_input()
    save.expect(Milestone.WRITTEN)
    assert save.reaches(Milestone.RELEASED)
    assert engine.pool()["idle"] == 1
    engine.close()


def test_a_digest_pass_does_not_count_against_the_limit_of_writes(tmp_path: Path) -> None:
    engine = make_engine(slot_bytes=MIB, most_slots=2, write_limit=1)
    save = Save(engine, tmp_path / "file", copies_of(3 * MIB), output=Output.DIGESTS)
    save.job.close_input()
    save.expect(Milestone.WRITTEN)
    engine.close()


def test_a_source_that_changes_too_early_fails_a_digest_pass(tmp_path: Path) -> None:
    engine = make_engine(slot_bytes=MIB, most_slots=2, paranoid=True)
    copies = copies_of(4 * MIB)
    save = Save(engine, tmp_path / "file", copies, output=Output.DIGESTS, lazy_seconds=3600)
    assert save.reaches(Milestone.EAGER)
    copies[1].source[:] = np.bitwise_not(copies[1].source)
    engine.allow_lazy_copies(save.job, 0)
    assert "changed before its copy was done" in save.failure()
    engine.close()


def test_slots_that_are_no_whole_mebibytes_are_refused(tmp_path: Path) -> None:
    before = set(threads_named("ds-write"))  # of other tests of this process
    engine = make_engine(slot_bytes=64 * KIB)
    with pytest.raises(NativeError, match="digests need slots of whole MiBs, not of 65536 bytes"):
        Save(engine, tmp_path / "file", copies_of(1), output=Output.FILE_AND_DIGESTS)
    engine.close()
    assert set(threads_named("ds-write")) <= before
