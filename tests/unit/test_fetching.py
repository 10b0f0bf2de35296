"""Objects that are read in windows: what a window holds is given back when it cannot be fetched."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megatron_datastates.config import MIB
from megatron_datastates.engine import fetching
from megatron_datastates.engine.fetching import read_through_windows
from megatron_datastates.errors import StorageError
from megatron_datastates.plan.reads import ReadSpans
from tests.support.descriptors import open_files
from tests.support.waiting import eventually


def one_byte() -> ReadSpans:
    def words(value: int) -> np.ndarray:
        return np.array([value], np.uint64)

    return ReadSpans(
        files=words(0),
        offsets=words(0),
        rows=words(1),
        row_bytes=words(1),
        file_steps=words(1),
        targets=words(0),
        target_steps=words(1),
        on_device=np.array([False]),
    )


def test_an_object_larger_than_files_may_be_is_named_and_nothing_stays_open() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(StorageError, match="data file object cannot be read: File too large"):
            read_through_windows([(Path("object"), 8 * MIB)], one_byte(), lambda *_: None, lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert open_files(Path("/memfd:datastates-window")) == []


def test_an_interrupted_read_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, reader = threading.Event(), threading.get_ident()

    def is_awaited() -> bool:
        return any(frame.name == "result" for frame in traceback.extract_stack(sys._current_frames()[reader]))

    def read_late(path: Path, offset: int, count: int) -> bytes:
        while not is_awaited():
            is_over.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        is_over.wait()
        return bytes(count)

    monkeypatch.setattr(fetching.stores, "read", read_late)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for jobs with &
    try:
        with pytest.raises(KeyboardInterrupt):
            read_through_windows([(Path("object"), 8 * MIB)], one_byte(), lambda *_: None, lambda _: None)
    finally:
        signal.signal(signal.SIGINT, before)
    is_over.set()  # as storage that hung
    eventually(lambda: open_files(Path("/memfd:datastates-window")) == [])


def test_where_no_file_in_memory_can_be_made_one_without_a_name_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def deliver(path: Path, file: int, spans: ReadSpans) -> None:
        seen.append((path.stat().st_size, path.read_bytes()[:3], len(open_files(tmp_path))))

    monkeypatch.setattr(os, "memfd_create", mock.Mock(side_effect=PermissionError(1, "not permitted")))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(fetching.stores, "read", lambda path, offset, count: b"abc".ljust(count))
    read_through_windows([(Path("object"), 8 * MIB)], one_byte(), deliver, lambda _: None)
    assert seen == [(8 * MIB, b"abc", 1)]
    assert (open_files(tmp_path), os.listdir(tmp_path)) == ([], [])


def test_few_windows_are_fetched_before_they_are_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or an object larger than memory could not be read."""
    count, fetched, most = 40, list[int](), 0
    monkeypatch.setattr(fetching, "_WINDOW_BYTES", MIB)
    monkeypatch.setattr(fetching, "_GAP_BYTES", 0)

    def read(path: Path, offset: int, size: int) -> bytes:
        fetched.append(offset)
        return bytes(size)

    def deliver(path: Path, file: int, spans: ReadSpans) -> None:
        nonlocal delivered, most
        time.sleep(0.01)  # enough for all threads
        most = max(most, len(fetched) - delivered)
        delivered += 1

    delivered = 0
    one = one_byte()
    spans = one.take(np.zeros(count, np.intp))
    spans = dataclasses.replace(spans, offsets=np.arange(count, dtype=np.uint64) * np.uint64(MIB))
    monkeypatch.setattr(fetching.stores, "read", read)
    total = read_through_windows([(Path("object"), count * MIB)], spans, deliver, lambda _: None)
    assert (total, delivered, sorted(fetched)) == (count * MIB, count, [n * MIB for n in range(count)])
    assert most <= fetching._IN_FLIGHT < count


def test_a_forked_child_closes_no_other_file() -> None:
    """Which has got the number of one that the child has not kept."""
    held = fetching._Held()
    number = held._descriptor
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with contextlib.suppress(OSError):
                os.dup2(0, number)
                del held
                os.fstat(number)
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held.close()
    assert open_files(Path("/memfd:datastates-window")) == []


ENDS = """
import atexit, os, sys

def end():  # after what the imported modules do
    descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
    may_go_on.set()
    assert pool._threads[0].join(60) and os.fstat(descriptor).st_size == 0
    print("ended")

atexit.register(end)
import threading
from pathlib import Path
from types import SimpleNamespace
from megatron_datastates.engine import fetching

asked, may_go_on = threading.Event(), threading.Event()

def read(path, begin, count):
    asked.set()
    may_go_on.wait()
    return bytes(count)

fetching.stores.read = read
with fetching.ThreadPool(1) as pool:
    pool.submit(fetching._fetch, Path("object"), 10, SimpleNamespace(pieces=[(0, 10)]))
    asked.wait()
    raise KeyboardInterrupt
"""


def test_an_interrupted_fetch_writes_to_no_file_that_the_program_opens_as_it_ends(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path / "file")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.stdout == "ended\n" and (tmp_path / "file").read_bytes() == b"", ended.stderr
