import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray

class Milestone(enum.Enum):
    EAGER = 0

    STAGED = 1

    COPIED = 2

    WRITTEN = 3

    DURABLE = 4

    RELEASED = 5

class SaveJob:
    def wait(self, milestone: Milestone, seconds: float) -> bool: ...
    def close_input(self) -> None: ...
    def hold_back(self, stream: int, eager_only: bool) -> None: ...
    def fail(self, reason: str) -> None: ...
    def cancel(self, reason: str) -> None: ...
    def remove(self) -> None: ...
    def status(self) -> dict: ...
    def block_checksums(self) -> bytes: ...

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
    ) -> None: ...
    def start(
        self,
        *,
        path: str,
        reserve_bytes: int,
        end: int,
        sources: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        bytes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        offsets: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        flags: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        stream: int,
    ) -> SaveJob: ...
    def append(
        self,
        *,
        job: SaveJob,
        begin: int,
        end: int,
        sources: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        bytes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        offsets: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        flags: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None: ...
    def finish(self, *, job: SaveJob, footer: bytes, offset: int) -> None: ...
    def grow(self, slots: int) -> None: ...
    def slots(self) -> int: ...
    def close(self) -> None: ...

def read_pieces(
    *,
    path: str,
    data_bytes: int,
    offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
    bytes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
    targets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
    checksums: bytes,
    direct: bool,
    threads: int,
    buffer_bytes: int,
    faults: str,
) -> tuple: ...
def crc32c(data: bytes, crc: int = 0) -> int: ...
def crc32c_by_tables(data: bytes, crc: int = 0) -> int: ...
def crc32c_combine(a: int, b: int, bytes_of_b: int) -> int: ...

BLOCK_BYTES: int = 1048576

ALIGNMENT: int = 4096

EAGER_FLAG: int = 1

DEVICE_FLAG: int = 2
