"""The tripwire's second look at host memory, and its reach: which changes fail a save, and how often.

A save whose first source is lazy and on a device waits for leave to copy, having looked at the others:
changes that are made meanwhile come after the look and before the copy, whatever the time they take.
"""

from pathlib import Path

import numpy as np
import pytest

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import (
    ALIGNMENT,
    KIB,
    MIB,
    Copy,
    Engines,
    Save,
    random_bytes,
    save_whole,
    see_in_time,
)
from tests.native.sampling import host_samples, looks
from tests.native.tearing import change, held, torn_at
from tests.support.waiting import eventually

SLOT = 16 * ALIGNMENT
SEED = 1


def start_and_look(cuda: FakeCuda, engine: native.Engine, path: Path, copies: list[Copy]) -> Save:
    """Starts a save, and waits until it has looked at its host sources and copied what is eager only."""
    leader = Copy(random_bytes(1), 0, device=True)
    save = Save(engine, path, [leader, *copies], stream=cuda.new_stream(), lazy_seconds=3600.0)
    eventually(lambda: float(save.status["looked_at"]) >= 0, "the sources are looked at")
    assert save.status["staged_at"] == -1
    return save


def go_on(save: Save) -> Save:
    save.engine.allow_lazy_copies(save.job, 0.0)
    return save


@pytest.mark.parametrize(("number", "byte"), [(0, 0), (0, 63), (40, 0), (-1, 63), (40, -1), (-1, 64)])
def test_change_after_the_look_and_before_the_copy_fails_the_save(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, number: int, byte: int
) -> None:
    engine = device_engines(slot_bytes=SLOT, most_slots=2, sample_seed=SEED)
    copy = Copy(random_bytes(20 * SLOT), 2 * SLOT)  # 80 places, and none of the first samples is changed
    place = looks(copy, SLOT, SEED)[number]
    assert not any(place.start + byte in sample for sample in host_samples(copy, SLOT, SEED))
    save = start_and_look(cuda, engine, tmp_path / "data", [copy])
    change(copy, place.start + byte - copy.offset, 1)
    go_on(save)
    if 0 <= byte < 64:
        assert torn_at(save) == place.start // SLOT * SLOT
        assert save.status["torn_bytes"] == SLOT
    else:
        save.finish()


