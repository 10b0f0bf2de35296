"""Fixtures of the end-to-end tests: Megatron's own training loop, on two ranks of this machine.

`E2E_CKPT_FORMAT=torch_dist` runs these tests with Megatron's own format in place of ours: when a
test fails with both, the fault is in the test.
"""

import functools
import os
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.ranks import RankForge
from tests.support.tiny import LAYOUTS, PATH, PRELOAD, Ending, Pretraining

STEPS = 6
Reference = Callable[..., Ending]


# Looking for the module instead would find that of another release that this one was installed over.
HAS_TRAINING_LOOP = metadata.version("megatron-core") >= "0.17"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignores this folder with megatron-core 0.16, which has no training loop. None: no opinion."""
    return None if HAS_TRAINING_LOOP else True


@pytest.fixture(scope="session")
def ckpt_format() -> str:
    return os.environ.get("E2E_CKPT_FORMAT", "datastates")


@pytest.fixture(scope="session")
def forge() -> Iterator[RankForge]:
    if not HAS_TRAINING_LOOP:  # a file that is named on the command line is not ignored
        pytest.skip("megatron-core 0.16 has no training loop")
    with RankForge(PRELOAD, PATH) as parent:
        yield parent


@pytest.fixture
def pretraining(forge: RankForge, tmp_path: Path) -> Pretraining:
    return Pretraining(forge, tmp_path / "runs")


@pytest.fixture(scope="session")
def reference(forge: RankForge, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Returns, by layout and steps, a run that neither saved nor loaded anything. Each is run once."""
    pretraining = Pretraining(forge, tmp_path_factory.mktemp("reference"))

    @functools.cache
    def of(layout: str, steps: int = STEPS) -> Ending:
        return pretraining.run(*LAYOUTS[layout], "--train-iters", str(steps))

    return of
