"""The native module. Waits and reads release the GIL; errors are NativeError(errno or 0, text)."""

import enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

class Milestone(enum.Enum):
    """The milestones of a job that can be waited for; cuda/engine/save_job.h defines them."""

    EAGER = 0
    ENQUEUED = 1
    STAGED = 2
    APPENDED = 3
    WRITTEN = 4
    DURABLE = 5
    RELEASED = 6

class Output(enum.Enum):
    """What becomes of staged chunks; cuda/engine/save_job.h defines it."""

    FILE = 0
    FILE_AND_DIGESTS = 1
    DIGESTS = 2

class NumberKind(enum.Enum):
    """How elements are stored; cuda/numbers/numbers.h defines it."""

    FLOAT64 = 0
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3

class NativeError(OSError):
    """A failed call. `errno` is 0 if no system call failed; `path` is empty if no checkpoint file is concerned."""

    path: str
    operation: str

class SaveJob:
    def wait(self, milestone: Milestone, seconds: float) -> bool: ...
    def close_input(self) -> None: ...
    def hold_back(self, stream: int) -> None: ...
    def stream_waited(self) -> float: ...
    def cancel(self, reason: str) -> None: ...
    def remove(self) -> None: ...
    def status(self) -> dict[str, Any]: ...
    def block_checksums(self) -> bytes: ...
    def block_digests(self) -> bytes: ...

class Engine:
    def __init__(
        self,
        *,
        slot_bytes: int,
        most_slots: int,
        copy_threads: int,
        write_threads: int,
        direct: bool,
        checksums: bool,
        copy_limit: int,
        write_limit: int,
        driver: str,
        faults: str,
        discard: bool = False,
        tripwire: bool = True,
        paranoid: bool = False,
        sysfs: str = "/sys",
        most_in_flight: int = ...,
        sample_seed: int = 0,
    ) -> None: ...
    def start(
        self,
        *,
        path: str,
        reserve_bytes: int,
        end: int,
        sources: NDArray[np.uint64],
        bytes: NDArray[np.uint64],
        offsets: NDArray[np.uint64],
        row_bytes: NDArray[np.uint64],
        row_steps: NDArray[np.uint64],
        storages: NDArray[np.uint64],
        flags: NDArray[np.uint8],
        stream: int,
        lazy_seconds: float,
        output: Output = ...,
    ) -> SaveJob: ...
    def allow_lazy_copies(self, job: SaveJob, seconds: float, hurries: bool = False) -> None: ...
    def append(
        self,
        *,
        job: SaveJob,
        begin: int,
        end: int,
        sources: NDArray[np.uint64],
        bytes: NDArray[np.uint64],
        offsets: NDArray[np.uint64],
        row_bytes: NDArray[np.uint64],
        row_steps: NDArray[np.uint64],
        storages: NDArray[np.uint64],
        flags: NDArray[np.uint8],
    ) -> None: ...
    def finish(self, *, job: SaveJob, footer: bytes, offset: int) -> None: ...
    def grow(self, slots: int) -> None: ...
    def limit(self, most_slots: int) -> None: ...
    def page_lock_pool(self) -> bool: ...
    def pool(self) -> dict[str, int | str]: ...
    def close(self, seconds: float = ...) -> bool: ...

class ReadJob:
    def wait(self, seconds: float) -> bool: ...
    def close(self) -> None: ...
    def result(self) -> tuple[int, list[tuple[int, int]], NativeError | None]:
        """Returns (bytes read, (source, block) of each bad block, the first error), so far."""

class Reader:
    def __init__(
        self,
        *,
        direct: bool,
        threads: int,
        slot_bytes: int,
        driver: str,
        faults: str,
        sysfs: str = "/sys",
    ) -> None: ...
    def start(
        self,
        *,
        sources: list[tuple[str, int, bytes, bool]],
        files: NDArray[np.uint64],
        offsets: NDArray[np.uint64],
        row_bytes: NDArray[np.uint64],
        rows: NDArray[np.uint64],
        file_steps: NDArray[np.uint64],
        targets: NDArray[np.uint64],
        target_steps: NDArray[np.uint64],
        flags: NDArray[np.uint8],
        stream: int,
    ) -> ReadJob:
        """Starts a read. `files` are indices of sources.

        Args:
            sources: (path, bytes of data, checksums, whether it is read through the page cache).
        """

def close_in_forked_child(descriptor: int) -> None: ...
def forget_descriptor(descriptor: int) -> None: ...
def describe_tensors(
    api: object, tensors: list[Any], is_neg: object, storage_of: object | None
) -> tuple[bytes, bytes, bool, bool, list[Any]] | None:
    """Returns (addresses, description, has_complex, has_negative, storages), see engine/exchange.py."""

def locate_tensors(
    api: object,
    tensors: list[Any],
    types: list[type],
    description: bytes,
    known: bytes,
    is_neg: object,
    storage_of: object,
) -> tuple[bytes, list[Any]] | None:
    """Returns (addresses, storages) of tensors that are as described, see engine/exchange.py; else None."""

def measure_storages(storages: list[Any], address_of: object) -> tuple[bytes, bytes]:
    """Returns (addresses, sizes in bytes), see engine/exchange.py."""

class Structure:
    def __init__(
        self, owners: list[Any], roots: list[Any], *, attributes: list[str], own: list[str], opaque: list[str]
    ) -> None: ...
    def leaves(self, owners: list[Any], roots: list[Any]) -> list[Any] | None:
        """Returns what is held by identity; None if anything differs from what it was (bindings/structure.h)."""

    def choose(self, leaves: list[int]) -> None:
        """Lets `leaves` return only those with these numbers. Raises IndexError for one that is not there."""

    @property
    def walks(self) -> int:
        """How often `leaves` had to walk all of it; else it relied on what Python reports of dictionaries."""

def compare_numbers(
    kind: NumberKind, left: NDArray[np.uint8], right: NDArray[np.uint8]
) -> tuple[int, float, float, int, float, float]:
    """Returns the fields of convert.drift.Drift, in their order. Releases the GIL."""

def summarize_numbers(
    kind: NumberKind, data: NDArray[np.uint8]
) -> tuple[int, int, float, float, float, float]:
    """Returns (finite, nans, minimum, maximum, total, squares); the last four of finite elements."""

def crc32c(data: bytes, crc: int = 0) -> int: ...
def crc32c_by_tables(data: bytes, crc: int = 0) -> int: ...
def sha256(data: bytes) -> bytes: ...
def sha256_portable(data: bytes) -> bytes: ...
def crc32c_combine(a: int, b: int, bytes_of_b: int) -> int: ...

BLOCK_BYTES: int
ALIGNMENT: int
EAGER_FLAG: int
DEVICE_FLAG: int