SIZES = {  # of a change in 64 MiB: how many of 16 saves it fails when it comes before the look, and after it
    64 * KIB: (0, 16),
    4 * KIB: (0, 5),
    MIB: (9, 16),
    4 * MIB: (16, 16),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("after_look", [False, True], ids=["before the look", "after the look"])
def test_share_of_changes_that_is_found_is_as_designed(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, size: int, after_look: bool
) -> None:
    """Samples are 2 MiB apart at the start, and 16 KiB at the look; each verdict is the one computed."""
    source, slot, found, wanted = random_bytes(64 * MIB), 2 * MIB, 0, 0
    for seed in range(1, 17):
        options = {"slot_bytes": slot, "most_slots": 2, "copy_threads": 1, "discard": True}
        engine = device_engines(**options, sample_seed=seed)
        copy = Copy(source, slot)
        begin = int(np.random.default_rng(seed).integers(0, source.nbytes - size))
        folder = tmp_path / str(seed)
        folder.mkdir()
        if after_look:
            save = start_and_look(cuda, engine, folder / "data", [copy])
            change(copy, begin, size)
            go_on(save)
            places = host_samples(copy, slot, seed) + looks(copy, slot, seed)
        else:
            with held(cuda, engine, folder):
                save = Save(engine, folder / "data", [copy])
                change(copy, begin, size)
            places = host_samples(copy, slot, seed + 1)
        save.job.close_input()
        assert save.reaches(Milestone.WRITTEN)
        found += bool(save.error)
        wanted += any(
            place.start < copy.offset + begin + size and place.stop > copy.offset + begin for place in places
        )
        save.job.cancel("the next")
        assert save.reaches(Milestone.RELEASED)
        save.job.remove()
        assert found == wanted
    assert found == SIZES[size][after_look]


def verdicts(cuda: FakeCuda, engine: native.Engine, folder: Path) -> list[bool]:
    """Returns which of 24 saves fail when one half of a source of 48 KiB changes at once."""
    folder.mkdir()
    with held(cuda, engine, folder):
        saves = []
        for number in range(24):
            copy = Copy(random_bytes(48 * KIB, number), 0)
            saves.append(Save(engine, folder / str(number), [copy]))
            change(copy, 0, 24 * KIB)
    for save in saves:
        save.job.close_input()
        assert save.reaches(Milestone.WRITTEN)
    return [bool(save.error) for save in saves]


def test_each_save_is_sampled_elsewhere(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    """All alike: one time in 8 million."""
    engine = device_engines(slot_bytes=SLOT, most_slots=2, copy_threads=1)
    assert len(set(verdicts(cuda, engine, tmp_path / "saves"))) == 2


def test_each_engine_samples_elsewhere(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    """Both alike: one time in 16 million."""
    engines = [device_engines(slot_bytes=SLOT, most_slots=2, copy_threads=1) for _ in range(2)]
    first, second = (verdicts(cuda, e, tmp_path / str(i)) for i, e in enumerate(engines))
    assert first != second


def test_seed_repeats_the_samples(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    engines = [device_engines(slot_bytes=SLOT, most_slots=2, copy_threads=1, sample_seed=5) for _ in range(2)]
    first, second = (verdicts(cuda, e, tmp_path / str(i)) for i, e in enumerate(engines))
    assert first == second


@pytest.mark.parametrize("byte", [0, 1000, 48 * KIB - 1])
def test_every_byte_is_sampled_in_some_save(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, byte: int
) -> None:
    """The first and the last one half as often as others: once in 1500 saves of a chunk of 48 KiB."""
    copy = Copy(random_bytes(48 * KIB), 0)
    seed = next(n for n in range(1, 40_000) if byte in host_samples(copy, SLOT, n)[0])
    engine = device_engines(slot_bytes=SLOT, most_slots=2, copy_threads=1, sample_seed=seed - 1)
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", [copy])
        change(copy, byte, 1)
    assert torn_at(save) == host_samples(copy, SLOT, seed)[0].start


# -- no false alarms --------------------------------------------------------------------------------------


def odd_sources() -> list[Copy]:
    """Sources of every form: nothing, a byte, NaNs, pieces that are apart, overlap, or are one."""
    nans = np.full(40_000, np.nan).view(np.uint8)

    def view(shape: tuple[int, int], step: int) -> np.ndarray:
        memory = random_bytes((shape[0] - 1) * step + shape[1], step)
        return np.lib.stride_tricks.as_strided(memory, shape, (step, 1))

    sources = [
        random_bytes(0),
        random_bytes(1),
        nans,
        random_bytes(5 * SLOT + 17),
        view((90_000, 2), 8),
        view((300, 5000), 5100),
        view((200, 1000), 500),
        view((9, 1000), 0),
        random_bytes(16 * KIB + 1),
    ]
    copies, at = [], 2 * SLOT
    for source in sources:
        copies.append(Copy(source, at + 13))
        at += 13 + source.nbytes
    return copies


@pytest.mark.parametrize("slot", [ALIGNMENT, SLOT])
def test_look_at_untouched_sources_raises_no_alarm(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, slot: int
) -> None:
    for number in range(4):
        engine = device_engines(slot_bytes=slot, most_slots=2)
        save = go_on(start_and_look(cuda, engine, tmp_path / str(number), odd_sources()))
        save.finish()
        save.assert_stored()


def test_change_of_any_of_them_is_found(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    """At the start or by the look: none of them is left out."""
    for number in range(1, len(odd_sources())):  # the first has no bytes
        copies = odd_sources()
        engine = device_engines(slot_bytes=SLOT, most_slots=2)
        save = start_and_look(cuda, engine, tmp_path / str(number), copies)
        copies[number].source[...] = 7
        begin = copies[number].offset
        offset = torn_at(go_on(save))
        assert begin - SLOT < offset < begin + copies[number].source.nbytes


@pytest.mark.parametrize("copy_threads", [1, 4])
def test_sources_may_change_as_soon_as_all_is_staged(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, copy_threads: int
) -> None:
    """Nobody is still looking then."""
    engine = device_engines(slot_bytes=ALIGNMENT, most_slots=64, copy_threads=copy_threads)
    for number in range(50):
        copies = [
            Copy(random_bytes(10 * ALIGNMENT, number), 0),
            Copy(random_bytes(9000, number), 11 * ALIGNMENT),
        ]
        save = Save(engine, tmp_path / str(number), copies)
        before = [copy.source.copy() for copy in copies]
        save.expect(Milestone.ENQUEUED)
        for copy in copies:
            change(copy)
        save.finish()
        data = np.fromfile(save.path, np.uint8)
        for copy, wanted in zip(copies, before, strict=True):
            assert np.array_equal(data[copy.offset :][: wanted.nbytes], wanted)


def test_eager_sources_do_not_wait_for_the_look(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """They come first in the file. Here the second of them waits for the first one's slot."""

    def comes_first(milliseconds: int) -> bool:
        faults = f"write:1:stall={milliseconds}"
        engine = device_engines(slot_bytes=SLOT, most_slots=1, copy_threads=1, faults=faults)
        copies = [Copy(random_bytes(2 * SLOT), 0, eager=True), Copy(random_bytes(9 * SLOT), 2 * SLOT)]
        save = Save(engine, tmp_path / str(milliseconds), copies)
        eventually(lambda: save.status["bytes_staged"] >= SLOT, "the first chunk is copied")
        in_time = save.status["looked_at"] == -1
        save.finish()
        assert float(save.status["looked_at"]) >= milliseconds / 1000
        save.assert_stored()
        return in_time

    see_in_time(comes_first)


def test_sources_of_a_save_that_has_failed_are_not_looked_at(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """Once it has failed they may be freed: no read of them may begin."""
    engine = device_engines(slot_bytes=SLOT, copy_threads=1, faults="open:2:EIO")
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", [Copy(random_bytes(9 * SLOT), 0)])
        eventually(lambda: save.error, "the file is not opened")
    assert save.failure().startswith("open")
    assert save.status["looked_at"] == -1


@pytest.mark.parametrize("options", [{"tripwire": False}, {"paranoid": True}])
def test_no_look_without_tripwire_or_where_all_is_read_twice(
    engines: Engines, tmp_path: Path, options: dict[str, bool]
) -> None:
    save = save_whole(engines(**options), tmp_path / "data", [Copy(random_bytes(9 * SLOT), 0)])
    assert save.status["looked_at"] == -1


def test_device_is_not_looked_at_again(cuda: FakeCuda, device_engines: Engines, tmp_path: Path) -> None:
    """No copies but the samples, and those of chunks."""
    copies = [Copy(random_bytes(2 * SLOT, i), 2 * SLOT * i, device=True) for i in range(3)]
    save = save_whole(device_engines(slot_bytes=SLOT), tmp_path / "data", copies, stream=cuda.new_stream())
    assert save.status["looked_at"] == -1
    assert cuda.copies_to_host == 3 + 6


def test_save_that_is_cancelled_before_it_copies_is_released(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine = device_engines(slot_bytes=SLOT, most_slots=2)
    save = start_and_look(cuda, engine, tmp_path / "data", [Copy(random_bytes(20 * SLOT), 2 * SLOT)])
    save.job.cancel("enough")
    assert save.failure() == "cancelled: enough"
