"""A program whose daemon thread is in native code ends as it would without that thread."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, threading, time
from pathlib import Path
import numpy as np
from megatron_datastates.engine._native import Milestone
from tests.native.harness import *

class SlowToEnd:
    def __del__(self):
        time.sleep(0.3)  # while the interpreter ends; the thread wants the GIL back

def wait(wait_once):
    while not wait_once():
        in_native_code.set()

in_native_code, path = threading.Event(), Path(sys.argv[1])
if sys.argv[2] == "save":
    save = Save(make_engine(), path, [Copy(random_bytes(64 * KIB), 0)])
    waits = lambda: save.job.wait(Milestone.DURABLE, 0.05)
else:
    path.write_bytes(bytes(MIB))
    target = np.empty(MIB, np.uint8)
    reader = make_reader(faults="read:0:stall=2000")
    job = start_read(reader, [(str(path), MIB, b"")], [Request(0, MIB, target.ctypes.data)])
    waits = lambda: job.wait(0.05)
threading.Thread(target=wait, args=(waits,), daemon=True).start()
in_native_code.wait()
sys.modules["slow"] = SlowToEnd()
"""


@pytest.mark.parametrize("work", ["save", "load"])
def test_a_thread_that_waits_in_native_code_does_not_abort_the_end_of_the_program(
    tmp_path: Path, work: str
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "data"), work]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (ended.returncode, ended.stderr) == (0, "")
