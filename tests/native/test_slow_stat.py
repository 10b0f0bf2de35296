"""A process forks while a file is being opened: the child does not keep it open."""

import os
from pathlib import Path

import pytest

from tests.native.preloaded import build_library, run_preloaded
from tests.support.waiting import PATIENCE_SECONDS

SOURCE = Path(__file__).parent / "slow_stat" / "delay_stat.cc"
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
    library = build_library(SOURCE, tmp_path)
    run_preloaded(library, "-c", PROGRAM, library, tmp_path / "data", file, seconds=2 * PATIENCE_SECONDS)
