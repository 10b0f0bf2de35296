"""The device that benchmarks.gpu measures: a GPU, or host memory that the fake CUDA driver serves.

On the fake one, all of the benchmark's code runs as on a GPU, and none of its numbers means anything.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.environment import FAKE_FOLDER, IS_FAKE, ROOT

if IS_FAKE:
    # While this module is imported: a process that Megatron spawns imports the main module again, and nothing
    # else.
    sys.path.insert(0, str(ROOT / "recipes" / "cpu"))
    importlib.import_module("pretend_cuda").install()

import torch

from benchmarks.states import Tensors, cut
from megatron_datastates.config import Options

Span = tuple[int, int]  # address and bytes of a source
_FAKE_FREE_BYTES = 64 << 20
_GAP_BYTES = 512


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
        self._allocated = 0

    def options(self, **values: Any) -> Options:
        """Returns options that make the engine use this device."""
        return Options(driver=self.driver, **values)

    def free_bytes(self) -> int:
        """Returns the free memory of the whole device, as the driver reports it."""
        return _FAKE_FREE_BYTES if IS_FAKE else int(torch.cuda.mem_get_info()[0])

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Makes memory known to the fake device, which copies to no other; a GPU knows its own."""
        if IS_FAKE:
            for storage in (tensor.untyped_storage() for tensor in tensors):
                self._fake.adopt(storage.data_ptr(), storage.nbytes())

    def peak_bytes(self) -> int:
        """Returns by how much what torch's allocator had lent grew at most since `reset_peak`."""
        return 0 if IS_FAKE else int(torch.cuda.max_memory_allocated()) - self._allocated

    def reset_peak(self) -> None:
        """Measures the peak of torch's allocator from now on."""
        if not IS_FAKE:
            torch.cuda.reset_peak_memory_stats()
            self._allocated = int(torch.cuda.memory_allocated())


class LeastFree:
    """The least free memory of a device that was seen by `look`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.bytes = device.free_bytes()

    def look(self) -> None:
        """Asks the driver, which takes a lock that copies may need."""
        self.bytes = min(self.bytes, self._device.free_bytes())


def _fake_driver(folder: Path) -> Any:
    """Builds the fake driver, which then takes every host source of a save for one of its device."""
    sys.path.insert(0, str(ROOT))
    pytest = importlib.import_module("pytest")
    driver = importlib.import_module("tests.native.fake_cuda.driver")
    provider = importlib.import_module("tests.native.fake_cuda.provider")
    provider.label_as_device(pytest.MonkeyPatch())  # for as long as this process lives
    folder = Path(os.environ.get(FAKE_FOLDER, folder))
    library = folder / "libfakecuda.so"
    return driver.FakeCuda(library if library.exists() else driver.build(folder))


def make_memory(size: int) -> torch.Tensor:
    """Returns random bytes on the device: zeros could be faster than real data."""
    return torch.empty(size, dtype=torch.uint8, device="cuda").random_()


def cut_shard(memory: torch.Tensor, count: int) -> Tensors:
    """Returns `count` equal tensors in memory, not adjacent, as a rank of a model has them."""
    return cut(memory, count, memory.nbytes // count // 512 * 512, _GAP_BYTES)


def make_shard(size: int, count: int) -> Tensors:
    """Returns `count` equal tensors in new device memory."""
    return cut_shard(make_memory(size), count)


def make_small(count: int) -> Tensors:
    """Returns `count` tensors of 512 B to 8 KiB, not adjacent, like biases, norms and scales."""
    sizes = [512 << (i % 5) for i in range(count)]
    memory = make_memory(sum(sizes) + _GAP_BYTES * count)
    tensors, at = {}, 0
    for i, size in enumerate(sizes):
        tensors[f"decoder.layers.{i}.bias"] = memory[at : at + size]
        at += size + _GAP_BYTES
    return tensors


def spans_of(shard: Tensors, most_bytes: int) -> list[Span]:
    """Returns where the tensors' bytes are, cut into spans of at most `most_bytes`."""
    return [
        (tensor.data_ptr() + at, min(most_bytes, tensor.nbytes - at))
        for tensor in shard.values()
        for at in range(0, tensor.nbytes, most_bytes)
    ]
