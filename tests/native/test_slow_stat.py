"""A process forks while a file is being opened: the child does not keep it open."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_SECONDS

ROOT, SOURCE = Path(__file__).parents[2], Path(__file__).parent / "slow_stat" / "delay_stat.cc"
PROGRAM = """
import ctypes, sys
from pathlib import Path
import numpy as np
from tests.native.harness import ALIGNMENT, KIB, Copy, Request, Save, descriptors_of, finish_read
from tests.native.harness import make_engine, make_reader, random_bytes, start_read
from tests.native.test_fork import in_child
from tests.support.waiting import eventually

library, path, target = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2]), np.zeros(10, np.uint8)
if sys.argv[3] == "written":
    engine = make_engine(direct=True)
    save = Save(engine, path, [Copy(random_bytes(64 * KIB), 0)])
else:
    path.write_bytes(bytes(ALIGNMENT))
    job = start_read(make_reader(), [(str(path), ALIGNMENT, b"")], [Request(0, 10, target.ctypes.data)])
eventually(lambda: library.delays_stat(), "the file is open")
assert in_child(lambda: descriptors_of(path)) == "[]"
if sys.argv[3] == "written":
    save.finish()
    assert engine.close(60)
else:
    assert finish_read(job) == (ALIGNMENT, [], "")
"""


@pytest.mark.skipif("MDS_SANITIZER" in os.environ, reason="the sanitizer has such functions of its own")
@pytest.mark.parametrize("file", ["written", "read"])
def test_a_child_keeps_no_file_open_that_is_being_opened(tmp_path: Path, file: str) -> None:
    library = tmp_path / "libdelay_stat.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
    subprocess.run([*compiler, *flags, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library), str(tmp_path / "data"), file],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
