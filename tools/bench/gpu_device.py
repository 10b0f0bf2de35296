"""The device that gpu.py measures: a GPU, or host memory that the fake CUDA driver serves.

On the fake one all of the benchmark's code runs as on a GPU, and none of its numbers means anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAKE_FOLDER = "DATASTATES_BENCH_FAKE_FOLDER"  # where the fake driver is built, once for all processes
FAKE = "DATASTATES_BENCH_FAKE"  # set for the processes of a try without a GPU, those they start included
IS_FAKE = os.environ.get(FAKE) == "1"
_FAKE_FREE_BYTES = 64 << 20
# The hardware queues that CUDA may use, where that was limited before this process began: it is read once.
CONNECTIONS = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")

if IS_FAKE:
    # As this module is imported: a process that Megatron spawns imports the main module again, no more.
    sys.path.insert(0, str(ROOT / "recipes" / "cpu"))
    import pretend_cuda

    pretend_cuda.install()

import torch  # noqa: E402

from megatron_datastates.config import Options  # noqa: E402

Run = tuple[int, int]  # address and bytes of a source


class Device:
    """The one device of this process, with a context on the calling thread."""

    def __init__(self, folder: Path) -> None:
        self.driver = "libcuda.so.1"
        if IS_FAKE:
            self._fake = _fake_driver(folder)
            self.driver = self._fake.path
        else:
            torch.cuda.init()
            torch.zeros(1, device="cuda")
        self._held = 0

    def options(self, **values: Any) -> Options:
        return Options(driver=self.driver, **values)

    def free_bytes(self) -> int:
        """Free memory of the whole device, by the driver."""
        return _FAKE_FREE_BYTES if IS_FAKE else int(torch.cuda.mem_get_info()[0])

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """These may be copied to by address: on the fake device, no memory may that it does not know."""
        if IS_FAKE:
            for storage in (tensor.untyped_storage() for tensor in tensors):
                self._fake.adopt(storage.data_ptr(), storage.nbytes())

    def peak_bytes(self) -> int:
        """The most that torch's allocator has lent since `reset_peak`, beyond what it had lent then."""
        return 0 if IS_FAKE else int(torch.cuda.max_memory_allocated()) - self._held

    def reset_peak(self) -> None:
        if not IS_FAKE:
            torch.cuda.reset_peak_memory_stats()
            self._held = int(torch.cuda.memory_allocated())


def _fake_driver(folder: Path) -> Any:
    """Builds it, and makes every source that a save finds in host memory one of the fake device."""
    sys.path.insert(0, str(ROOT))
    import pytest

    from tests.native.fake_cuda.driver import FakeCuda, build
    from tests.native.fake_cuda.provider import label_as_device

    label_as_device(pytest.MonkeyPatch())  # for as long as this process lives
    folder = Path(os.environ.get(FAKE_FOLDER, folder))
    library = folder / "libfakecuda.so"
    return FakeCuda(library if library.exists() else build(folder))


def make_memory(size: int) -> torch.Tensor:
    """Random bytes: zeros could be faster than real data."""
    return torch.empty(size, dtype=torch.uint8, device="cuda").random_()


def cut(memory: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """That many tensors in it, as a rank of a model has them: not adjacent."""
    pitch = memory.nbytes // count // 512 * 512
    return {f"tensor{i}": memory[i * pitch : (i + 1) * pitch - 512] for i in range(count)}


def make_shard(size: int, count: int) -> dict[str, torch.Tensor]:
    return cut(make_memory(size), count)


def make_small(count: int) -> dict[str, torch.Tensor]:
    """That many tensors of 512 B to 8 KiB, not adjacent: biases, norms, scales."""
    sizes = [512 << (i % 5) for i in range(count)]
    memory = make_memory(sum(sizes) + 512 * count)
    tensors, at = {}, 0
    for i, size in enumerate(sizes):
        tensors[f"tensor{i}"] = memory[at : at + size]
        at += size + 512
    return tensors


def bytes_of(shard: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in shard.values())


def runs_of(shard: dict[str, torch.Tensor], most_bytes: int) -> list[Run]:
    """The bytes of the tensors, cut to at most so many a run."""
    return [
        (tensor.data_ptr() + at, min(most_bytes, tensor.nbytes - at))
        for tensor in shard.values()
        for at in range(0, tensor.nbytes, most_bytes)
    ]
