"""What tests of the native module share: engines with small pools, copies described in one line, and one
save from start to durable file.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.support.waiting import PATIENCE_SECONDS

KIB, MIB = 1 << 10, 1 << 20
ALIGNMENT = native.ALIGNMENT
FOOTER = bytes(range(256)) * (ALIGNMENT // 256)
Engines = Callable[..., native.Engine]
KEPT: list[np.ndarray] = []  # sources of copies that may still be read; until the engines are closed


@dataclasses.dataclass
class Copy:
    """Bytes of an array, or of a part of one, that go to `offset` in the file.

    One dimension: contiguous bytes. Two: rows of memory, one a row, at any distance.
    """

    source: np.ndarray
    offset: int
    eager: bool = False
    device: bool = False
    storage: int = 0

    @property
    def row_bytes(self) -> int:
        return int(self.source.shape[-1])

    @property
    def row_step(self) -> int:
        return self.source.strides[0] if self.source.ndim == 2 else self.row_bytes

    @property
    def flags(self) -> int:
        return (native.EAGER_FLAG if self.eager else 0) | (native.DEVICE_FLAG if self.device else 0)


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def end_of(copies: Sequence[Copy]) -> int:
    return aligned(max((copy.offset + copy.source.nbytes for copy in copies), default=0))


def expected_bytes(copies: Sequence[Copy], end: int | None = None) -> bytes:
    """Returns what the file must hold before its footer; bytes that nobody wrote are zero."""
    data = np.zeros(end if end is not None else end_of(copies), np.uint8)
    for copy in copies:
        data[copy.offset : copy.offset + copy.source.nbytes] = copy.source.reshape(-1)
    return data.tobytes()


def arrays(copies: Sequence[Copy]) -> dict[str, np.ndarray]:
    for copy in copies:
        if copy.device and FakeCuda.current is not None:
            FakeCuda.current.adopt_array(copy.source)
    return {
        "sources": np.array([copy.source.ctypes.data for copy in copies], np.uint64),
        "bytes": np.array([copy.source.nbytes for copy in copies], np.uint64),
        "offsets": np.array([copy.offset for copy in copies], np.uint64),
        "row_bytes": np.array([copy.row_bytes for copy in copies], np.uint64),
        "row_steps": np.array([copy.row_step for copy in copies], np.int64).view(np.uint64),
        "storages": np.array([copy.storage for copy in copies], np.uint64),
        "flags": np.array([copy.flags for copy in copies], np.uint8),
    }


def make_engine(**options: Any) -> native.Engine:
    defaults: dict[str, Any] = {
        "slot_bytes": 64 * KIB,
        "most_slots": 4,
        "copy_threads": 2,
        "write_threads": 2,
        "direct": False,
        "checksums": True,
        "copy_limit": 0,
        "write_limit": 0,
        "driver": "no driver in this test",
        "faults": "",
        "discard": False,
        "tripwire": True,
        "paranoid": False,
    }
    return native.Engine(**(defaults | options))


class Save:
    """One data file on its way through an engine."""

    def __init__(
        self,
        engine: native.Engine,
        path: Path,
        copies: Sequence[Copy],
        *,
        end: int | None = None,
        reserve: int | None = None,
        stream: int = 0,
        lazy_seconds: float = 0.0,
        output: native.Output = native.Output.FILE,
    ) -> None:
        self.engine, self.path, self.copies = engine, path, list(copies)
        self.end = end_of(copies) if end is None else end
        KEPT.extend(copy.source for copy in copies)
        self.job = engine.start(
            path=str(path),
            reserve_bytes=self.end if reserve is None else reserve,
            end=self.end,
            stream=stream,
            lazy_seconds=lazy_seconds,
            output=output,
            **arrays(copies),
        )

    def append(self, copies: Sequence[Copy]) -> None:
        begin, self.end = self.end, end_of(copies)
        self.copies += copies
        KEPT.extend(copy.source for copy in copies)
        self.engine.append(job=self.job, begin=begin, end=self.end, **arrays(copies))

    def reaches(self, milestone: Milestone, seconds: float = PATIENCE_SECONDS) -> bool:
        return self.job.wait(milestone, seconds)

    def expect(self, milestone: Milestone) -> None:
        assert self.reaches(milestone), f"{milestone} was not reached: {self.status}"
        assert not self.error, self.error

    def finish(self, footer: bytes = FOOTER) -> None:
        """Seals the file and waits until it is durable."""
        self.job.close_input()
        self.expect(Milestone.WRITTEN)
        self.engine.finish(job=self.job, footer=footer, offset=self.end)
        self.expect(Milestone.DURABLE)

    def failure(self, milestone: Milestone = Milestone.WRITTEN) -> str:
        """Waits for the save to fail and to release everything; returns its error."""
        self.job.close_input()
        assert self.reaches(milestone)
        assert self.error, "the save did not fail"
        assert self.reaches(Milestone.RELEASED), "a failed save holds on to something"
        return self.error

    @property
    def status(self) -> dict[str, Any]:
        return self.job.status()

    @property
    def error(self) -> str:
        return str(getattr(self.status["error"], "strerror", ""))

    def assert_stored(self) -> None:
        """Requires that the file holds exactly the sources, zeros between them, and the footer."""
        data = self.path.read_bytes()
        assert len(data) == self.end + len(FOOTER)
        assert data[: self.end] == expected_bytes(self.copies, self.end)
        assert data[self.end :] == FOOTER


def save_whole(engine: native.Engine, path: Path, copies: Sequence[Copy], **options: Any) -> Save:
    """Saves once, and compares the file with the sources."""
    save = Save(engine, path, copies, **options)
    save.finish()
    save.assert_stored()
    return save


def descriptors_of(path: Path) -> list[int]:
    """Returns this process's own descriptors of an open file."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself is gone
            if str(link.readlink()) == str(path):
                found.append(int(link.name))
    return found


