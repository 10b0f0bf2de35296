"""Files of any size that are written through the engine, as conversions to torch_dist are."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_datastates.engine import native
from megatron_datastates.engine.staging import StagingEngine
from megatron_datastates.engine.streaming import SequentialFile, StreamedFile
from megatron_datastates.errors import FailedCallError
from megatron_datastates.files import is_in_memory
from tests.unit.states import OPTIONS

BUFFER = 8192
SIZES = [0, 1, 4095, 4096, 4097, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER, 3 * BUFFER + 4096, 100_001]


@pytest.fixture
def engine() -> Iterator[StagingEngine]:
    found = StagingEngine(dataclasses.replace(OPTIONS, checksums=False))
    yield found
    found.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("piece", [1 << 20, 1000])
def test_a_file_has_the_bytes_that_were_written(
    engine: StagingEngine, tmp_path: Path, size: int, piece: int
) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    file = SequentialFile(engine, tmp_path / "file", size, BUFFER)
    for begin in range(0, size, piece):
        assert file.tell() == begin
        assert file.write(data[begin : begin + piece].data) == min(piece, size - begin)
    file.finish()
    assert file.tell() == size and (tmp_path / "file").read_bytes() == data.tobytes()


@pytest.mark.parametrize("first", [0, 1, 4095, 4096, BUFFER, BUFFER + 5])
@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 3 << 20, (3 << 20) + 4097])
def test_long_pieces_follow_short_ones(engine: StagingEngine, tmp_path: Path, first: int, size: int) -> None:
    """Long ones are not copied on the way: their memory is used again as soon as a write returns."""
    data = np.random.default_rng(first + size).integers(0, 256, first + 3 * size + 9, np.uint8)
    file, memory, at = (
        SequentialFile(engine, tmp_path / "file", len(data), BUFFER),
        np.empty(size, np.uint8),
        0,
    )
    for length in (first, size, 5, size, 4, size):
        memory[:length] = data[at : at + length]
        assert file.write(memory[:length].data) == length
        memory[:] = 0xEE
        at += length
        assert file.tell() == at
    file.finish()
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_more_than_was_reserved_is_written(engine: StagingEngine, tmp_path: Path) -> None:
    file = SequentialFile(engine, tmp_path / "file", 10, BUFFER)
    file.write(b"x" * 50_000)
    file.finish()
    assert (tmp_path / "file").read_bytes() == b"x" * 50_000


def test_a_file_that_cannot_be_written_raises_and_is_removed(tmp_path: Path) -> None:
    failing = StagingEngine(dataclasses.replace(OPTIONS, faults="write:1:ENOSPC"))
    file = SequentialFile(failing, tmp_path / "file", 100_000, BUFFER)
    with pytest.raises(Exception, match="No space left") as caught:
        file.write(b"x" * 100_000)
        file.finish()
    assert getattr(caught.value, "code", errno.ENOSPC) == errno.ENOSPC
    file.remove()
    failing.close()
    assert not (tmp_path / "file").exists()


class _FailsWhileItReads:
    """A job of the engine, one of whose writes fails while a later piece is being copied."""

    def __init__(self) -> None:
        self.failed, self.reads = False, 3

    def wait(self, milestone: native.Milestone, seconds: float) -> bool:
        if milestone is native.Milestone.APPENDED:
            self.failed = True
        elif self.failed:
            self.reads = max(self.reads - 1, 0)
        return milestone is not native.Milestone.STAGED or not self.failed or self.reads == 0

    def status(self) -> dict[str, object]:
        return {"error": native.NativeError(errno.EIO, "Input/output error") if self.failed else None}


def test_a_piece_is_not_read_any_more_once_its_write_has_raised(tmp_path: Path) -> None:
    """Its memory is the caller's, who may free it before the file is removed."""
    job = _FailsWhileItReads()
    engine: Any = SimpleNamespace(native=SimpleNamespace(start=lambda **_: job))
    file = StreamedFile(engine, tmp_path / "file", 0)
    with pytest.raises(FailedCallError, match="Input/output error"):
        file.put(np.zeros(BUFFER, np.uint8))
    assert job.reads == 0


def test_a_short_file_that_cannot_be_synced_is_removed(
    engine: StagingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    file = SequentialFile(engine, tmp_path / "file", 100, BUFFER)
    file.write(b"abc")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        file.finish()
    file.remove()
    assert not (tmp_path / "file").exists()


def test_a_long_file_that_cannot_be_synced_is_not_finished(tmp_path: Path) -> None:
    engine = StagingEngine(dataclasses.replace(OPTIONS, checksums=False, faults="sync:1:EIO"))
    try:
        file = SequentialFile(engine, tmp_path / "file", 10 * BUFFER, BUFFER)
        file.write(bytes(10 * BUFFER))
        with pytest.raises(FailedCallError, match="Input/output error"):
            file.finish()
        file.remove()
    finally:
        engine.close()
    assert not (tmp_path / "file").exists()


def test_what_cannot_be_asked_for_counts_as_not_in_memory(tmp_path: Path) -> None:
    assert not is_in_memory(tmp_path / "missing") and not is_in_memory(tmp_path)
