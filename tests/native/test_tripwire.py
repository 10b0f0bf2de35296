"""The sample tripwire: what changes between the start of a save and its copy fails the save.

Changes are made through raw pointers, as fused optimizers make them, or by kernels of the fake device. They
come when nothing has been staged yet (`held`), so nothing here depends on time. Where samples are is computed
apart from the engine (sampling.py); test_second_look.py has what comes after them.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import (
    ALIGNMENT,
    Copy,
    Save,
    expected_bytes,
    random_bytes,
    save_whole,
)
from tests.native.sampling import BLOCK, MOST_DEVICE_COPIES, device_samples, host_samples
from tests.native.test_fork import in_child

Engines = Callable[..., native.Engine]
SLOT = 16 * ALIGNMENT
SEED = 1  # of an engine's first save; in here that is the plug
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


@pytest.fixture
def engine(device_engines: Engines) -> native.Engine:
    return device_engines(slot_bytes=SLOT, most_slots=2, copy_threads=1, sample_seed=SEED)


@contextlib.contextmanager
def held(cuda: FakeCuda, engine: native.Engine, folder: Path) -> Iterator[None]:
    """Nothing is staged in here: the only staging thread of a new engine stands in the driver."""
    cuda.hold_call("cuCtxSetCurrent")
    eager = Copy(random_bytes(10), 0, eager=True, device=True)
    plug = Save(engine, folder / "plug", [eager], stream=cuda.new_stream())
    yield
    cuda.release_call("cuCtxSetCurrent")
    plug.job.close_input()
    plug.expect(Milestone.WRITTEN)


def change(copy: Copy, begin: int = 0, size: int | None = None) -> None:
    """Other bytes in [begin, begin + size) of the source; no version counter moves."""
    part = copy.source[begin:][:size]
    ctypes.memmove(part.ctypes.data, (part ^ 1).tobytes(), part.nbytes)


def torn_at(save: Save) -> int:
    """Where the save says that it was torn; it has failed and stored nothing that could be read."""
    error = save.failure()
    offset = save.status["torn_at"]
    assert f"the source of offset {offset} changed before its copy was done" in error
    assert save.status["torn_bytes"] > 0 and not save.status["cancelled"]
    save.job.remove()
    assert not save.path.exists()
    return int(offset)


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("number", "byte"), [(0, 0), (2, 63), (-1, 0), (-1, 63), (2, -1), (-1, 64)])
def test_change_where_a_sample_was_taken_fails_the_save(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path, number: int, byte: int, device: bool
) -> None:
    copy = Copy(random_bytes(5 * SLOT), 64, device=device)
    places = device_samples([copy], SEED + 1) if device else host_samples(copy, SLOT, SEED + 1)
    place = places[number]
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", [copy], stream=cuda.new_stream())
        save.expect(Milestone.EAGER)
        if device:
            cuda.synchronize(engine_stream_is_done(cuda, save))
        change(copy, place.start + byte - copy.offset, 1)
    if 0 <= byte < len(place):
        assert torn_at(save) == place.start
    else:
        save.finish()  # beside the samples: the fence is the proof, not the tripwire


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_change_of_everything_is_found_where_the_file_begins(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path, device: bool
) -> None:
    copy = Copy(random_bytes(5 * SLOT), 64, device=device)
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", [copy], stream=cuda.new_stream())
        cuda.synchronize(engine_stream_is_done(cuda, save))
        change(copy)
    places = device_samples([copy], SEED + 1) if device else host_samples(copy, SLOT, SEED + 1)
    assert torn_at(save) in [place.start for place in places]


def engine_stream_is_done(cuda: FakeCuda, save: Save) -> int:
    """A trainer's stream that waits for the samples."""
    stream = cuda.new_stream()
    save.job.hold_back(stream)
    return stream


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("size", [1, 8, 63, 64, 65, 100])
def test_change_of_a_small_source_among_others_is_found(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path, size: int, device: bool
) -> None:
    memory = random_bytes(200 * size)  # neighbours in memory and in the file: copied in one go
    copies = [Copy(memory[i * size :][:size], i * size, device=device) for i in range(200)]
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", copies, stream=cuda.new_stream())
        cuda.synchronize(engine_stream_is_done(cuda, save))
        change(copies[177])
    assert 177 * size <= torn_at(save) < 178 * size


@pytest.mark.parametrize("byte", [0, 63])
def test_sample_across_two_chunks_is_compared_on_both_sides(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path, byte: int
) -> None:
    copy = Copy(random_bytes(100), SLOT - 50, device=True)
    place = device_samples([copy], SEED + 1)[0]
    assert place.start < SLOT < place.stop
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", [copy], stream=cuda.new_stream())
        cuda.synchronize(engine_stream_is_done(cuda, save))
        change(copy, place.start + byte - copy.offset, 1)
    assert torn_at(save) == place.start


