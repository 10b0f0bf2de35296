"""Direct calls of the CUDA driver, the references of benchmarks.gpu: bare copies, page-locking, bare streams.

What belongs here: the least that something can cost with the same driver. What does not: the engine under
test.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.device import Span
from megatron_datastates.config import MIB

COLLAPSE, POPULATE = 25, 23  # MADV_COLLAPSE, MADV_POPULATE_WRITE
_HUGE_PAGE = 2 * MIB
_PORTABLE, _NON_BLOCKING, _NO_TIMING = 1, 1, 2
_WORD, _POINTER = ctypes.c_size_t, ctypes.c_void_p

# In C, since Python would add its own microsecond to every call of the driver.
_LOOP = """
#include <stddef.h>
typedef int (*copy_t)(void *, unsigned long long, size_t, void *);
int loop(copy_t copy, void **targets, unsigned long long *sources, size_t *sizes, long count, void *stream) {
  int worst = 0;
  for (long i = 0; i < count; ++i) {
    const int code = copy(targets[i], sources[i], sizes[i], stream);
    if (code != 0) worst = code;
  }
  return worst;
}
"""


class Driver:
    """Calls functions of the driver; one that fails raises RuntimeError with its name and code."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._context = _POINTER()
        self.call("cuCtxGetCurrent", ctypes.addressof(self._context))

    def address(self, name: str) -> int:
        """Returns a function's address, looked up as of CUDA 12.0, as cuda/device/driver.cc does."""
        found = _POINTER()
        code = self._library.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(found), 12000, ctypes.c_ulonglong(0), None
        )
        if code or not found.value:
            raise RuntimeError(f"the driver has no {name} (CUDA error {code})")
        return int(found.value)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function without Python's lock. Passes integers in 64 bits."""
        words = [_WORD(value) if isinstance(value, int) else value for value in arguments]
        function = ctypes.CFUNCTYPE(ctypes.c_int, *(type(word) for word in words))(self.address(name))
        if code := function(*words):
            raise RuntimeError(f"{name} failed with CUDA error {code}")

    def enter_thread(self) -> None:
        """Makes the context of the thread that made this object current on the calling one."""
        self.call("cuCtxSetCurrent", self._context)

    def make_stream(self) -> ctypes.c_void_p:
        """Returns a new stream that does not synchronize with the default one."""
        stream = _POINTER()
        self.call(
            "cuStreamCreateWithPriority",
            ctypes.addressof(stream),
            ctypes.c_uint(_NON_BLOCKING),
            ctypes.c_int(0),
        )
        return stream

    def make_event(self) -> ctypes.c_void_p:
        """Returns a new event without a time."""
        event = _POINTER()
        self.call("cuEventCreate", ctypes.addressof(event), ctypes.c_uint(_NO_TIMING))
        return event

    def lock(self, address: int, size: int) -> None:
        """Page-locks host memory for every context."""
        self.call("cuMemHostRegister", address, size, ctypes.c_uint(_PORTABLE))

    def unlock(self, address: int) -> None:
        """Undoes `lock`."""
        self.call("cuMemHostUnregister", address)


class HostMemory:
    """Anonymous host memory that begins with a huge page, not yet touched."""

    def __init__(self, size: int, advice: int | None = mmap.MADV_HUGEPAGE) -> None:
        self.bytes = -(-size // MIB) * MIB
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, self.bytes + _HUGE_PAGE, flags=flags)
        begin = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self._skipped = -begin % _HUGE_PAGE
        self.address = begin + self._skipped
        if advice is not None:
            self.advise(advice)

    def advise(self, advice: int) -> bool:
        """Calls madvise for all of the memory; returns whether the kernel accepted it."""
        try:
            self._map.madvise(advice, self._skipped, self.bytes)
        except OSError:
            return False
        return True

    def touch(self) -> None:
        """Makes the kernel provide every page."""
        if not self.advise(POPULATE):
            np.frombuffer(self._map, np.uint8)[self._skipped : self._skipped + self.bytes : 4096] = 1

    def free(self) -> None:
        """Returns the memory to the system."""
        with contextlib.suppress(BufferError):  # a view of it is left, and keeps it
            self._map.close()


class BareCopies:
    """Measures the least that copying to the host can cost, into page-locked memory of the same size.

    Loops over cuMemcpyDtoHAsync, which cudaMemcpyAsync calls, without torch: in C if a compiler builds the
    loop in `folder`, else in Python (`language`).
    """

    def __init__(self, path: str, size: int, folder: Path) -> None:
        self._driver = Driver(path)
        self._stream, self._event = self._driver.make_stream(), self._driver.make_event()
        self._copy = self._driver.address("cuMemcpyDtoHAsync")
        self._loop = _compiled_loop(folder)
        self.language = "Python" if self._loop is None else "C"
        self._memory = HostMemory(size)
        self._memory.touch()
        self._driver.lock(self._memory.address, self._memory.bytes)

    def seconds(self, spans: Sequence[Span]) -> float:
        """Returns the seconds from the first call to the last byte's arrival. The device must be idle."""
        sizes = np.array([size for _, size in spans], np.uint64)
        sources = np.array([source for source, _ in spans], np.uint64)
        targets = np.uint64(self._memory.address) + np.cumsum(sizes) - sizes
        begin = time.perf_counter()
        if code := self._enqueue(targets, sources, sizes):
            raise RuntimeError(f"cuMemcpyDtoHAsync failed with CUDA error {code}")
        self._driver.call("cuEventRecord", self._event, self._stream)
        self._driver.call("cuEventSynchronize", self._event)
        return time.perf_counter() - begin

    def _enqueue(self, targets: Any, sources: Any, sizes: Any) -> int:
        if self._loop is not None:
            pointers = (_POINTER(array.ctypes.data) for array in (targets, sources, sizes))
            count = ctypes.c_long(len(sizes))
            return int(self._loop(_POINTER(self._copy), *pointers, count, self._stream))
        word = ctypes.c_ulonglong
        copy = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, word, _WORD, _POINTER)(self._copy)
        work = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
        return max((copy(target, source, size, self._stream) for target, source, size in work), default=0)

    def close(self) -> None:
        """Unlocks and frees the memory; the stream, which has none, stays."""
        self._driver.unlock(self._memory.address)
        self._memory.free()


def _compiled_loop(folder: Path) -> Any:
    """Builds the loop in C; returns None where there is no compiler."""
    target = folder / "bare_loop.so"
    if not target.exists():
        source = folder / "bare_loop.c"
        source.write_text(_LOOP)
        try:
            command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(target), str(source)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            return None
    return ctypes.CDLL(str(target)).loop
