"""Leaves out tests marked `gpu`, which all of tests/gpu are, where there is no CUDA device."""

from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not has_cuda_device():
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]


def has_cuda_device() -> bool:
    import torch  # here, since it takes seconds and most runs have no such test to ask for

    return torch.cuda.is_available()
