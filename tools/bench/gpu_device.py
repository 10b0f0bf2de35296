"""The device that gpu.py measures: a GPU, or host memory that the fake CUDA driver serves.

On the fake one all of the benchmark's code runs as on a GPU, and none of its numbers means anything.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FAKE = "DATASTATES_BENCH_FAKE"  # set for the processes of a try without a GPU, those they start included
IS_FAKE = os.environ.get(FAKE) == "1"
_FAKE_FREE_BYTES = 64 << 20

if IS_FAKE:
    # As this module is imported: a process that Megatron spawns imports the main module again, no more.
    sys.path.insert(0, str(ROOT / "recipes" / "cpu"))
    import pretend_cuda

    pretend_cuda.install()

import torch  # noqa: E402

from megatron_datastates.config import MIB, Options  # noqa: E402

Run = tuple[int, int]  # address and bytes of a source


class Device:
    """The one device of this process, with a context on the calling thread."""

    def __init__(self, folder: Path) -> None:
        self.driver = _fake_driver(folder) if IS_FAKE else "libcuda.so.1"
        if not IS_FAKE:
            torch.cuda.init()
            torch.zeros(1, device="cuda")
        self._held = 0

    def options(self, **values: Any) -> Options:
        return Options(driver=self.driver, **values)

    def free_bytes(self) -> int:
        """Free memory of the whole device, by the driver."""
        return _FAKE_FREE_BYTES if IS_FAKE else int(torch.cuda.mem_get_info()[0])

    def peak_bytes(self) -> int:
        """The most that torch's allocator has given out since `reset_peak`, beyond what it gave out then."""
        return 0 if IS_FAKE else int(torch.cuda.max_memory_allocated()) - self._held

    def reset_peak(self) -> None:
        if not IS_FAKE:
            torch.cuda.reset_peak_memory_stats()
            self._held = int(torch.cuda.memory_allocated())


def _fake_driver(folder: Path) -> str:
    """Builds it, and makes every source that a save finds in host memory one of the fake device."""
    sys.path.insert(0, str(ROOT))
    from megatron_datastates.engine import staging
    from megatron_datastates.providers.tensors import Structure
    from tests.native.fake_cuda.driver import FakeCuda, build

    driver = FakeCuda(build(folder))
    Structure.devices = lambda self: [0] * len(self.keys)
    staging._current_device = lambda: 0
    return driver.path


def make_memory(size: int) -> torch.Tensor:
    """Random bytes: zeros could be faster than real data."""
    return torch.empty(size, dtype=torch.uint8, device="cuda").random_()


def cut(memory: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """That many tensors in it, as a rank of a model has them: not adjacent."""
    pitch = memory.nbytes // count // 512 * 512
    return {f"tensor{i}": memory[i * pitch : (i + 1) * pitch - 512] for i in range(count)}


def make_shard(size: int, count: int) -> dict[str, torch.Tensor]:
    return cut(make_memory(size), count)


def runs_of(shard: dict[str, torch.Tensor], most_bytes: int) -> list[Run]:
    """The bytes of the tensors, cut to at most so many a run."""
    return [
        (tensor.data_ptr() + at, min(most_bytes, tensor.nbytes - at))
        for tensor in shard.values()
        for at in range(0, tensor.nbytes, most_bytes)
    ]


class BareCopies:
    """The least that copying to the host can cost, into page-locked memory of the same size.

    A loop of cuMemcpyDtoHAsync, which is what cudaMemcpyAsync becomes, without torch.
    """

    def __init__(self, driver: str, size: int) -> None:
        self._driver = ctypes.CDLL(driver)
        word, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._copy = self._find("cuMemcpyDtoHAsync", pointer, ctypes.c_ulonglong, word, pointer)
        self._record = self._find("cuEventRecord", pointer, pointer)
        self._await = self._find("cuEventSynchronize", pointer)
        self._unlock = self._find("cuMemHostUnregister", pointer)
        self._stream, self._event = pointer(), pointer()
        make_stream = self._find("cuStreamCreateWithPriority", pointer, ctypes.c_uint, ctypes.c_int)
        make_event = self._find("cuEventCreate", pointer, ctypes.c_uint)
        _check(make_stream(ctypes.addressof(self._stream), 1, 0), "cuStreamCreateWithPriority")
        _check(make_event(ctypes.addressof(self._event), 2), "cuEventCreate")
        self._memory = mmap.mmap(-1, -(-size // MIB) * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        lock = self._find("cuMemHostRegister", pointer, word, ctypes.c_uint)
        _check(lock(self._address, len(self._memory), 1), "cuMemHostRegister")

    def _find(self, name: str, *arguments: Any) -> Any:
        """A function of the driver, with the signature that CUDA 12.0 gave it, as cuda/device/driver.cc."""
        found = ctypes.c_void_p()
        _check(
            self._driver.cuGetProcAddress_v2(
                name.encode(), ctypes.byref(found), 12000, ctypes.c_ulonglong(0), None
            ),
            name,
        )
        return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(found.value)

    def seconds(self, runs: Sequence[Run]) -> float:
        """From the first call until the last byte is there. The device must be idle."""
        targets = (self._address + np.cumsum([0, *(size for _, size in runs[:-1])])).tolist()
        work = [(target, source, size) for target, (source, size) in zip(targets, runs, strict=True)]
        copy, stream = self._copy, self._stream
        begin = time.perf_counter()
        worst = 0
        for target, source, size in work:
            worst = copy(target, source, size, stream) or worst
        _check(worst, "cuMemcpyDtoHAsync")
        _check(self._record(self._event, self._stream), "cuEventRecord")
        _check(self._await(self._event), "cuEventSynchronize")
        return time.perf_counter() - begin

    def close(self) -> None:
        """Unlocks the memory; the stream stays, it holds none."""
        _check(self._unlock(self._address), "cuMemHostUnregister")


def _check(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} failed with CUDA error {code}")
