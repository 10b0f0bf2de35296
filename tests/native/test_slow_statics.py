"""A process forks while a thread of the engine runs code for the first time: the child can run it, too."""

import os
from pathlib import Path

import pytest

from tests.native.preloaded import build_library, run_preloaded
from tests.support.waiting import PATIENCE_SECONDS

SOURCE = Path(__file__).parent / "slow_statics" / "delay_statics.cc"
PROGRAM = """
import ctypes, os, sys
from pathlib import Path
from megatron_datastates.engine import _native as native
from tests.native.harness import MIB, Copy, Milestone, Save, make_engine, random_bytes
from tests.native.test_fork import in_child
from tests.support.waiting import eventually

library, path = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2])
library.delay_statics()
engine = make_engine(slot_bytes=MIB)
save = Save(engine, path, [Copy(random_bytes(MIB), 0)], output=native.Output.FILE_AND_DIGESTS)
eventually(lambda: library.delays_static() or save.job.wait(Milestone.STAGED, 0.0), "a thread is at work")

def use_all():
    native.close_in_forked_child(os.open("/dev/null", os.O_RDONLY))
    return native.crc32c(b"123456789"), native.sha256(b"abc").hex()[:8]

assert in_child(use_all) == "(3808858755, 'ba7816bf')"
save.finish()
assert engine.close(60)
"""


@pytest.mark.skipif("MDS_SANITIZER" in os.environ, reason="the sanitizer has such a function of its own")
def test_a_child_does_not_wait_for_what_a_thread_of_its_parent_has_begun(tmp_path: Path) -> None:
    library = build_library(SOURCE, tmp_path, "-Wl,--no-as-needed", "-lstdc++")
    run_preloaded(library, "-c", PROGRAM, library, tmp_path / "data", seconds=2 * PATIENCE_SECONDS)
