"""Memory runs out in the core: no allocation that fails ends the process, loses a save or spoils another."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT, SOURCE = Path(__file__).parents[2], Path(__file__).parent / "no_memory" / "fail_new.cc"
pytestmark = pytest.mark.skipif(
    "MDS_SANITIZER" in os.environ, reason="the sanitizer's own operator new stands before any other"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("no_memory") / "libfail_new.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
    subprocess.run([*compiler, *flags, "-o", str(target), str(SOURCE), "-ldl"], check=True)
    return target


@pytest.mark.parametrize(
    "case",
    [
        *("ds-stage", "ds-write", "main"),
        *(
            pytest.param(words, marks=pytest.mark.long)
            for words in (
                *("ds-pool", "ds-read read", "main fence"),
                "ds-await --slow",  # so that its queue grows
                *(f"{thread} --paranoid" for thread in ("ds-stage", "main")),
                *(f"{thread} --and-following" for thread in ("ds-stage", "ds-write", "ds-pool")),
                *(f"{thread} --and-following" for thread in ("ds-await --slow", "ds-read read")),
            )
        ),
        pytest.param("main device device device --queues", id="copies of samples are lost sight of"),
        pytest.param("ds-stage host --queues", id="a read ends twice"),
        pytest.param("ds-stage --queues --slow", id="a slot is returned while the device copies to it"),
    ],
)
def test_an_allocation_that_fails_costs_at_most_its_own_save(
    library: Path, fake_library: Path, tmp_path: Path, case: str
) -> None:
    command = [sys.executable, "-m", "tests.native.no_memory.sweep", str(library), str(fake_library)]
    ended = subprocess.run(
        [*command, str(tmp_path), *case.split()],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0, "no allocation failed"