def test_tripwire_that_is_off_lets_torn_bytes_through(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """That it is the tripwire which finds them above."""
    engine = device_engines(slot_bytes=SLOT, most_slots=2, copy_threads=1, tripwire=False)
    copies = [Copy(random_bytes(3 * SLOT), 0), Copy(random_bytes(3 * SLOT), 3 * SLOT, device=True)]
    wanted = expected_bytes(copies)
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", copies, stream=cuda.new_stream())
        for copy in copies:
            change(copy)
    save.finish()
    assert save.path.read_bytes()[: save.end] != wanted
    save.assert_stored()


# -- no false alarms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("paranoid", [False, True], ids=["samples", "paranoid"])
@pytest.mark.parametrize("seed", range(4))
def test_untouched_sources_raise_no_alarm(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, seed: int, paranoid: bool
) -> None:
    """Sources of all sizes and kinds, two small slots: chunks begin and end anywhere in them."""
    sizes = random_bytes(150, seed).astype(int) ** 2 // 4
    copies, at = [], 0
    for i, size in enumerate(sizes):
        at += int(sizes[i - 1]) % 70
        copies.append(Copy(random_bytes(size, i), at, eager=i % 5 == 0, device=i % 3 == seed % 3))
        at += size
    engine = device_engines(slot_bytes=ALIGNMENT, most_slots=2, paranoid=paranoid)
    save_whole(engine, tmp_path / "data", copies, stream=cuda.new_stream())


@pytest.mark.parametrize("paranoid", [False, True], ids=["samples", "paranoid"])
def test_eager_sources_may_change_behind_their_milestone(
    engines: Engines, tmp_path: Path, paranoid: bool
) -> None:
    engine = engines(slot_bytes=SLOT, most_slots=2, faults="write:0:stall=5", paranoid=paranoid)
    copies = [Copy(random_bytes(SLOT + 100), 0, eager=True), Copy(random_bytes(9 * SLOT), SLOT + 128)]
    wanted = expected_bytes(copies)
    save = Save(engine, tmp_path / "data", copies)
    save.expect(Milestone.EAGER)
    change(copies[0])
    save.finish()
    assert save.path.read_bytes()[: save.end] == wanted


def test_objects_that_are_appended_are_not_sampled(engines: Engines, tmp_path: Path) -> None:
    engine = engines(slot_bytes=SLOT, paranoid=True)
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(SLOT), 0)])
    save.append([Copy(random_bytes(3 * SLOT, 1), SLOT)])
    save.finish()
    save.assert_stored()


# -- samples of a device ----------------------------------------------------------------------------------


def test_samples_are_taken_before_the_trainer_goes_on_and_nobody_waits(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path
) -> None:
    """Before its stream does, that is; the host only enqueues."""
    trainer, copy = cuda.new_stream(), Copy(random_bytes(3 * SLOT), 0, device=True)
    with held(cuda, engine, tmp_path):
        cuda.hold_stream(trainer)
        cuda.launch_fill(trainer, copy.source.ctypes.data, 7, copy.source.nbytes)
        save = Save(engine, tmp_path / "data", [copy], stream=trainer)
        save.expect(Milestone.EAGER)
        save.job.hold_back(trainer)
        cuda.launch_fill(trainer, copy.source.ctypes.data, 9, copy.source.nbytes)
        assert cuda.calls("cuEventSynchronize") == cuda.calls("cuEventQuery") == []
        assert not any(line.startswith("ran") for line in cuda.log())
        cuda.release_stream(trainer)
        cuda.synchronize(trainer)
        ran = [line.split()[1] for line in cuda.log() if line.startswith("ran")]
        assert ran == ["fill", "copy", "fill"]  # the sample has the first kernel's bytes
    assert torn_at(save) == device_samples([copy], SEED + 1)[0].start


@pytest.mark.parametrize("group", [0, 77, MOST_DEVICE_COPIES - 1])
def test_samples_of_many_sources_are_few_and_spread_evenly(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path, group: int
) -> None:
    memory = random_bytes(10_000 * 16)
    copies = [Copy(memory[i * 16 :][:8], i * 8, device=True) for i in range(10_000)]
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", copies, stream=cuda.new_stream())
        cuda.synchronize(engine_stream_is_done(cuda, save))
        assert cuda.copies_to_host == MOST_DEVICE_COPIES
        for number, copy in enumerate(copies):  # one in 39 or 40 neighbours is sampled
            if number * MOST_DEVICE_COPIES // 10_000 == group:
                change(copy)
    place = device_samples(copies, SEED + 1)[group]
    assert torn_at(save) == place.start
    assert place.start // 8 * MOST_DEVICE_COPIES // 10_000 == group


