"""What a save enqueues on the device, and when: on the fake driver."""

import time
from pathlib import Path

import numpy as np
import pytest

from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import ALIGNMENT, KIB, Copy, Engines, Save, random_bytes, save_whole, see_in_time
from tests.support.waiting import eventually

SLOT = 64 * KIB
MOST_IN_FLIGHT, COPIES_PER_EVENT = 256, 128  # cuda/device/copier.h
INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED = 1, 2, 801
BLOCKING_SYNC = 1  # a flag of cuEventCreate
NEVER = 3600.0  # seconds; longer than a test


def on_device(size: int, offset: int = 0, *, seed: int = 0, **options: bool) -> Copy:
    return Copy(random_bytes(size, seed), offset, device=True, **options)


def many(count: int, size: int = 24) -> list[Copy]:
    """Sources that nothing can merge."""
    memory = random_bytes(count * 2 * size)
    return [Copy(memory[2 * i * size :][:size], i * size, device=True) for i in range(count)]


def apart(memory: np.ndarray, size: int) -> list[Copy]:
    """Sources in every `size` bytes, all but the last 64 of them."""
    return [Copy(memory[at:][: size - 64], at, device=True) for at in range(0, memory.nbytes, size)]


# -- copied when copied -------------------------------------------------------------------------------------


