"""The fake CUDA driver as tests see it: it is built here, ordered about, and asked what happened.

See fake_cuda.cc for what it imitates. A `FakeCuda` is the trainer's side: its context, its streams and
its kernels; the engine under test opens the same library by its path.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

SOURCES = Path(__file__).parent
ILLEGAL_ACCESS, LAUNCH_FAILURE = 700, 719  # these end the context
UNCORRECTABLE_MEMORY, UNCORRECTABLE_NVLINK = 214, 220  # and these
INVALID_CONTEXT = 201  # of the calling thread
UNKNOWN = 999  # says nothing about the context


def build(folder: Path) -> Path:
    """Compiles the library into `folder`; returns its path."""
    target = folder / "libfakecuda.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]
    sources = [str(source) for source in sorted(SOURCES.glob("*.cc"))]
    subprocess.run([*compiler, *flags, "-o", str(target), *sources], check=True)
    return target


class FakeCuda:
    """One test's driver. The calling thread is the trainer's."""

    current: ClassVar[FakeCuda | None] = None  # the last one that was made and not closed

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = library = ctypes.CDLL(self.path)
        for name in ("fake_new_context", "fake_new_stream", "fake_allocate"):
            getattr(library, name).restype = ctypes.c_void_p
        for name in ("fake_live_streams", "fake_live_events", "fake_registered_bytes", "fake_deepest_queue"):
            getattr(library, name).restype = ctypes.c_long
        library.fake_log.restype = ctypes.c_size_t
        library.fake_reset()
        self.context = library.fake_new_context()
        self.use_context(self.context)
        self._streams: list[int] = []
        self._taken: list[str] = []
        FakeCuda.current = self

    # -- the trainer's side -----------------------------------------------------------------------------

    def new_context(self) -> int:
        return int(self._library.fake_new_context())

    def use_context(self, context: int | None) -> None:
        self._library.fake_use_context(ctypes.c_void_p(context))

    def new_stream(self) -> int:
        self._streams.append(int(self._library.fake_new_stream()))
        return self._streams[-1]

    def allocate(self, size: int) -> np.ndarray:
        """Allocates device memory; the next one follows at once if `size` is a multiple of 512 bytes."""
        address = self._library.fake_allocate(ctypes.c_size_t(size))
        assert address, "no device memory is left"
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)

    def free(self, memory: np.ndarray) -> None:
        """Frees device memory: a copy that reads it from now on is a misuse."""
        self._library.fake_free(ctypes.c_void_p(memory.ctypes.data))

    def unmap(self, memory: np.ndarray) -> None:
        """Unmaps memory as memory savers do: no copy can be enqueued; one that was ends the context."""
        self._library.fake_unmap(ctypes.c_void_p(memory.ctypes.data))

    def adopt(self, address: int, size: int) -> None:
        """Makes host memory an allocation of the device, as tests see it."""
        self._library.fake_adopt(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def adopt_array(self, array: np.ndarray) -> None:
        """Does the same for all the memory that an array is a part of, unless that was allocated."""
        whole: Any = array
        while getattr(whole, "base", None) is not None:  # as_strided puts an object of its own between
            whole = whole.base
        if isinstance(whole, np.ndarray):
            self.adopt(whole.ctypes.data, whole.nbytes)

    def synchronize_device(self) -> None:
        """Waits for everything that any stream was given, as torch.cuda.synchronize() does."""
        self._library.fake_synchronize_device()

    def launch_fill(self, stream: int, address: int, value: int, size: int, seconds: float = 0.0) -> None:
        """Launches a kernel that fills memory, after `seconds` of work."""
        self._library.fake_launch_fill(
            ctypes.c_void_p(stream),
            ctypes.c_void_p(address),
            value,
            ctypes.c_size_t(size),
            int(seconds * 1e3),
        )

    def synchronize(self, stream: int) -> None:
        self._library.fake_synchronize(ctypes.c_void_p(stream))

    def is_idle(self, stream: int) -> bool:
        return bool(self._library.fake_is_idle(ctypes.c_void_p(stream)))

    # -- orders -----------------------------------------------------------------------------------------

    def hold_stream(self, stream: int) -> None:
        self._library.fake_hold_stream(ctypes.c_void_p(stream))

    def release_stream(self, stream: int) -> None:
        self._library.fake_release_stream(ctypes.c_void_p(stream))

    def hold_call(self, name: str, *, except_here: bool = False) -> None:
        """Makes every call of this function hang until `release_call`; those of this thread, too, or not."""
        self._library.fake_hold_call(name.encode(), 1, int(except_here))

    def release_call(self, name: str) -> None:
        self._library.fake_hold_call(name.encode(), 0, 0)

    def fail(self, name: str, nth: int = 1, code: int = ILLEGAL_ACCESS) -> None:
        """Makes the nth call from now on fail; 0: every one."""
        self._library.fake_fail(name.encode(), ctypes.c_long(nth), code)

    def hold_copies(self) -> None:
        """Makes every copy that has not begun to run wait, on its stream, until `release_copies`."""
        self._library.fake_hold_copies(1)

    def release_copies(self) -> None:
        self._library.fake_hold_copies(0)

    def delay_copies(self, seconds: float = 0.0, nanoseconds_per_byte: float = 0.0) -> None:
        self._library.fake_delay_copies(int(seconds * 1e6), ctypes.c_double(nanoseconds_per_byte))

    def share_connection(self) -> None:
        """Acts as with CUDA_DEVICE_MAX_CONNECTIONS=1: one stream's full queue makes every launch wait."""
        self._library.fake_one_connection(1)

    def hide(self, name: str) -> None:
        """Acts as a driver that is too old to have this function."""
        self._library.fake_hide(name.encode())

    def set_bus_id(self, text: str) -> None:
        """Sets the place of every device on the PCI bus."""
        self._library.fake_set_bus_id(text.encode())

    def capture(self, capturing: bool) -> None:
        """Acts as if another thread captured a graph: calls that would break it fail."""
        self._library.fake_capture(int(capturing))

    # -- observations -----------------------------------------------------------------------------------

    @property
    def live_streams(self) -> int:
        """Without those that this object made."""
        return int(self._library.fake_live_streams()) - len(self._streams)

    @property
    def live_events(self) -> int:
        return int(self._library.fake_live_events())

    @property
    def deepest_queue(self) -> int:
        """The most operations that a stream has held at a time."""
        return int(self._library.fake_deepest_queue())

    @property
    def registered_bytes(self) -> int:
        return int(self._library.fake_registered_bytes())

    def forget_registered(self) -> None:
        """Forgets all memory that is page-locked, once the engines that locked it are closed."""
        self._library.fake_forget_registered()

    def log(self) -> list[str]:
        """Returns every call, look-up and execution so far, in order."""
        room = 1 << 16
        while True:
            buffer = ctypes.create_string_buffer(room)
            size = self._library.fake_log(ctypes.c_size_t(0), buffer, ctypes.c_size_t(room))
            if size <= room:
                return buffer.raw[:size].decode().splitlines()
            room = size

    def calls(self, name: str) -> list[str]:
        """Returns the arguments of every call of a function so far."""
        return [line.removeprefix(name).strip() for line in self.log() if line.split()[0] == name]

    @property
    def copies_to_host(self) -> int:
        """The number of copies to the host; the rows of one call are one copy."""
        return len(self.calls("cuMemcpyDtoHAsync")) + len(self.calls("cuMemcpy2DAsync"))

    def take_misuse(self) -> list[str]:
        """Returns and forgets what was done wrong so far, so that the test does not fail for it."""
        found = [line for line in self.log() if line.startswith("misuse")]
        self._taken += found
        return found

    @property
    def misuse(self) -> list[str]:
        """The calls that were wrong, without those that a test has taken."""
        return [line for line in self.log() if line.startswith("misuse") and line not in self._taken]

    def let_go(self) -> None:
        """Takes all orders back."""
        self._library.fake_let_go()

    def close(self) -> None:
        for stream in self._streams:
            self._library.fake_drop_stream(ctypes.c_void_p(stream))
        self._streams = []
        FakeCuda.current = None
        self._library.fake_reset()
        self.use_context(None)
