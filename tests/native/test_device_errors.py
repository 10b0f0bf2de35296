"""A device that fails, or a driver that is not there: the save fails with a clear word, and nothing else."""

import ctypes.util
import gc
import os
from pathlib import Path

import pytest

from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import (
    ILLEGAL_ACCESS,
    INVALID_CONTEXT,
    LAUNCH_FAILURE,
    UNCORRECTABLE_MEMORY,
    UNCORRECTABLE_NVLINK,
    UNKNOWN,
    FakeCuda,
)
from tests.native.harness import ALIGNMENT, KIB, Copy, Engines, Save, random_bytes, save_whole
from tests.support.waiting import PATIENCE_SECONDS, eventually

SLOT = 64 * KIB


def shard(slots: int = 8) -> list[Copy]:
    return [Copy(random_bytes(slots * SLOT), 0, device=True)]


@pytest.mark.parametrize("call", ["cuEventSynchronize", "cuMemcpyDtoHAsync", "cuEventRecord"])
def test_an_error_in_mid_save_fails_it_and_leaves_room_for_the_next(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, call: str
) -> None:
    engine, stream = device_engines(most_slots=2), cuda.new_stream()
    save_whole(engine, tmp_path / "first", shard(), stream=stream)
    cuda.fail(call, nth=4)
    save = Save(engine, tmp_path / "failed", shard(), stream=stream)
    error = save.failure()
    assert call in error and "an illegal memory access was encountered" in error and "700" in error
    save.job.remove()
    save_whole(engine, tmp_path / "next", shard(), stream=stream)
    assert set(os.listdir(tmp_path)) - {"first"} == {"next"}


@pytest.mark.parametrize("call", ["cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"])
def test_a_worker_that_cannot_enter_the_context_fails_the_save(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, call: str
) -> None:
    cuda.fail(call, nth=0)
    save = Save(device_engines(), tmp_path / "data", shard(), stream=cuda.new_stream())
    assert call in save.failure()
    cuda.let_go()
    # An error that ends the context ends its copies; the fake one's still read their sources.
    eventually(lambda: len(cuda.calls("ran")) == cuda.copies_to_host, "samples are copied")


@pytest.mark.parametrize(
    ("call", "nth", "code", "eager"),
    [
        pytest.param("cuThreadExchangeStreamCaptureMode", 0, ILLEGAL_ACCESS, False, id="no capture mode"),
        pytest.param("cuEventSynchronize", 1, ILLEGAL_ACCESS, True, id="cannot wait for a slot"),
        pytest.param("cuCtxSetCurrent", 0, INVALID_CONTEXT, False, id="cannot enter the context"),
        pytest.param("cuEventSynchronize", 0, INVALID_CONTEXT, True, id="can never wait"),
    ],
)
def test_a_failed_save_is_not_released_while_the_device_copies(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, call: str, nth: int, code: int, eager: bool
) -> None:
    engine, stream = device_engines(), cuda.new_stream()
    cuda.hold_stream(stream)
    cuda.fail(call, nth, code)
    copies = [Copy(random_bytes(SLOT), 0, device=True, eager=eager)]  # eager ones have no samples
    save = Save(engine, tmp_path / "data", copies, stream=stream)
    save.job.close_input()
    eventually(lambda: call in save.error, "the save fails")
    assert not save.reaches(Milestone.STAGED, 0.2)
    assert not save.reaches(Milestone.RELEASED, 0.0)
    cuda.let_go()
    assert save.reaches(Milestone.RELEASED)


