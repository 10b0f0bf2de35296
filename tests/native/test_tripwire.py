"""The sample tripwire: what changes between the start of a save and its copy fails the save.

Where samples are is computed apart from the engine (sampling.py). Their places on a device are in
test_device_samples.py, and test_second_look.py has what comes after them.
"""

from pathlib import Path

import pytest

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import ALIGNMENT, Copy, Engines, Save, expected_bytes, random_bytes, save_whole
from tests.native.sampling import device_samples, host_samples
from tests.native.tearing import SEED, SLOT, change, engine_stream_is_done, held, torn_at
from tests.native.tearing import engine as engine
from tests.native.test_fork import in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


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


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("size", [1, 8, 63, 64, 65, 100])
def test_change_of_a_small_source_among_others_is_found(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path, size: int, device: bool
) -> None:
    memory = random_bytes(100 * size)  # neighbours in memory and in the file: copied in one go
    copies = [Copy(memory[i * size :][:size], i * size, device=device) for i in range(100)]
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", copies, stream=cuda.new_stream())
        cuda.synchronize(engine_stream_is_done(cuda, save))
        change(copies[77])
    assert 77 * size <= torn_at(save) < 78 * size


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
    """Shows that it is the tripwire that finds them above."""
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
def test_eager_sources_may_change_after_their_milestone(
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
