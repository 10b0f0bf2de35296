"""Fixtures of the native tests: engines that are closed in time, and the fake CUDA driver."""

import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_datastates.engine import _native as native
from tests.native.fake_cuda.driver import FakeCuda, build
from tests.native.harness import KEPT, Engines, make_engine
from tests.support.waiting import PATIENCE_SECONDS


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Makes engines (see harness.make_engine); each must close at the end of the test, however it is left."""
    made = []

    def make(**options: object) -> native.Engine:
        made.append(make_engine(**options))
        return made[-1]

    yield make
    for engine in made:
        assert engine.close(PATIENCE_SECONDS)
    KEPT.clear()


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture
def cuda(fake_library: Path) -> Iterator[FakeCuda]:
    """The fake driver, with a context on this thread; at the end of a test nothing of it may be left."""
    driver = FakeCuda(fake_library)
    yield driver
    if driver.live_events or driver.live_streams:
        gc.collect()  # a fraction of a second: only for jobs that are still in a cycle
    left = driver.live_events, driver.live_streams, driver.registered_bytes
    misuse = driver.misuse
    driver.close()
    assert left == (0, 0, 0)  # events, streams, bytes
    assert misuse == []


@pytest.fixture
def device_engines(cuda: FakeCuda, engines: Engines) -> Iterator[Engines]:
    """Engines on the fake driver."""
    yield functools.partial(engines, driver=cuda.path)
    cuda.let_go()  # whatever a failed test held, or its engine could not close