@pytest.mark.parametrize("code", [LAUNCH_FAILURE, UNCORRECTABLE_MEMORY, UNCORRECTABLE_NVLINK])
def test_a_device_that_is_lost_fails_every_save_but_hangs_none(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, code: int
) -> None:
    engine, stream = device_engines(most_slots=2), cuda.new_stream()
    save_whole(engine, tmp_path / "first", shard(), stream=stream)
    cuda.hold_stream(stream)  # lest the save be done before the device is lost
    save = Save(engine, tmp_path / "failed", shard(), stream=stream)
    calls = ("cuMemcpyDtoHAsync", "cuEventRecord", "cuEventSynchronize", "cuStreamWaitEvent", "cuEventCreate")
    for call in calls:
        cuda.fail(call, nth=0, code=code)
    cuda.release_stream(stream)
    assert f"CUDA error {code}" in save.failure()
    with pytest.raises(OSError, match=f"CUDA error {code}"):
        Save(engine, tmp_path / "later", shard(), stream=stream)
    assert engine.close(PATIENCE_SECONDS)


@pytest.mark.parametrize("code", [UNKNOWN, INVALID_CONTEXT])
def test_a_driver_that_refuses_every_wait_holds_no_save_for_ever(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, code: int
) -> None:
    """Whether its copies ran is not known, so other slots take the place of theirs, which stay mapped."""
    engine, stream = device_engines(most_slots=14, tripwire=False), cuda.new_stream()
    cuda.hold_stream(stream)
    cuda.hold_call("cuEventSynchronize")
    save = Save(engine, tmp_path / "data", shard(14), stream=stream)
    eventually(lambda: cuda.copies_to_host == 14, "all copies are enqueued")
    other = Save(engine, tmp_path / "other", [Copy(random_bytes(SLOT), 0)])  # waits for a slot
    for call in ("cuEventSynchronize", "cuEventRecord"):
        cuda.fail(call, nth=0, code=code)
    cuda.release_call("cuEventSynchronize")
    assert f"CUDA error {code}" in save.failure()
    other.finish()
    other.assert_stored()
    assert engine.pool()["page_locked_bytes"] > 14 * SLOT
    cuda.let_go()
    save_whole(engine, tmp_path / "next", shard(8), stream=stream)
    engine.close()
    del engine
    gc.collect()
    assert cuda.registered_bytes > 0
    cuda.forget_registered()