def threads_named(name: str) -> list[Path]:
    """Folders in /proc of this process's threads of that name."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # that thread has just ended
            if (task / "comm").read_text().strip() == name:
                found.append(task)
    return found


def open_flags(path: Path) -> list[int]:
    """Returns the flags of each descriptor that this process has of the file."""
    texts = [Path(f"/proc/self/fdinfo/{number}").read_text() for number in descriptors_of(path)]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("flags")]
    return [int(line.split()[1], 8) for line in lines]


def see_in_time(attempt: Callable[[int], object]) -> None:
    """Requires that a test sees something before a stall ends, however late its own thread is.

    Args:
        attempt: gets the milliseconds that a call of the disk stalls; returns whether the test was in time.
            If what it looks at waits for the end of the stall, it never is.
    """
    assert any(attempt(milliseconds) for milliseconds in (300, 3_000, 30_000)), "late, however long the stall"


@dataclasses.dataclass
class Request:
    """Rows of file number `file` at equal distances, to where the address says, at equal distances."""

    offset: int
    row_bytes: int
    target: int
    rows: int = 1
    file_step: int = 0
    target_step: int = 0
    file: int = 0
    device: bool = False


Source = tuple[str, int, bytes]  # path, bytes of data, checksums


def make_reader(**options: Any) -> native.Reader:
    defaults: dict[str, Any] = {
        "direct": False,
        "threads": 3,
        "slot_bytes": MIB,
        "driver": "no driver in this test",
        "faults": "",
    }
    return native.Reader(**(defaults | options))


def start_read(
    reader: native.Reader,
    sources: Sequence[Source],
    requests: Sequence[Request],
    stream: int = 0,
    *,
    adopt: bool = True,
    through_cache: bool = False,
) -> native.ReadJob:
    if adopt:
        _adopt_targets(requests)

    def words(field: str) -> np.ndarray:
        return np.array([getattr(request, field) for request in requests], np.uint64)

    return reader.start(
        sources=[(*source, through_cache) for source in sources],
        files=words("file"),
        offsets=words("offset"),
        row_bytes=words("row_bytes"),
        rows=words("rows"),
        file_steps=words("file_step"),
        targets=words("target"),
        target_steps=words("target_step"),
        flags=np.array([request.device * native.DEVICE_FLAG for request in requests], np.uint8),
        stream=stream,
    )


def _adopt_targets(requests: Sequence[Request]) -> None:
    """Makes the fake driver take targets for device memory: touching ones for one allocation."""
    if FakeCuda.current is None:
        return
    begin = end = 0
    for request in sorted((r for r in requests if r.device), key=lambda r: r.target):
        if request.target > end:
            begin = request.target
        end = max(end, request.target + (request.rows - 1) * request.target_step + request.row_bytes)
        FakeCuda.current.adopt(begin, end - begin)


def finish_read(job: native.ReadJob) -> tuple[int, list[tuple[int, int]], str]:
    """Waits for the end of it; returns its result."""
    try:
        assert job.wait(PATIENCE_SECONDS), "the read does not end"
    finally:
        job.close()
    bytes_read, bad, error = job.result()
    return bytes_read, bad, str(error.strerror) if error is not None else ""
