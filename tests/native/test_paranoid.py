"""The paranoid mode, which reads every byte twice and compares whole checksums."""

from pathlib import Path

import pytest

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import Copy, Engines, Save, random_bytes, save_whole, see_in_time
from tests.native.tearing import SLOT, change, torn_at

NEVER = 60.0  # seconds; longer than a test


def paranoid_engine(engines: Engines, **options: object) -> native.Engine:
    return engines(slot_bytes=SLOT, paranoid=True, **options)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_one_bit_between_the_samples_is_found_by_whole_checksums(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, device: bool, slots: int
) -> None:
    copy = Copy(random_bytes(20 * SLOT), 64, device=device)
    engine = paranoid_engine(device_engines, most_slots=slots)
    save = Save(engine, tmp_path / "data", [copy], stream=cuda.new_stream(), lazy_seconds=NEVER)
    save.expect(Milestone.EAGER)
    change(copy, 12 * SLOT + SLOT // 2, 1)  # between the two copies
    engine.allow_lazy_copies(save.job, 0)
    assert torn_at(save) == 12 * SLOT
    assert save.status["torn_bytes"] == SLOT


def test_first_copy_is_whole_before_the_trainer_goes_on(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    trainer, copy = cuda.new_stream(), Copy(random_bytes(20 * SLOT), 0, device=True)
    engine = paranoid_engine(device_engines, most_slots=2, tripwire=False)
    save = Save(engine, tmp_path / "data", [copy], stream=trainer, lazy_seconds=NEVER)
    save.expect(Milestone.EAGER)
    assert len([line for line in cuda.log() if line.startswith("ran copy")]) == 20
    assert save.status["bytes_staged"] == 0 and not save.reaches(Milestone.ENQUEUED, 0)
    engine.allow_lazy_copies(save.job, 0)
    save.finish()
    save.assert_stored()


def test_checksums_of_several_saves_are_kept_apart(engines: Engines, tmp_path: Path) -> None:
    engine = paranoid_engine(engines, most_slots=2)
    saves = [
        Save(engine, tmp_path / str(i), [Copy(random_bytes(30 * SLOT - i, i), 64 * i)]) for i in range(4)
    ]
    for save in saves:
        save.finish()
        save.assert_stored()


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_save_cancelled_in_its_first_copy_is_released(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, device: bool
) -> None:
    stream = cuda.new_stream()

    def is_released(milliseconds: int) -> bool:
        rate, folder = 100 * SLOT * 1000 // milliseconds, tmp_path / str(milliseconds)
        engine = paranoid_engine(device_engines, most_slots=2, copy_limit=rate)
        copies = [Copy(random_bytes(100 * SLOT), 0, device=device)]
        save = Save(engine, folder / "data", copies, stream=stream)
        in_time = not save.reaches(Milestone.EAGER, 0.1)
        save.job.cancel("enough")
        assert save.failure() == "cancelled: enough"
        save.job.remove()
        assert list(tmp_path.rglob("data")) == []
        next_copies = [Copy(random_bytes(SLOT), 0, device=device)]
        save_whole(engine, folder / "next", next_copies, stream=stream)
        return in_time

    see_in_time(is_released)


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuEventSynchronize", "cuEventRecord"])
@pytest.mark.parametrize("nth", [2, 5])
def test_device_that_fails_in_the_first_copy_fails_the_save(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, call: str, nth: int
) -> None:
    engine = paranoid_engine(device_engines, most_slots=2, tripwire=False)
    copies, stream = [Copy(random_bytes(9 * SLOT), 0, device=True)], cuda.new_stream()
    cuda.fail(call, nth)
    save = Save(engine, tmp_path / "data", copies, stream=stream)
    assert call in save.failure()
    save.job.remove()
    save_whole(engine, tmp_path / "next", copies, stream=stream)