def test_samples_stay_mapped_where_the_driver_refuses_every_wait_for_them(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """Whether their copies ran is not known."""
    engine, stream = device_engines(), cuda.new_stream()
    cuda.hold_stream(stream)
    cuda.fail("cuEventSynchronize", nth=0, code=UNKNOWN)
    save = Save(engine, tmp_path / "data", shard(), stream=stream, lazy_seconds=PATIENCE_SECONDS)
    assert f"CUDA error {UNKNOWN}" in save.failure()
    del save
    engine.close()
    assert cuda.registered_bytes > 0
    cuda.let_go()
    cuda.forget_registered()


@pytest.mark.parametrize("call", ["cuStreamWaitEvent", "cuEventRecord", "cuEventCreate"])
def test_a_save_that_cannot_be_ordered_after_the_trainers_stream_does_not_start(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, call: str
) -> None:
    engine, stream = device_engines(), cuda.new_stream()
    cuda.fail(call)
    with pytest.raises(OSError, match=call):
        Save(engine, tmp_path / "data", shard(), stream=stream)
    assert os.listdir(tmp_path) == []
    save_whole(engine, tmp_path / "next", shard(), stream=stream)


def test_a_trainer_that_cannot_be_held_back_fails_the_save_quietly(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """No exception: every rank must come to the next agreement."""
    stream = cuda.new_stream()
    save = Save(device_engines(most_slots=16), tmp_path / "data", shard(), stream=stream)
    save.expect(Milestone.ENQUEUED)
    cuda.fail("cuStreamWaitEvent")
    save.job.hold_back(stream)
    assert "cuStreamWaitEvent" in save.failure()


def test_a_failed_copy_does_not_give_its_slot_away_too_soon(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """Copies enqueued before the error still read their sources and write to the slot."""
    engine = device_engines(slot_bytes=ALIGNMENT, most_slots=1, copy_threads=1, tripwire=False)
    stream, memory = cuda.new_stream(), random_bytes(1 << 16)
    tiny = [Copy(memory[i * 100 : i * 100 + 64], i * 64, device=True) for i in range(64)]
    cuda.hold_stream(stream)
    cuda.fail("cuMemcpyDtoHAsync", nth=30)
    failed = Save(engine, tmp_path / "failed", tiny, stream=stream)
    eventually(lambda: "cuMemcpyDtoHAsync" in failed.error, "the save fails")
    assert not failed.reaches(Milestone.STAGED, 0.2)
    assert engine.pool()["idle"] == 0
    cuda.release_stream(stream)
    failed.failure()
    save_whole(engine, tmp_path / "next", [Copy(random_bytes(ALIGNMENT, 5), 0)])


def test_where_no_event_is_recorded_a_save_keeps_its_sources_until_its_copies_ran(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine, stream = device_engines(tripwire=False), cuda.new_stream()
    cuda.hold_stream(stream)
    cuda.hold_call("cuMemcpyDtoHAsync")
    save = Save(engine, tmp_path / "data", shard(), stream=stream)
    eventually(lambda: cuda.calls("cuMemcpyDtoHAsync"), "a copy is about to be enqueued")
    cuda.fail("cuEventRecord", nth=1)
    cuda.release_call("cuMemcpyDtoHAsync")
    assert not save.reaches(Milestone.RELEASED, 0.3)
    cuda.release_stream(stream)
    assert "cuEventRecord" in save.failure()
    assert len(cuda.calls("ran")) == len(cuda.calls("cuMemcpyDtoHAsync"))


def test_a_cancelled_save_waits_for_the_device_before_it_is_released(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine, trainer = device_engines(most_slots=2, tripwire=False), cuda.new_stream()
    cuda.hold_stream(trainer)
    save = Save(engine, tmp_path / "data", shard(), stream=trainer)
    eventually(lambda: len(cuda.calls("cuMemcpyDtoHAsync")) == 2, "both slots are being copied to")
    save.job.cancel("enough")
    assert not save.reaches(Milestone.RELEASED, 0.1)
    cuda.release_stream(trainer)
    assert save.failure() == "cancelled: enough"
    save.job.remove()
    save_whole(engine, tmp_path / "next", shard(), stream=trainer)


def test_closing_beside_a_slow_device_joins_soon(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    cuda.delay_copies(seconds=0.1)
    engine = device_engines(most_slots=4)
    save = Save(engine, tmp_path / "data", shard(100), stream=cuda.new_stream())
    eventually(lambda: save.status["bytes_staged"] > 0, "the first slot is copied")
    assert engine.close(PATIENCE_SECONDS)
    assert "closed" in save.failure()


@pytest.mark.parametrize("nth", [1, 2])
def test_memory_that_cannot_be_page_locked_still_serves(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, nth: int
) -> None:
    """The pool grows on afterwards."""
    cuda.fail("cuMemHostRegister", nth=nth)
    slot = 32 << 20  # two to a segment
    engine = device_engines(slot_bytes=slot, most_slots=4)
    save_whole(engine, tmp_path / "data", shard(), reserve=8 * slot, stream=cuda.new_stream())
    eventually(lambda: engine.pool()["slots"] == 4, "four slots in two segments")


# -- drivers that cannot be used --------------------------------------------------------------------------


def test_host_memory_needs_no_driver(engines: Engines, tmp_path: Path) -> None:
    save_whole(engines(driver="libnothing.so"), tmp_path / "data", [Copy(random_bytes(100), 0)])


def test_a_missing_driver_is_named(engines: Engines, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"open the CUDA driver libnothing\.so.*GPU cannot be saved"):
        Save(engines(driver="libnothing.so"), tmp_path / "data", shard())


def test_a_driver_that_cannot_look_up_versions_is_refused(engines: Engines, tmp_path: Path) -> None:
    other = ctypes.util.find_library("m")
    if other is None:
        pytest.skip("no other library to open")
    with pytest.raises(OSError, match=r"cuGetProcAddress_v2: CUDA 12\.0 or newer is needed"):
        Save(engines(driver=other), tmp_path / "data", shard())


@pytest.mark.parametrize("name", ["cuInit", "cuMemcpyDtoHAsync", "cuMemHostUnregister"])
def test_a_function_that_the_driver_lacks_is_named(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, name: str
) -> None:
    cuda.hide(name)
    engine = device_engines()
    with pytest.raises(OSError, match=rf"look up {name}: .*too old"):
        Save(engine, tmp_path / "data", shard())
    cuda.let_go()
    save_whole(engine, tmp_path / "data", shard(), stream=cuda.new_stream())


@pytest.mark.parametrize("call", ["cuInit", "cuCtxGetCurrent", "cuStreamCreateWithPriority"])
def test_a_driver_that_fails_at_first_can_be_tried_again(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, call: str
) -> None:
    engine = device_engines()
    cuda.fail(call)
    with pytest.raises(OSError, match=call):
        Save(engine, tmp_path / "data", shard())
    save_whole(engine, tmp_path / "data", shard(), stream=cuda.new_stream())


def test_a_thread_without_a_context_saves_in_that_of_device_0(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """As torch does there: a thread that has called nothing of CUDA yet works with device 0."""
    engine, stream = device_engines(most_slots=16), cuda.new_stream()
    cuda.new_context()  # of device 1
    cuda.use_context(None)
    save_whole(engine, tmp_path / "first", shard(), stream=stream)
    cuda.use_context(None)
    save_whole(engine, tmp_path / "second", shard(), stream=stream)
    assert len(cuda.calls("cuDevicePrimaryCtxRetain")) == 2


@pytest.mark.parametrize("has_another", [False, True])
def test_a_thread_without_the_context_can_fence(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, has_another: bool
) -> None:
    stream = cuda.new_stream()
    save = Save(device_engines(most_slots=16), tmp_path / "data", shard(), stream=stream)
    save.expect(Milestone.ENQUEUED)
    cuda.use_context(cuda.new_context() if has_another else None)
    save.job.hold_back(stream)
    cuda.use_context(cuda.context)
    save.finish()
    save.assert_stored()


def test_a_pool_is_not_page_locked_for_a_thread_without_a_context(
    cuda: FakeCuda, device_engines: Engines
) -> None:
    """A program that does not use CUDA would get a context, which takes memory of the device."""
    engine = device_engines()
    cuda.use_context(None)
    assert not engine.page_lock_pool()
    assert cuda.calls("cuDevicePrimaryCtxRetain") == []


def test_memory_that_stays_page_locked_stays_mapped(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """The driver takes what is mapped at that address next for the old memory."""
    stream = cuda.new_stream()
    save_whole(engine := device_engines(), tmp_path / "first", shard(), stream=stream)
    cuda.fail("cuMemHostUnregister", nth=0)
    engine.close()
    del engine
    gc.collect()
    assert cuda.registered_bytes > 0
    cuda.let_go()
    save_whole(engine := device_engines(), tmp_path / "second", shard(), stream=stream)
    assert engine.pool()["trouble"] == ""
    engine.close()
    del engine
    gc.collect()
    cuda.forget_registered()  # what the first one had to leave


def test_a_second_device_is_refused(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    engine, stream = device_engines(), cuda.new_stream()
    save_whole(engine, tmp_path / "first", shard(), stream=stream)
    cuda.use_context(cuda.new_context())
    with pytest.raises(
        OSError, match=r"the first save .* from cuda:0, this one .* from cuda:1 .* one process per device"
    ):
        Save(engine, tmp_path / "second", shard(), stream=stream)
    cuda.use_context(cuda.context)
    save_whole(engine, tmp_path / "third", shard(), stream=stream)
