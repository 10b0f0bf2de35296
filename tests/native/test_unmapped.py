"""Device memory that goes away under a lazy save: that save fails and says why, and the process lives."""

from pathlib import Path

import numpy as np
import pytest

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import KIB, Copy, Engines, Save, random_bytes, save_whole, see_in_time
from tests.support.waiting import eventually

SLOT = 64 * KIB
NEVER = 60.0  # seconds; longer than a test
LIES = ["one piece", "rows", "many"]
CALLS = {"one piece": "cuMemcpyDtoHAsync", "rows": "cuMemcpy2DAsync", "many": "cuMemcpyDtoHAsync"}
SAFE = [Copy(random_bytes(SLOT, 7), 0)]


def allocated(cuda: FakeCuda, lies: str) -> tuple[np.ndarray, list[Copy]]:
    """Returns device memory, and copies of it that the driver's call in CALLS makes."""
    memory = cuda.allocate(4 * SLOT)
    memory[:] = random_bytes(4 * SLOT)
    if lies == "one piece":
        return memory, [Copy(memory, 0, device=True)]
    if lies == "rows":
        return memory, [Copy(memory.reshape(-1, 512)[:, :256], 0, device=True)]
    return memory, [Copy(memory[512 * i :][:256], 256 * i, device=True) for i in range(200)]


def start(engine: native.Engine, path: Path, copies: list[Copy], stream: int, **options: float) -> Save:
    """Starts a save of allocated memory, and closes its input."""
    save = Save(engine, path, copies, stream=stream, **options)
    save.job.close_input()
    return save


@pytest.fixture(params=LIES)
def lies(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_memory_unmapped_before_its_copies_are_enqueued_fails_the_save_alone(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, lies: str
) -> None:
    """Samples were taken, so the device is known to be in order."""
    engine, stream = device_engines(), cuda.new_stream()
    memory, copies = allocated(cuda, lies)
    save = start(engine, tmp_path / "data", copies, stream, lazy_seconds=NEVER)
    cuda.synchronize_device()
    cuda.unmap(memory)
    engine.allow_lazy_copies(save.job, 0)
    error = save.failure()
    assert "invalid argument" in error and "unmapped since the save" in error
    assert any(CALLS[lies] in line for line in cuda.log())
    save.job.remove()
    other = save_whole(engine, tmp_path / "next", [Copy(random_bytes(SLOT), 0, device=True)], stream=stream)
    assert other.error == ""


@pytest.mark.parametrize("eager", [False, True])
def test_memory_unmapped_under_enqueued_copies_fails_the_save_and_says_that_the_context_is_lost(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, lies: str, eager: bool
) -> None:
    """The trainer's own calls return the driver's errors then; nothing of ours crashes or hangs."""
    engine, stream = device_engines(tripwire=False), cuda.new_stream()
    memory, copies = allocated(cuda, lies)
    for copy in copies:
        copy.eager = eager
    cuda.hold_stream(stream)
    save = start(engine, tmp_path / "data", copies, stream)
    save.expect(Milestone.EAGER if eager else Milestone.ENQUEUED)
    cuda.unmap(memory)
    cuda.release_stream(stream)
    error = save.failure()
    assert "an illegal memory access" in error and "restart the process" in error
    save.job.remove()
    with pytest.raises(OSError, match=r"restart the process"):
        Save(engine, tmp_path / "later", [Copy(random_bytes(SLOT), 0, device=True)], stream=stream)
    save_whole(engine, tmp_path / "host", SAFE)


def test_samples_that_are_enqueued_when_memory_is_unmapped_fail_the_save(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, lies: str
) -> None:
    engine, stream = device_engines(), cuda.new_stream()
    memory, copies = allocated(cuda, lies)
    cuda.hold_stream(stream)
    save = start(engine, tmp_path / "data", copies, stream, lazy_seconds=NEVER)
    cuda.unmap(memory)
    cuda.release_stream(stream)
    assert "an illegal memory access" in save.failure()


def test_a_failed_save_counts_as_copied_when_no_copy_is_under_way(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """Code that frees or unmaps memory waits for copies alone, and not for a disk that hangs."""
    engine = device_engines(most_slots=2, write_threads=1, tripwire=False, faults="write:0:stall=1500")
    memory, copies = allocated(cuda, "one piece")
    stream = cuda.new_stream()
    cuda.hold_stream(stream)
    save = start(engine, tmp_path / "data", copies, stream)
    eventually(lambda: cuda.copies_to_host == 2, "both slots are being copied to")
    save.job.cancel("enough")
    assert not save.reaches(Milestone.STAGED, 0.2)
    cuda.release_stream(stream)
    assert save.reaches(Milestone.STAGED)
    cuda.unmap(memory)
    assert save.reaches(Milestone.RELEASED)


def test_a_failed_save_from_host_memory_counts_as_copied_while_its_write_hangs(
    engines: Engines, tmp_path: Path
) -> None:

    def counts_as_copied(milliseconds: int) -> bool:
        engine = engines(most_slots=2, write_threads=1, faults=f"write:1:stall={milliseconds}")
        save = Save(engine, tmp_path / str(milliseconds), [Copy(random_bytes(8 * SLOT), 0)])
        eventually(lambda: save.status["bytes_staged"] >= 2 * SLOT, "both slots are full")
        was_copied = save.reaches(Milestone.STAGED, 0.1)
        save.job.cancel("enough")
        assert save.reaches(Milestone.STAGED)
        in_time = not was_copied and not save.reaches(Milestone.RELEASED, 0.0)
        assert save.reaches(Milestone.RELEASED)
        return in_time

    see_in_time(counts_as_copied)
