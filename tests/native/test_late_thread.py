"""An engine is closed before one of its threads has begun to run: nothing of a save stays behind."""

import os
from pathlib import Path

import pytest

from tests.native.preloaded import build_library, run_preloaded
from tests.support.waiting import PATIENCE_SECONDS

SOURCE = Path(__file__).parent / "late_thread" / "delay_thread.cc"
PROGRAM = """
import ctypes, sys
from pathlib import Path
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import KIB, Copy, Milestone, Save, make_engine, random_bytes

library, driver, path, late = sys.argv[1:]
cuda = FakeCuda(Path(driver))
ctypes.CDLL(library).delay_thread(int(late))
engine = make_engine(driver=driver, copy_threads=1, write_threads=1, tripwire=False)
save = Save(engine, Path(path), [Copy(random_bytes(64 * KIB), 0, device=True)], stream=cuda.new_stream())
save.reaches(Milestone.ENQUEUED, 0.5)
assert engine.close(60)
assert save.reaches(Milestone.RELEASED, 0.0), "a closed engine holds on to a save"
"""


@pytest.mark.skipif("MDS_SANITIZER" in os.environ, reason="the sanitizer has a pthread_create of its own")
@pytest.mark.parametrize("late", [0, 1, 2], ids=["staging", "awaiting", "writing"])
def test_a_thread_that_begins_late_hands_on_what_it_finds(
    fake_library: Path, tmp_path: Path, late: int
) -> None:
    library = build_library(SOURCE, tmp_path)
    given = library, fake_library, tmp_path / "data", late
    run_preloaded(library, "-c", PROGRAM, *given, seconds=PATIENCE_SECONDS)
