"""The tests of tests/native/portable, built for this machine. `make test-aarch64` builds them for another."""

import os
import shlex
import subprocess
from pathlib import Path

PORTABLE, CUDA = Path(__file__).parent / "portable", Path(__file__).parents[2] / "cuda"


def test_checksums_and_copies_by_the_instructions_of_this_processor(tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    ours = [CUDA / "engine" / name for name in ("block_sums.cc", "crc32c.cc", "host_copy.cc", "sha256.cc")]
    sources = [str(path) for path in (*sorted(PORTABLE.glob("*.cc")), *ours)]
    program = str(tmp_path / "portable")
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", f"-I{CUDA}"]
    subprocess.run([*compiler, *flags, "-o", program, *sources], check=True)
    ended = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "all as expected\n", "")