def test_rows_on_large_sources_are_bounded_and_no_copy_more(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path
) -> None:
    """300 sources of a size that would have 64 rows each: 16 have them, and 240 others one sample."""
    memory = random_bytes(300 * 5 * SLOT)
    copies = [Copy(memory[i * 5 * SLOT :][: 5 * SLOT - 64], i * 5 * SLOT, device=True) for i in range(300)]
    places = device_samples(copies, SEED + 1)
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", copies, stream=cuda.new_stream())
        cuda.synchronize(engine_stream_is_done(cuda, save))
        assert cuda.copies_to_host == MOST_DEVICE_COPIES
        rows = [int(call.split()[1].split("x")[0]) for call in cuda.calls("cuMemcpy2DAsync")]
        assert len(rows) == 16 and sum(rows) + 240 == len(places) <= BLOCK // 64
        assert cuda.registered_bytes <= 2 * SLOT + BLOCK
        source, begin = divmod(places[-1].start, 5 * SLOT)
        change(copies[source], begin, 1)
    assert torn_at(save) == places[-1].start


def test_memory_of_samples_is_used_again(cuda: FakeCuda, engine: native.Engine, tmp_path: Path) -> None:
    copies, stream = [Copy(random_bytes(SLOT), 0, device=True)], cuda.new_stream()
    for number in range(20):
        save_whole(engine, tmp_path / str(number), copies, stream=stream)
    assert cuda.registered_bytes <= 2 * SLOT + 3 * BLOCK  # workers may not have let go of the last ones


def test_memory_that_cannot_be_page_locked_is_not_used_for_samples(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path
) -> None:
    """The driver would make the trainer wait for the device. Host sources are sampled all the same."""
    host, device = Copy(random_bytes(SLOT), 0), Copy(random_bytes(SLOT), SLOT, device=True)
    with held(cuda, engine, tmp_path):
        cuda.fail("cuMemHostRegister", nth=0)
        save = Save(engine, tmp_path / "data", [host, device], stream=cuda.new_stream())
        assert cuda.calls("cuMemcpyDtoHAsync") == []
        change(host)
    assert torn_at(save) == host_samples(host, SLOT, SEED + 1)[0].start


def test_memory_is_page_locked_while_another_thread_captures_a_graph(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path
) -> None:
    cuda.capture(True)
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(9), 0, device=True)], stream=cuda.new_stream())
    assert len(cuda.calls("cuMemHostRegister")) >= 1
    assert cuda.registered_bytes >= BLOCK
    save.finish()
    cuda.capture(False)


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("cuMemcpyBatchAsync", 1),
        ("cuMemcpyDtoHAsync", 1),
        ("cuMemcpyDtoHAsync", 3),
        ("cuEventRecord", 2),
    ],
)
def test_samples_that_cannot_be_taken_fail_the_save_quietly(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path, call: str, nth: int
) -> None:
    """No exception: every rank must come to the next agreement."""
    copies = [Copy(random_bytes(100, i), i * 128, device=True) for i in range(5)]
    if call == "cuMemcpyDtoHAsync":
        cuda.hide("cuMemcpyBatchAsync")
    cuda.delay_copies(seconds=0.02)
    cuda.fail(call, nth)
    save = Save(engine, tmp_path / "data", copies, stream=cuda.new_stream())
    assert call in save.failure()
    save_whole(engine, tmp_path / "next", copies, stream=cuda.new_stream())


def test_cancelled_save_is_released_when_its_samples_are_taken(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine, trainer = device_engines(copy_limit=1), cuda.new_stream()  # too slow to copy anything else
    cuda.hold_stream(trainer)
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(SLOT), 0, device=True)], stream=trainer)
    save.job.cancel("enough")
    assert not save.reaches(Milestone.RELEASED, 0.3)
    cuda.release_stream(trainer)
    assert save.failure() == "cancelled: enough"
    assert len(cuda.calls("cuMemcpyDtoHAsync")) == 1 and save.status["torn_bytes"] == 0


# -- several saves, and forks -----------------------------------------------------------------------------


