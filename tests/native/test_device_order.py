"""Copies from a device: after what the trainer has enqueued before, ahead of what it enqueues later.

On the fake driver, where a source that is overwritten too early shows.
"""

import threading
from pathlib import Path

import pytest

from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import ALIGNMENT, KIB, Copy, Engines, Save, expected_bytes, random_bytes, save_whole
from tests.support.waiting import eventually

SLOT = 64 * KIB
BEFORE, AFTER = 7, 9  # what kernels write


def on_device(size: int, offset: int = 0, *, eager: bool = False, seed: int = 0) -> Copy:
    return Copy(random_bytes(size, seed), offset, eager, device=True)


def fill(cuda: FakeCuda, stream: int, copy: Copy, value: int, seconds: float = 0.0) -> None:
    cuda.launch_fill(stream, copy.source.ctypes.data, value, copy.source.nbytes, seconds)


def position(cuda: FakeCuda, line: str) -> int:
    return cuda.log().index(line)


def test_device_memory_is_stored(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    copies = [on_device(5 * SLOT + 100, 64), on_device(300, 6 * SLOT, seed=1), on_device(9, 7 * SLOT, seed=2)]
    save_whole(device_engines(), tmp_path / "data", copies, stream=cuda.new_stream())


def test_the_default_stream_is_a_stream(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    copy = on_device(SLOT)
    fill(cuda, 0, copy, BEFORE, seconds=0.05)
    save = Save(device_engines(), tmp_path / "data", [copy], stream=0)
    save.finish()
    assert set(save.path.read_bytes()[:SLOT]) == {BEFORE}


def test_host_and_device_bytes_share_a_slot(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    copies = [Copy(random_bytes(100, i), i * 130, eager=i % 3 == 0, device=i % 2 == 0) for i in range(2000)]
    save_whole(device_engines(slot_bytes=ALIGNMENT), tmp_path / "data", copies, stream=cuda.new_stream())


def test_copies_wait_for_the_kernel_before_the_save(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    trainer, copy = cuda.new_stream(), on_device(4 * SLOT)
    cuda.hold_stream(trainer)
    fill(cuda, trainer, copy, BEFORE, seconds=0)
    save = Save(device_engines(), tmp_path / "data", [copy], stream=trainer)
    assert not cuda.is_idle(trainer)
    cuda.release_stream(trainer)
    save.finish()
    assert set(save.path.read_bytes()[: save.end]) == {BEFORE}


def test_start_and_fence_do_not_wait_for_the_device(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """With slots enough for the shard, the host only enqueues; the trainer's stream waits."""
    trainer, copy = cuda.new_stream(), on_device(4 * SLOT)
    cuda.hold_stream(trainer)
    fill(cuda, trainer, copy, BEFORE)
    save = Save(device_engines(most_slots=8), tmp_path / "data", [copy], stream=trainer)
    save.expect(Milestone.ENQUEUED)
    save.job.hold_back(trainer)
    fill(cuda, trainer, copy, AFTER)
    assert not save.reaches(Milestone.STAGED, 0.05)  # the device has not even begun
    cuda.release_stream(trainer)
    save.finish()
    cuda.synchronize(trainer)
    assert set(copy.source.tolist()) == {AFTER}
    assert set(save.path.read_bytes()[: save.end]) == {BEFORE}


def test_without_the_fence_copies_are_torn(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    """Shows that the test above can fail: the same, but nobody holds the trainer's stream back."""
    trainer, copy = cuda.new_stream(), on_device(4 * SLOT)
    cuda.hold_copies()
    fill(cuda, trainer, copy, BEFORE)
    save = Save(device_engines(most_slots=8, tripwire=False), tmp_path / "data", [copy], stream=trainer)
    save.expect(Milestone.ENQUEUED)
    fill(cuda, trainer, copy, AFTER)
    cuda.synchronize(trainer)
    cuda.release_copies()
    save.finish()
    assert AFTER in save.path.read_bytes()[: save.end]


def test_eager_copies_hold_the_trainer_back_and_lazy_ones_do_not(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    trainer = cuda.new_stream()
    eager, lazy = on_device(1000, eager=True), on_device(7 * SLOT, SLOT, seed=1)
    wanted = expected_bytes([eager, lazy])
    cuda.hold_copies()
    engine = device_engines(most_slots=16, copy_threads=1)
    save = Save(engine, tmp_path / "data", [eager, lazy], stream=trainer, lazy_seconds=3600)
    save.expect(Milestone.EAGER)
    save.job.hold_back(trainer)
    fill(cuda, trainer, eager, AFTER)
    cuda.release_copies()
    cuda.synchronize(trainer)
    cuda.hold_copies()
    engine.allow_lazy_copies(save.job, 0)
    save.expect(Milestone.ENQUEUED)
    fill(cuda, trainer, eager, AFTER)
    cuda.synchronize(trainer)
    assert not save.reaches(Milestone.STAGED, 0)
    cuda.release_copies()
    save.finish()
    assert save.path.read_bytes()[: save.end] == wanted
    ran = [line.split()[1] for line in cuda.log() if line.startswith("ran")]
    assert ran.index("fill") > ran.index("copy")


@pytest.mark.parametrize("tripwire", [False, True])  # samples are awaited before any chunk
def test_sources_are_in_use_until_the_device_has_read_them(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, tripwire: bool
) -> None:
    trainer = cuda.new_stream()
    cuda.hold_stream(trainer)
    engine = device_engines(most_slots=8, tripwire=tripwire)
    save = Save(engine, tmp_path / "data", [on_device(2 * SLOT)], stream=trainer)
    save.expect(Milestone.ENQUEUED)
    assert not save.reaches(Milestone.STAGED, 0.05)
    assert save.status["bytes_staged"] == 0
    cuda.release_stream(trainer)
    save.expect(Milestone.STAGED)
    save.finish()


def test_a_small_pool_streams_a_shard_from_the_device(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine = device_engines(slot_bytes=ALIGNMENT, most_slots=2, tripwire=False)
    save_whole(engine, tmp_path / "data", [on_device(100 * ALIGNMENT)], stream=cuda.new_stream())
    assert engine.pool()["slots"] == 2 and cuda.registered_bytes == 2 * ALIGNMENT


def test_two_saves_of_one_stream_keep_their_order(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    trainer, copy = cuda.new_stream(), on_device(8 * SLOT)
    cuda.delay_copies(seconds=0.01)
    engine = device_engines(most_slots=32)
    saves = []
    for value in (BEFORE, AFTER):
        fill(cuda, trainer, copy, value)
        saves.append(Save(engine, tmp_path / str(value), [copy], stream=trainer))
        saves[-1].expect(Milestone.ENQUEUED)
        saves[-1].job.hold_back(trainer)
    for save, value in zip(saves, (BEFORE, AFTER), strict=True):
        save.finish()
        assert set(save.path.read_bytes()[: save.end]) == {value}


# -- how the driver is used -------------------------------------------------------------------------------


def test_the_stream_has_the_lowest_priority_and_does_not_block(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine = device_engines()
    for name in "ab":
        save_whole(engine, tmp_path / name, [on_device(SLOT)], stream=cuda.new_stream())
    assert cuda.calls("cuStreamCreateWithPriority") == ["flags=1 priority=0"]


def test_no_device_memory_is_allocated(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    save_whole(device_engines(), tmp_path / "data", [on_device(9 * SLOT)], stream=cuda.new_stream())
    known = {line.split()[-1] for line in cuda.log() if line.startswith("look up")}
    assert "cuMemcpyDtoHAsync" in known
    assert [name for name in known if "Alloc" in name or "Create" in name] == [
        name for name in known if name in ("cuStreamCreateWithPriority", "cuEventCreate")
    ]


def test_neighbouring_spans_are_one_copy(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    memory = random_bytes(4 * SLOT)
    joined = [Copy(memory[i : i + 64], i, device=True) for i in range(0, len(memory), 64)]
    save_whole(device_engines(tripwire=False), tmp_path / "joined", joined, stream=cuda.new_stream())
    assert [call.split()[1] for call in cuda.calls("cuMemcpyDtoHAsync")] == [str(SLOT)] * 4


@pytest.mark.parametrize("what", ["memory", "file", "eager"])
def test_runs_that_only_look_like_neighbours_are_not_joined(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, what: str
) -> None:
    memory = random_bytes(300)
    second = Copy(
        memory[100 + (what == "memory") :][:100], 100 + (what == "file"), eager=what == "eager", device=True
    )
    first = Copy(memory[:100], 0, device=True)
    save_whole(device_engines(tripwire=False), tmp_path / "data", [first, second], stream=cuda.new_stream())
    assert cuda.copies_to_host == 2


def test_more_spans_than_the_driver_queues_pass_through(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    memory = random_bytes(1 << 18)
    copies = [Copy(memory[i * 24 : i * 24 + 8], i * 8, device=True) for i in range(10_000)]
    save_whole(device_engines(), tmp_path / "data", copies, stream=cuda.new_stream())
    assert cuda.copies_to_host >= 10_000


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuEventRecord"])
def test_a_driver_that_hangs_does_not_hang_the_trainer(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, call: str
) -> None:
    """Its waits end in time, so that the fence's deadline holds, and status is at hand."""
    # Without samples, which a worker would be caught in, too.
    engine = device_engines(slot_bytes=ALIGNMENT, copy_threads=1, tripwire=False)
    copies, stream = [on_device(5 * ALIGNMENT)], cuda.new_stream()
    save = Save(engine, tmp_path / "data", copies, stream=stream, lazy_seconds=60)
    cuda.hold_call(call)
    before = len(cuda.calls(call))
    engine.allow_lazy_copies(save.job, 0)
    eventually(lambda: len(cuda.calls(call)) > before, "a worker is caught in the driver")
    assert not save.reaches(Milestone.STAGED, 0.1)
    assert save.status["error"] is None
    save.job.cancel("the fence's deadline passed")
    assert not save.reaches(Milestone.RELEASED, 0.1)  # the slot is still the driver's
    cuda.release_call(call)
    assert "deadline" in save.failure()


def test_a_driver_that_hangs_leaves_other_threads_pythons_lock(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    stream = cuda.new_stream()
    save = Save(device_engines(), tmp_path / "data", [on_device(SLOT)], stream=stream)
    save.expect(Milestone.ENQUEUED)
    before = len(cuda.calls("cuStreamWaitEvent"))
    cuda.hold_call("cuStreamWaitEvent")

    def hold_back() -> None:
        cuda.use_context(cuda.context)
        save.job.hold_back(stream)

    thread = threading.Thread(target=hold_back)
    thread.start()
    eventually(lambda: len(cuda.calls("cuStreamWaitEvent")) > before, "the thread is in the driver")
    cuda.release_call("cuStreamWaitEvent")
    thread.join()
    save.finish()


def test_staging_goes_on_while_another_thread_captures_a_graph(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine, stream = device_engines(most_slots=64), cuda.new_stream()
    save_whole(engine, tmp_path / "first", [on_device(SLOT)], stream=stream)
    cuda.capture(True)
    save_whole(engine, tmp_path / "second", [on_device(40 * SLOT)], stream=stream)  # the pool grows, too
    cuda.capture(False)


def test_a_save_may_be_dropped_by_any_thread(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    """Uses a thread without a context; the fixture looks for handles that it left."""
    save = save_whole(device_engines(), tmp_path / "data", [on_device(SLOT)], stream=cuda.new_stream())
    jobs = [save.job]
    del save.job
    thread = threading.Thread(target=jobs.clear)
    thread.start()
    thread.join()


def test_an_engine_may_be_closed_by_any_thread(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine = device_engines()
    save_whole(engine, tmp_path / "data", [on_device(SLOT)], stream=cuda.new_stream())
    thread = threading.Thread(target=engine.close)
    thread.start()
    thread.join()
    assert cuda.registered_bytes == 0


def test_memory_is_page_locked_before_it_is_lent(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """Or the first save's copies would make their callers wait."""
    trainer = cuda.new_stream()
    cuda.hold_stream(trainer)
    cuda.hold_call("cuMemHostRegister")
    engine = device_engines(most_slots=8, tripwire=False)  # which would lock its own on this thread
    save = Save(engine, tmp_path / "data", [on_device(4 * SLOT)], stream=trainer)
    eventually(lambda: cuda.calls("cuMemHostRegister"), "memory is there and being page-locked")
    assert not save.reaches(Milestone.ENQUEUED, 0.1)
    assert cuda.calls("cuMemcpyDtoHAsync") == []
    cuda.release_call("cuMemHostRegister")
    save.expect(Milestone.ENQUEUED)  # only enqueued: the stream stands still
    cuda.release_stream(trainer)
    save.finish()
