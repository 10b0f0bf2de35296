"""Changes of a source between the start of a save and its copy.

Changes are made through raw pointers, as fused optimizers make them, or by kernels of the fake device. They
come when nothing has been staged yet (`held`), so no test that uses them depends on time.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import ALIGNMENT, Copy, Engines, Save, random_bytes

SLOT = 16 * ALIGNMENT
SEED = 1  # of an engine's first save; in here that is the plug


@pytest.fixture
def engine(device_engines: Engines) -> native.Engine:
    return device_engines(slot_bytes=SLOT, most_slots=2, copy_threads=1, sample_seed=SEED)


@contextlib.contextmanager
def held(cuda: FakeCuda, engine: native.Engine, folder: Path) -> Iterator[None]:
    """Keeps anything from being staged: the only staging thread of a new engine waits in the driver."""
    cuda.hold_call("cuCtxSetCurrent")
    eager = Copy(random_bytes(10), 0, eager=True, device=True)
    plug = Save(engine, folder / "plug", [eager], stream=cuda.new_stream())
    yield
    cuda.release_call("cuCtxSetCurrent")
    plug.job.close_input()
    plug.expect(Milestone.WRITTEN)


def change(copy: Copy, begin: int = 0, size: int | None = None) -> None:
    """Changes all bytes in [begin, begin + size) of the source; no version counter is incremented."""
    part = copy.source[begin:][:size]
    ctypes.memmove(part.ctypes.data, (part ^ 1).tobytes(), part.nbytes)


def torn_at(save: Save) -> int:
    """Returns the offset at which the save says that it was torn. It has failed and left no file."""
    error = save.failure()
    offset = save.status["torn_at"]
    assert f"the source of offset {offset} changed before its copy was done" in error
    assert save.status["torn_bytes"] > 0 and not save.status["cancelled"]
    save.job.remove()
    assert not save.path.exists()
    return int(offset)


def engine_stream_is_done(cuda: FakeCuda, save: Save) -> int:
    """Returns a trainer's stream that waits for the samples."""
    stream = cuda.new_stream()
    save.job.hold_back(stream)
    return stream
