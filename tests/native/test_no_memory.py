"""Memory runs out in the core: no allocation that fails ends the process, loses a save or spoils another."""

import os
from pathlib import Path

import pytest

from tests.native.preloaded import build_library, run_preloaded

SOURCE = Path(__file__).parent / "no_memory" / "fail_new.cc"
pytestmark = pytest.mark.skipif(
    "MDS_SANITIZER" in os.environ, reason="the sanitizer's own operator new stands before any other"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(SOURCE, tmp_path_factory.mktemp("no_memory"))


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
    command = "-m", "tests.native.no_memory.sweep", library, fake_library, tmp_path, *case.split()
    printed = run_preloaded(library, *command, seconds=200)
    assert int(printed) > 0, "no allocation failed"
