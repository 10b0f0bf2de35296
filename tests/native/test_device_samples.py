"""The tripwire's samples of device memory: when they are taken, where they are, and what they cost."""

from pathlib import Path

import pytest

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import Copy, Engines, Save, random_bytes, save_whole
from tests.native.sampling import BLOCK, MOST_DEVICE_COPIES, device_samples, host_samples
from tests.native.tearing import SEED, SLOT, change, engine_stream_is_done, held, torn_at
from tests.native.tearing import engine as engine


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
    """300 sources of a size that would have 64 rows each: 16 have them, and 112 others one sample."""
    memory = random_bytes(300 * 5 * SLOT)
    copies = [Copy(memory[i * 5 * SLOT :][: 5 * SLOT - 64], i * 5 * SLOT, device=True) for i in range(300)]
    places = device_samples(copies, SEED + 1)
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", copies, stream=cuda.new_stream())
        cuda.synchronize(engine_stream_is_done(cuda, save))
        assert cuda.copies_to_host == MOST_DEVICE_COPIES
        rows = [int(call.split()[1].split("x")[0]) for call in cuda.calls("cuMemcpy2DAsync")]
        assert len(rows) == 16 and sum(rows) + 112 == len(places) <= BLOCK // 64
        assert cuda.registered_bytes <= 2 * SLOT + BLOCK
        source, begin = divmod(places[-1].start, 5 * SLOT)
        change(copies[source], begin, 1)
    assert torn_at(save) == places[-1].start


def test_memory_of_samples_is_used_again(cuda: FakeCuda, engine: native.Engine, tmp_path: Path) -> None:
    copies, stream = [Copy(random_bytes(SLOT), 0, device=True)], cuda.new_stream()
    for number in range(20):
        save_whole(engine, tmp_path / str(number), copies, stream=stream)
    assert cuda.registered_bytes <= 2 * SLOT + 3 * BLOCK  # workers may still hold the last ones


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
