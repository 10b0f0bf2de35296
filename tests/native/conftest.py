"""Fixtures of the native tests: engines that are closed in time, and the fake CUDA driver."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_datastates.engine import _native as native
from tests.native.fake_cuda.driver import FakeCuda, build
from tests.native.harness import KEPT, make_engine

CLOSING_SECONDS = 5.0  # however a test leaves an engine


@pytest.fixture
def engines() -> Iterator[Callable[..., native.Engine]]:
    """Makes engines (see harness.make_engine); each must close quickly at the end of the test."""
    made = []

    def make(**options: object) -> native.Engine:
        made.append(make_engine(**options))
        return made[-1]

    yield make
    for engine in made:
        begin = time.monotonic()
        engine.close()
        assert time.monotonic() - begin < CLOSING_SECONDS
    KEPT.clear()


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture
def fake_driver(fake_library: Path) -> Iterator[FakeCuda]:
    """Without the engines' closing before its end, for which there is `cuda`."""
    driver = FakeCuda(fake_library)
    yield driver
    driver.close()


@pytest.fixture
def cuda(fake_driver: FakeCuda, engines: Callable[..., native.Engine]) -> Iterator[FakeCuda]:
    """The fake driver, with a context on this thread; at the end of the test nothing of it may be left."""
    made = []
    fake_driver.engine = lambda **options: (
        made.append(engines(driver=fake_driver.path, **options)) or made[-1]
    )
    yield fake_driver
    fake_driver.let_go()
    for engine in made:
        engine.close()
    gc.collect()
    assert (fake_driver.live_events, fake_driver.live_streams, fake_driver.registered_bytes) == (0, 0, 0)
    assert [line for line in fake_driver.log() if line.startswith("misuse")] == []
