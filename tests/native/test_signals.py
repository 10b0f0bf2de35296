"""Native threads leave the signals of the process to the program's own threads."""

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.native.harness import (
    KIB,
    MIB,
    Copy,
    Engines,
    Request,
    Save,
    finish_read,
    make_reader,
    random_bytes,
    start_read,
    threads_named,
)
from tests.support.waiting import eventually

# One that a timer sends, those that end a program, one that it waits for, and one of its own faults.
LEFT = (signal.SIGPROF, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
OWN = (signal.SIGSEGV, signal.SIGBUS)


def blocks(task: Path, number: int) -> bool:
    (line,) = (one for one in (task / "status").read_text().splitlines() if one.startswith("SigBlk"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def assert_left(name: str) -> None:
    eventually(lambda: threads_named(name), f"a thread {name}")
    for task in threads_named(name):
        # It is named just before.
        eventually(lambda task=task: all(blocks(task, one) for one in LEFT), f"{name} leaves signals")
        assert not any(blocks(task, one) for one in OWN)


@pytest.mark.parametrize("name", ["ds-stage", "ds-await", "ds-write", "ds-pool"])
def test_threads_of_an_engine_take_no_signal(engines: Engines, tmp_path: Path, name: str) -> None:
    save = Save(engines(), tmp_path / "data", [Copy(random_bytes(64 * KIB), 0)])
    assert_left(name)
    save.finish()


def test_threads_that_read_take_no_signal(tmp_path: Path) -> None:
    path, target = tmp_path / "data", np.zeros(MIB, np.uint8)
    path.write_bytes(bytes(MIB))
    reader = make_reader(faults="read:1:stall=2000")
    job = start_read(reader, [(str(path), MIB, b"")], [Request(0, MIB, target.ctypes.data)])
    assert_left("ds-read")
    assert finish_read(job)[2] == ""