def test_each_of_several_saves_has_samples_of_its_own(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path
) -> None:
    stream = cuda.new_stream()
    copies = [Copy(random_bytes(4 * SLOT, d), 4 * SLOT * d, device=bool(d)) for d in range(2)]
    other = [Copy(random_bytes(4 * SLOT, 9 + d), 4 * SLOT * d, device=bool(d)) for d in range(2)]
    with held(cuda, engine, tmp_path):
        before = Save(engine, tmp_path / "before", copies, stream=stream)
        beside = Save(engine, tmp_path / "beside", other, stream=stream)
        cuda.synchronize(engine_stream_is_done(cuda, beside))
        for copy in copies:
            change(copy)
        after = Save(engine, tmp_path / "after", copies, stream=stream)
    assert torn_at(before) == host_samples(copies[0], SLOT, SEED + 1)[0].start
    for save in (beside, after):
        save.finish()
        save.assert_stored()


def test_fork_between_start_and_copy_harms_neither_side(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path
) -> None:
    stream = cuda.new_stream()
    copies = [Copy(random_bytes(4 * SLOT, d), 4 * SLOT * d, device=bool(d)) for d in range(2)]
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", copies, stream=stream)
        torn = Save(engine, tmp_path / "torn", [other := Copy(random_bytes(99), 0)], stream=stream)

        def use() -> str:
            change(copies[0])  # the child's own
            save.job = torn.job = None
            save.engine = torn.engine = None
            return "dropped"

        assert in_child(use) == "dropped"
        change(other)
    assert torn_at(torn) == host_samples(other, SLOT, SEED + 2)[0].start
    save.finish()
    save.assert_stored()


# -- every byte twice -------------------------------------------------------------------------------------


def paranoid_engine(engines: Engines, **options: object) -> native.Engine:
    """Opens its file, which comes between the two copies, only when a test has had time for its changes."""
    return engines(slot_bytes=SLOT, paranoid=True, **({"faults": "open:1:stall=1500"} | options))


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_one_bit_between_the_samples_is_found_by_whole_checksums(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, device: bool, slots: int
) -> None:
    copy = Copy(random_bytes(20 * SLOT), 64, device=device)
    engine = paranoid_engine(device_engines, most_slots=slots)
    save = Save(engine, tmp_path / "data", [copy], stream=cuda.new_stream())
    save.expect(Milestone.EAGER)
    change(copy, 12 * SLOT + SLOT // 2, 1)
    assert torn_at(save) == 12 * SLOT
    assert save.status["torn_bytes"] == SLOT


def test_first_copy_is_whole_before_the_trainer_goes_on(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    trainer, copy = cuda.new_stream(), Copy(random_bytes(20 * SLOT), 0, device=True)
    engine = paranoid_engine(device_engines, most_slots=2, tripwire=False)
    save = Save(engine, tmp_path / "data", [copy], stream=trainer)
    save.expect(Milestone.EAGER)
    assert len([line for line in cuda.log() if line.startswith("ran copy")]) == 20
    assert save.status["bytes_staged"] == 0 and not save.reaches(Milestone.ENQUEUED, 0)
    save.finish()
    save.assert_stored()


def test_checksums_of_several_saves_are_kept_apart(engines: Engines, tmp_path: Path) -> None:
    engine = paranoid_engine(engines, most_slots=2, faults="")
    saves = [
        Save(engine, tmp_path / str(i), [Copy(random_bytes(30 * SLOT - i, i), 64 * i)]) for i in range(4)
    ]
    for save in saves:
        save.finish()
        save.assert_stored()


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_save_cancelled_in_its_first_copy_lets_go(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, device: bool
) -> None:
    engine = paranoid_engine(device_engines, most_slots=2, faults="", copy_limit=20 * SLOT)
    copies, stream = [Copy(random_bytes(100 * SLOT), 0, device=device)], cuda.new_stream()
    save = Save(engine, tmp_path / "data", copies, stream=stream)
    assert not save.reaches(Milestone.EAGER, 0.1)
    save.job.cancel("enough")
    assert save.failure() == "cancelled: enough"
    assert os.listdir(tmp_path) == []
    save_whole(engine, tmp_path / "next", [Copy(random_bytes(SLOT), 0, device=device)], stream=stream)


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuEventSynchronize", "cuEventRecord"])
@pytest.mark.parametrize("nth", [2, 5])
def test_device_that_fails_in_the_first_copy_fails_the_save(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, call: str, nth: int
) -> None:
    engine = paranoid_engine(device_engines, most_slots=2, faults="", tripwire=False)
    copies, stream = [Copy(random_bytes(9 * SLOT), 0, device=True)], cuda.new_stream()
    cuda.fail(call, nth)
    save = Save(engine, tmp_path / "data", copies, stream=stream)
    assert call in save.failure()
    save.job.remove()
    save_whole(engine, tmp_path / "next", copies, stream=stream)
