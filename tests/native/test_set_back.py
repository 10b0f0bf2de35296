"""The system's clock is set back while a thread waits: what waits for 0.1 seconds goes on."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_SECONDS

ROOT, SOURCE = Path(__file__).parents[2], Path(__file__).parent / "set_back" / "wait.cc"


@pytest.mark.skipif("MDS_SANITIZER" in os.environ, reason="the sanitizer has a clock_gettime of its own")
def test_a_wait_does_not_depend_on_the_systems_clock(tmp_path: Path) -> None:
    program = tmp_path / "wait"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-pthread", f"-I{ROOT / 'cuda'}"]
    subprocess.run([*compiler, *flags, "-o", str(program), str(SOURCE)], check=True)
    assert subprocess.run([str(program)], timeout=PATIENCE_SECONDS).returncode == 0
