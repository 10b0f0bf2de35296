"""Shared by all folders: forked ranks to run functions in, and which tests are deselected.

Tests marked `gpu` (all of tests/gpu) are deselected on machines without a CUDA device. With `--first-case`, a
test function with several cases runs its first one only: tests that launch ranks take seconds each, and all
cases of them take more time than CI has.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import RankForge
from tests.support.world import PATH, PRELOAD, World

GPU_TESTS = Path(__file__).parent / "gpu"
ROOT = Path(__file__).parents[1]  # of the repository: ranks of the fault campaign import its package


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first-case", action="store_true", help="only the first case of each test function")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    _require_timeouts_below_the_watchdogs(config, items)
    if config.getoption("--first-case"):
        _keep_first_cases(config, items)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not has_cuda_device():
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]


def _require_timeouts_below_the_watchdogs(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Else the watchdog would end the whole run (setup.cfg)."""
    most = float(config.getini("faulthandler_timeout"))
    for item in items:
        marker = item.get_closest_marker("timeout")
        if marker is not None and marker.args[0] > most:
            raise pytest.UsageError(f"{item.nodeid}: expected a timeout of at most {most:g} s")


def _keep_first_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(map(id, first.values()))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def has_cuda_device() -> bool:
    import torch  # imported late: it takes seconds, and most runs select no such test

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def world_forge() -> Iterator[RankForge]:
    with RankForge(PRELOAD, (*PATH, ROOT)) as parent:
        yield parent


@pytest.fixture
def world(world_forge: RankForge, tmp_path: Path) -> World:
    """Runs functions in ranks with Megatron-Core and without its training loop."""
    return World(world_forge, tmp_path / "runs")