def test_copied_does_not_wait_for_the_disk(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    """The first write hangs: the copies are over all the same, and the sources are nobody's."""

    def is_copied(milliseconds: int) -> bool:
        faults = f"write:1:stall={milliseconds}"
        engine = device_engines(most_slots=16, write_threads=1, faults=faults)
        copy, stream = on_device(12 * SLOT), cuda.new_stream()
        save = Save(engine, tmp_path / str(milliseconds), [copy], stream=stream)
        save.expect(Milestone.STAGED)
        assert save.status["bytes_staged"] == save.end
        in_time = save.status["bytes_written"] == 0
        wanted = copy.source.tobytes()
        copy.source[:] = 0
        save.finish()
        assert save.path.read_bytes()[: len(wanted)] == wanted
        return in_time

    see_in_time(is_copied)


def test_copied_comes_before_the_writes_of_an_earlier_save(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine = device_engines(most_slots=16, write_threads=1, write_limit=1)
    engine.grow(16)
    stream = cuda.new_stream()
    first = Save(engine, tmp_path / "first", [Copy(random_bytes(4 * SLOT), 0)])
    first.expect(Milestone.STAGED)
    second = Save(engine, tmp_path / "second", [on_device(4 * SLOT, seed=1)], stream=stream)
    second.expect(Milestone.STAGED)  # a write takes a day
    assert second.status["bytes_written"] == 0
    for save in (first, second):
        save.job.cancel("seen")


# -- lazy copies begin at the first poll or fence -----------------------------------------------------------


def test_a_synchronized_device_waits_for_no_lazy_copy(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine, stream = device_engines(tripwire=False), cuda.new_stream()
    eager, lazy = on_device(SLOT, eager=True), on_device(8 * SLOT, SLOT, seed=1)
    cuda.delay_copies(seconds=0.01)
    save = Save(engine, tmp_path / "data", [eager, lazy], stream=stream, lazy_seconds=NEVER)
    save.expect(Milestone.EAGER)
    cuda.synchronize_device()
    assert cuda.copies_to_host == 1  # the eager one
    assert not save.reaches(Milestone.ENQUEUED, 0.3)
    engine.allow_lazy_copies(save.job, 0)
    save.finish()
    save.assert_stored()
    assert cuda.copies_to_host == 9


def test_lazy_copies_begin_by_themselves_after_their_time(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    save = Save(
        device_engines(), tmp_path / "data", [on_device(3 * SLOT)], stream=cuda.new_stream(), lazy_seconds=0.2
    )
    save.expect(Milestone.STAGED)
    assert save.status["enqueued_at"] >= 0.2
    save.finish()
    save.assert_stored()


def test_a_time_can_be_brought_forward_but_not_put_off(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine, stream = device_engines(), cuda.new_stream()
    save = Save(engine, tmp_path / "data", [on_device(SLOT)], stream=stream, lazy_seconds=NEVER)
    engine.allow_lazy_copies(save.job, 0.1)
    engine.allow_lazy_copies(save.job, NEVER)
    save.expect(Milestone.STAGED)


def test_one_saves_time_is_not_anothers(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    engine, stream = device_engines(), cuda.new_stream()
    saves = [
        Save(engine, tmp_path / name, [on_device(SLOT)], stream=stream, lazy_seconds=NEVER) for name in "ab"
    ]
    engine.allow_lazy_copies(saves[1].job, 0)
    saves[1].finish()
    assert not saves[0].reaches(Milestone.ENQUEUED, 0.2)
    saves[0].job.cancel("seen")


def test_copies_begin_as_soon_as_they_may(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    """A fence waits for them: it is not to wait for a thread that looks every 100 ms."""
    engine, stream = device_engines(), cuda.new_stream()

    def is_soon(i: int) -> bool:
        save = Save(engine, tmp_path / str(i), [on_device(SLOT)], stream=stream, lazy_seconds=NEVER)
        time.sleep(0.02)  # the file is open, and nothing is left to do but wait
        begin = time.monotonic()
        engine.allow_lazy_copies(save.job, 0)
        save.expect(Milestone.ENQUEUED)
        seconds = time.monotonic() - begin
        save.finish()
        return seconds < 0.04

    assert any(map(is_soon, range(100))), "each thread of a busy machine may be late, but not each time"


def test_host_copies_wait_for_that_time_too(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    engine = device_engines()
    device = Save(engine, tmp_path / "a", [on_device(SLOT)], stream=cuda.new_stream(), lazy_seconds=NEVER)
    host = Save(engine, tmp_path / "b", [Copy(random_bytes(5 * SLOT), 0)], lazy_seconds=NEVER)
    assert not host.reaches(Milestone.ENQUEUED, 0.1)
    engine.allow_lazy_copies(host.job, 0)
    host.finish()  # also past a save that waits
    host.assert_stored()
    assert not device.reaches(Milestone.ENQUEUED, 0.0)


def test_what_precedes_an_eager_chunk_does_not_wait(engines: Engines, tmp_path: Path) -> None:
    """The header, for one: nothing else of its chunk may be eager."""
    lazy, eager = Copy(random_bytes(SLOT), 0), Copy(random_bytes(SLOT), SLOT, eager=True)
    save = Save(engines(), tmp_path / "data", [lazy, eager], lazy_seconds=NEVER)
    save.expect(Milestone.EAGER)


@pytest.mark.parametrize("end", ["cancel", "error", "close"])
def test_a_save_that_ends_before_its_time_is_released(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, end: str
) -> None:
    engine = device_engines(faults="open:1:EIO" if end == "error" else "")
    save = Save(engine, tmp_path / "data", [on_device(SLOT)], stream=cuda.new_stream(), lazy_seconds=NEVER)
    if end == "cancel":
        save.job.cancel("enough")
    elif end == "close":
        engine.close()
    save.failure()


def test_a_save_of_a_closed_engine_is_past_its_time(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """No error of the trainer's, which may poll once more."""
    engine = device_engines()
    save = Save(engine, tmp_path / "data", [on_device(SLOT)], stream=cuda.new_stream(), lazy_seconds=NEVER)
    engine.close()
    engine.allow_lazy_copies(save.job, 0)


# -- the launch queue ---------------------------------------------------------------------------------------


def test_copies_in_flight_are_bounded(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    """However many tensors there are: the trainer's launches share a queue with them, and must not wait."""
    cuda.share_connection()
    trainer, memory = cuda.new_stream(), np.zeros(8, np.uint8)
    cuda.hold_stream(trainer)
    save = Save(device_engines(), tmp_path / "data", many(4000), stream=trainer)
    eventually(lambda: cuda.deepest_queue > MOST_IN_FLIGHT / 2, "copies wait for the trainer's stream")
    cuda.delay_copies(seconds=0.0002)
    cuda.release_stream(trainer)
    while not save.reaches(Milestone.ENQUEUED, 0.005):
        if cuda.is_idle(trainer):
            cuda.launch_fill(trainer, memory.ctypes.data, 1, 8)
    save.finish()
    save.assert_stored()
    assert cuda.deepest_queue < MOST_IN_FLIGHT + 100  # events, waits and the trainer's kernels add some


@pytest.mark.parametrize("bound", [8 << 20, 32 << 20])
def test_bytes_in_flight_are_bounded(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, bound: int
) -> None:
    """A small copy of the trainer's waits for those before it: the device has one copy engine for both."""
    size, count = 8 << 20, 30
    memory = np.zeros(size * count, np.uint8)
    options = {"discard": True, "tripwire": False, "most_in_flight": bound}
    engine = device_engines(slot_bytes=size, most_slots=count + 2, **options)
    cuda.hold_copies()
    copies = apart(memory, size)
    save = Save(engine, tmp_path / "data", copies, stream=cuda.new_stream())
    eventually(lambda: cuda.copies_to_host >= bound // size, "as many as may be are in flight")
    cuda.delay_copies(seconds=0.005)
    cuda.release_copies()
    save.expect(Milestone.STAGED)
    in_flight = in_flight_after_each(cuda.log())
    assert in_flight[-1] == 0 and bound / 2 <= max(in_flight) <= bound
    save.job.cancel("enough")


def in_flight_after_each(log: list[str]) -> list[int]:
    """Returns the bytes that are in flight after each copy was enqueued or run."""
    found = [0]
    for line in log:
        if line.startswith("cuMemcpyDtoHAsync"):
            found.append(found[-1] + int(line.split()[-1]))
        elif line.startswith("ran ") and line.split()[-1].isdigit():
            found.append(found[-1] - int(line.split()[-1]))
    return found


def test_copies_go_in_bursts(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    """So that a copy of the trainer's waits for one burst at most, whatever order the device has."""
    size, count, bound = 64 * KIB, 60, 256 * KIB
    memory = random_bytes(size * count)
    engine = device_engines(slot_bytes=size, most_slots=count + 2, tripwire=False, most_in_flight=bound)
    cuda.delay_copies(seconds=0.002)
    copies = apart(memory, size)
    save_whole(engine, tmp_path / "data", copies, stream=cuda.new_stream())
    found = in_flight_after_each(cuda.log())
    assert found[-1] == 0 and max(found) <= bound
    assert found[1:].count(0) >= size * count // bound


def test_what_is_known_to_be_copied_is_not_in_flight(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """So that a save starts with a burst of its own, which nothing waits for, whatever was copied before."""
    size, count, stream = 64 * KIB, 7, cuda.new_stream()
    engine = device_engines(slot_bytes=size, most_slots=2 * count, most_in_flight=8 * size)
    memory = random_bytes(size * count)
    copies = apart(memory, size)
    save_whole(engine, tmp_path / "first", copies, stream=stream)
    cuda.hold_stream(stream)
    save = Save(engine, tmp_path / "second", copies, stream=stream)
    assert save.reaches(Milestone.ENQUEUED, NEVER) and not save.reaches(Milestone.STAGED, 0.0)
    cuda.release_stream(stream)
    save.finish()
    save.assert_stored()


def test_bytes_in_flight_are_unbounded_while_the_trainer_waits_for_them(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """At its fence, and after the start of a save whose tensors may change at once; not in the next save."""
    size, count, bound = 64 * KIB, 60, 128 * KIB
    memory = random_bytes(size * count)
    engine = device_engines(slot_bytes=size, most_slots=2 * count, tripwire=False, most_in_flight=bound)
    copies = apart(memory, size)
    cuda.hold_copies()
    stream = cuda.new_stream()
    hurried = Save(engine, tmp_path / "hurried", copies, stream=stream, lazy_seconds=NEVER)
    engine.allow_lazy_copies(hurried.job, 0.0, True)
    eventually(lambda: cuda.copies_to_host > 4 * bound // size, "all copies are enqueued")
    cuda.delay_copies(seconds=0.002)
    cuda.release_copies()
    hurried.finish()
    before = len(cuda.log())
    save_whole(engine, tmp_path / "next", copies, stream=cuda.new_stream())
    assert max(in_flight_after_each(cuda.log()[before:])) <= bound
    hurried.assert_stored()


def test_the_start_of_a_save_of_what_may_change_at_once_does_not_wait_for_a_busy_device(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """However much it is, as long as there are slots: the trainer's stream waits, not the trainer."""
    size, count, stream = 64 * KIB, 20, cuda.new_stream()
    engine = device_engines(slot_bytes=size, most_slots=2 * count, most_in_flight=size)
    copies = [on_device(size - 64, i * size, eager=True) for i in range(count)]
    cuda.hold_stream(stream)
    save = Save(engine, tmp_path / "data", copies, stream=stream)
    assert save.reaches(Milestone.EAGER, NEVER) and not save.reaches(Milestone.STAGED, 0.0)
    cuda.release_stream(stream)
    save.finish()
    save.assert_stored()


def test_a_save_does_not_wait_for_what_the_trainer_does_before_the_next(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """Both saves' copies share a stream, and that waits for the trainer before those of the second."""
    engine, stream = device_engines(tripwire=False), cuda.new_stream()
    cuda.delay_copies(seconds=0.1)
    first = Save(engine, tmp_path / "first", [on_device(3 * SLOT)], stream=stream)
    first.expect(Milestone.ENQUEUED)
    cuda.hold_stream(stream)
    second = Save(engine, tmp_path / "second", [on_device(SLOT)], stream=stream)
    first.finish()  # also past the second, which has not begun to copy
    first.assert_stored()
    assert not second.reaches(Milestone.STAGED, 0.0)
    cuda.release_stream(stream)
    second.finish()
    second.assert_stored()


def test_nor_if_the_next_one_begins_while_an_event_is_recorded_for_its_copies(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """That event then comes after the stream's wait for the trainer."""
    engine, stream = device_engines(tripwire=False), cuda.new_stream()
    cuda.hold_call("cuEventRecord", except_here=True)
    before = len(cuda.calls("cuEventRecord"))
    first = Save(engine, tmp_path / "first", [on_device(SLOT)], stream=stream)
    first.expect(Milestone.ENQUEUED)
    eventually(lambda: len(cuda.calls("cuEventRecord")) == before + 2, "the save's, and that of its copies")
    cuda.hold_stream(stream)
    second = Save(engine, tmp_path / "second", [on_device(SLOT)], stream=stream)
    cuda.release_call("cuEventRecord")
    first.finish()
    first.assert_stored()
    cuda.release_stream(stream)
    second.finish()
    second.assert_stored()


def test_the_number_of_copies_in_flight_is_bounded_even_then(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    cuda.share_connection()
    cuda.delay_copies(seconds=0.0002)
    engine = device_engines()
    save = Save(engine, tmp_path / "data", many(2000), stream=cuda.new_stream())
    engine.allow_lazy_copies(save.job, 0.0, True)
    save.finish()
    assert cuda.deepest_queue < MOST_IN_FLIGHT + 100


@pytest.mark.parametrize("is_strided", [False, True])
def test_long_copies_are_cut_to_what_may_be_in_flight(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, is_strided: bool
) -> None:
    """Of one row, and of many in one call."""
    bound, memory = 4 * KIB, random_bytes(64 * KIB)
    source = memory.reshape(128, 512)[:, :200] if is_strided else memory
    options = {"tripwire": False, "most_in_flight": bound}
    engine = device_engines(slot_bytes=64 * KIB, most_slots=2, **options)
    save_whole(engine, tmp_path / "data", [Copy(source, 0, device=True)], stream=cuda.new_stream())
    least = source.nbytes // bound
    assert least <= cuda.copies_to_host <= least + 2
    if not is_strided:
        assert max(in_flight_after_each(cuda.log())) <= bound


@pytest.mark.parametrize("size", [4 * KIB, 64 * KIB, 256 * KIB])
def test_one_event_serves_all_waits(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, size: int
) -> None:
    """Each creation and destruction takes a lock of the driver that the trainer's launches take, too."""
    count = 200
    memory = random_bytes(size * count)
    options = {"tripwire": False, "most_in_flight": 256 * KIB}
    engine = device_engines(slot_bytes=256 * KIB, most_slots=8, **options)
    copies = apart(memory, size)
    save_whole(engine, tmp_path / "data", copies, stream=cuda.new_stream())
    assert len(cuda.calls("cuEventRecord")) >= count * size / (256 * KIB)
    flags = cuda.calls("cuEventCreate")
    assert len(flags) < 6 and all(int(one) & BLOCKING_SYNC for one in flags)  # waits sleep
    assert len(cuda.calls("cuEventSynchronize")) <= len(cuda.calls("cuEventRecord"))


def test_the_trainer_is_held_back_while_a_copy_waits_in_the_driver(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """As a copy to memory that is not page-locked does: until what comes before it on the device is done."""
    engine, trainer = device_engines(tripwire=False), cuda.new_stream()
    cuda.hold_call("cuMemcpyDtoHAsync")
    save = Save(engine, tmp_path / "data", [on_device(SLOT)], stream=trainer)
    eventually(lambda: cuda.calls("cuMemcpyDtoHAsync"), "a copy is about to be enqueued")
    save.job.hold_back(trainer)
    assert not save.reaches(Milestone.ENQUEUED, 0.0)
    cuda.release_call("cuMemcpyDtoHAsync")
    save.finish()
    save.assert_stored()


def test_an_event_serves_many_copies(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    engine = device_engines(slot_bytes=ALIGNMENT, most_slots=64, tripwire=False)
    save_whole(engine, tmp_path / "data", many(10_000), stream=cuda.new_stream())
    chunks = 10_000 * 24 // ALIGNMENT + 1
    assert cuda.copies_to_host >= 10_000
    assert len(cuda.calls("cuEventRecord")) < 10_000 / COPIES_PER_EVENT + chunks + 10
    assert cuda.live_events < 2 * MOST_IN_FLIGHT / COPIES_PER_EVENT + 4


def test_a_tail_that_no_event_covers_is_awaited(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """A single slot: its chunk's few copies must be seen to be over before anything else can be copied."""
    engine = device_engines(slot_bytes=ALIGNMENT, most_slots=1, copy_threads=1)
    save_whole(engine, tmp_path / "data", [on_device(9 * ALIGNMENT)], stream=cuda.new_stream())


def test_samples_outlive_one_that_fails(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    """The next save would get their memory while the device still writes to it."""
    stream = cuda.new_stream()
    cuda.hold_stream(stream)
    cuda.fail("cuMemcpyDtoHAsync", nth=21, code=OUT_OF_MEMORY)
    save = Save(device_engines(), tmp_path / "data", many(100), stream=stream)
    save.job.close_input()
    eventually(lambda: "cuMemcpyDtoHAsync" in save.error, "the save fails")
    assert not save.reaches(Milestone.RELEASED, 0.2)
    cuda.release_stream(stream)
    assert save.reaches(Milestone.RELEASED)
    assert len(cuda.calls("ran")) == 20


# -- how long the trainer's stream waits --------------------------------------------------------------------


def test_the_streams_wait_is_measured_by_the_device(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine, trainer = device_engines(most_slots=8, tripwire=False), cuda.new_stream()
    cuda.hold_copies()
    save = Save(engine, tmp_path / "data", [on_device(5 * SLOT)], stream=trainer)
    save.expect(Milestone.ENQUEUED)
    begin = time.monotonic()
    save.job.hold_back(trainer)
    assert save.job.stream_waited() == 0  # it is not over, and nobody waits for it
    cuda.delay_copies(seconds=0.02)
    cuda.release_copies()
    cuda.synchronize(trainer)
    longest = time.monotonic() - begin
    save.finish()
    eventually(save.job.stream_waited, "the wait is over")
    assert 0 < save.job.stream_waited() < longest


def test_the_wait_is_measured_while_another_thread_captures_a_graph(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """A call of this thread's that is not relaxed would also end that capture."""
    trainer = cuda.new_stream()
    cuda.delay_copies(seconds=0.01)
    save = Save(device_engines(tripwire=False), tmp_path / "data", [on_device(SLOT)], stream=trainer)
    save.expect(Milestone.ENQUEUED)
    save.job.hold_back(trainer)
    cuda.synchronize(trainer)
    cuda.capture(True)
    assert save.job.stream_waited() > 0
    cuda.capture(False)
    save.finish()


def test_a_stream_that_is_not_held_back_waits_for_nothing(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    save = save_whole(device_engines(), tmp_path / "data", [on_device(SLOT)], stream=cuda.new_stream())
    assert save.job.stream_waited() == 0


def test_a_failed_measurement_harms_nothing(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    trainer = cuda.new_stream()
    cuda.fail("cuEventElapsedTime", nth=0)
    save = Save(device_engines(), tmp_path / "data", [on_device(SLOT)], stream=trainer)
    save.expect(Milestone.ENQUEUED)
    save.job.hold_back(trainer)
    cuda.synchronize(trainer)
    save.finish()
    save.assert_stored()
    assert save.job.stream_waited() == 0
