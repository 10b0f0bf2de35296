"""Saves that share one or two slots always end, whatever the disk and the trainer do, and in any order.

The invariant stands in cuda/staging/pool.h. A test here fails by running past PATIENCE_SECONDS.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import (
    ALIGNMENT,
    FOOTER,
    Copy,
    Engines,
    Save,
    make_engine,
    random_bytes,
    see_in_time,
)
from tests.support.descriptors import open_files
from tests.support.waiting import PATIENCE_SECONDS, eventually

CHUNKS = 8  # of each save: more than there are slots


@pytest.fixture(params=["host", "device"])
def crowded(
    request: pytest.FixtureRequest, cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> Iterator[Callable[..., tuple[native.Engine, list[Save]]]]:
    """Makes an engine with two slots, and three saves that all need more."""

    def make(**options: object) -> tuple[native.Engine, list[Save]]:
        engine = device_engines(slot_bytes=ALIGNMENT, most_slots=2, **options)
        on_device = request.param == "device"
        stream = cuda.new_stream()
        saves = []
        for number in range(3):
            data = random_bytes(CHUNKS * ALIGNMENT, number)
            copies = [
                Copy(data[:ALIGNMENT], 0, True, on_device),
                Copy(data[ALIGNMENT:], ALIGNMENT, False, on_device),
            ]
            saves.append(Save(engine, tmp_path / str(number), copies, stream=stream))
        return engine, saves

    yield make


def assert_nothing_is_held(engine: native.Engine, folder: Path) -> None:
    """Requires that every slot is back, and that no file of `folder` is open."""
    pool = engine.pool()
    assert pool["idle"] == pool["slots"]
    assert open_files(folder) == []


def finish_all(saves: list[Save]) -> None:
    for save in saves:
        save.finish()
        save.assert_stored()
        assert save.reaches(Milestone.RELEASED)


def test_a_stalled_disk_holds_up_its_own_file_only(crowded: Callable[..., tuple], tmp_path: Path) -> None:
    """One of two slots is away; the other serves everybody else."""

    def goes_on(milliseconds: int) -> bool:
        engine, (stalled, *others) = crowded(faults=f"write:1:stall={milliseconds}")
        for save in others:
            save.append([Copy(random_bytes(100), save.end)])
        finish_all(others)
        was_stalled = stalled.status["bytes_written"] < CHUNKS * ALIGNMENT
        in_time = was_stalled and not stalled.reaches(Milestone.RELEASED, 0)
        finish_all([stalled])
        assert_nothing_is_held(engine, tmp_path)
        for save in (stalled, *others):
            save.path.unlink()
        return in_time

    see_in_time(goes_on)


def test_a_cancelled_save_that_waits_for_a_slot_is_released_without_one(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine, stream = device_engines(most_slots=1, tripwire=False), cuda.new_stream()
    cuda.hold_stream(stream)
    holder = Save(engine, tmp_path / "0", [Copy(random_bytes(100), 0, device=True)], stream=stream)
    holder.expect(Milestone.ENQUEUED)
    save = Save(engine, tmp_path / "1", [Copy(random_bytes(100), 0)])
    assert not save.reaches(Milestone.ENQUEUED, 0.2)  # it is waiting by then
    save.job.cancel("enough")
    save.failure()
    assert engine.pool()["idle"] == 0
    cuda.release_stream(stream)
    finish_all([holder])


@pytest.mark.parametrize("faults", ["write:1:EIO", "write:7:ENOSPC", "reserve:2:ENOSPC", "open:3:EIO"])
def test_a_disk_that_fails_one_file_fails_no_other(
    crowded: Callable[..., tuple], tmp_path: Path, faults: str
) -> None:
    engine, saves = crowded(faults=faults)
    for save in saves:
        save.append([Copy(random_bytes(100), save.end)])
        save.job.close_input()
    assert all(save.reaches(Milestone.WRITTEN) for save in saves)
    failed = [save for save in saves if save.error]
    assert len(failed) == 1
    failed[0].failure()
    failed[0].job.remove()
    finish_all([save for save in saves if save is not failed[0]])
    assert_nothing_is_held(engine, tmp_path)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("stalls", ["write:0:stall=10", "open:1:stall=100", "write:1:stall=200"])
def test_saves_cancelled_in_any_order_are_released(
    crowded: Callable[..., tuple], tmp_path: Path, order: tuple[int, ...], stalls: str
) -> None:
    engine, saves = crowded(faults=stalls)
    for number in order:
        saves[number].append([Copy(random_bytes(100), saves[number].end)])
        saves[number].job.cancel("enough")
        assert saves[number].reaches(Milestone.ENQUEUED)  # a fence that waits is released, too
    for number in order:
        saves[number].failure()
        saves[number].job.remove()
    assert_nothing_is_held(engine, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("survivor", range(3))
def test_the_save_that_was_not_cancelled_is_finished(
    crowded: Callable[..., tuple], tmp_path: Path, survivor: int
) -> None:
    engine, saves = crowded(faults="write:0:stall=5")
    for number, save in enumerate(saves):
        if number != survivor:
            save.job.cancel("enough")
    finish_all([saves[survivor]])
    for number, save in enumerate(saves):
        if number != survivor:
            assert save.failure() == "cancelled: enough"
            save.job.remove()
    assert_nothing_is_held(engine, tmp_path)


def test_a_fence_passes_while_saves_before_it_are_not_finished(
    crowded: Callable[..., tuple], tmp_path: Path
) -> None:
    """Nobody ever seals the first two: neither their seal nor their objects are needed for a slot."""
    engine, saves = crowded()
    saves[2].expect(Milestone.ENQUEUED)
    eventually(lambda: engine.pool()["idle"] == 2, "both slots are back")
    for save in saves:
        save.job.cancel("never sealed")
        save.failure()


# -- any order at all -------------------------------------------------------------------------------------

OPERATIONS = ["open", "reserve", "write", "write", "write", "truncate", "sync", "sync directory"]
FAULTS = st.builds(
    "{}:{}:{}".format,
    st.sampled_from(OPERATIONS),
    st.integers(1, 12),
    st.sampled_from(["EIO", "ENOSPC", "EINTR", "short", "stall=30", "stall=30"]),
)
STEPS = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["start", "start", "append", "append", "finish", "cancel", "fence", "wait", "hold"]),
)
INJECTED = ("cancelled", "Input/output error", "No space left on device", "Interrupted system call")


class Schedule:
    """Three saves, and what a trainer and its finishing threads may do with them at any time."""

    def __init__(self, engine: native.Engine, folder: Path, cuda: FakeCuda | None) -> None:
        self.engine, self.folder, self.cuda = engine, folder, cuda
        self.stream = cuda.new_stream() if cuda else 0
        self.saves: dict[int, Save] = {}
        self.sealed: dict[int, threading.Thread] = {}
        self._timers: list[threading.Timer] = []

    def take(self, number: int, step: str) -> None:
        if step == "start" and number not in self.saves:
            self._start(number)
        elif step == "hold" and self.cuda:
            self._hold(self.cuda)
        elif number in self.saves and number not in self.sealed:
            self._act(self.saves[number], number, step)

    def _start(self, number: int) -> None:
        data = random_bytes(5 * ALIGNMENT - 100, number)
        on_device = self.cuda is not None and number != 1
        copies = [Copy(data[:200], 0, True, on_device), Copy(data[4096:], ALIGNMENT, False, on_device)]
        self.saves[number] = Save(self.engine, self.folder / str(number), copies, stream=self.stream)

    def _hold(self, cuda: FakeCuda) -> None:
        """Makes the trainer's kernels take a while."""
        cuda.hold_stream(self.stream)
        self._timers.append(threading.Timer(0.03, cuda.release_stream, [self.stream]))
        self._timers[-1].start()

    def _act(self, save: Save, number: int, step: str) -> None:
        if step == "append":
            save.append([Copy(random_bytes(5000, number), save.end)])
        elif step == "finish":
            self.sealed[number] = threading.Thread(target=self._seal, args=(save,))
            self.sealed[number].start()
        elif step == "cancel":
            save.job.cancel("enough")
        elif step == "fence":
            assert save.reaches(Milestone.EAGER) and save.reaches(Milestone.ENQUEUED), save.status
        elif step == "wait":
            save.reaches(Milestone.STAGED, 0.005)

    def _seal(self, save: Save) -> None:
        save.job.close_input()
        if save.reaches(Milestone.WRITTEN) and not save.error:
            self.engine.finish(job=save.job, footer=FOOTER, offset=save.end)
            save.reaches(Milestone.DURABLE)

    def end(self) -> None:
        for number, save in self.saves.items():
            if number not in self.sealed:
                self._act(save, number, "finish")
        for thread in [*self.sealed.values(), *self._timers]:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
        for save in self.saves.values():
            assert save.reaches(Milestone.DURABLE), save.status
            assert save.reaches(Milestone.RELEASED), save.status
            if save.error:
                assert any(words in save.error for words in INJECTED), save.error
                save.job.remove()
                assert not save.path.exists()
            else:
                save.assert_stored()
        assert_nothing_is_held(self.engine, self.folder)


@settings(
    max_examples=150,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    slots=st.integers(1, 2),
    threads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    modes=st.tuples(st.booleans(), st.sampled_from([False, False, True]), st.booleans()),
    faults=st.lists(FAULTS, max_size=4).map(",".join),
    steps=st.lists(STEPS, min_size=3, max_size=20),
)
@example(
    slots=1,
    threads=(1, 1),
    modes=(True, True, True),
    faults="write:3:EIO,write:1:stall=100",
    steps=[*((n, "start") for n in range(3)), (2, "append"), (2, "fence"), (0, "cancel"), (1, "finish")],
)
def test_any_schedule_ends_with_every_slot_back(
    fake_library: Path,
    slots: int,
    threads: tuple[int, int],
    modes: tuple[bool, bool, bool],
    faults: str,
    steps: list[tuple[int, str]],
) -> None:
    on_device, paranoid, tripwire = modes
    cuda = FakeCuda(fake_library) if on_device else None
    options = {"copy_threads": threads[0], "write_threads": threads[1], "paranoid": paranoid}
    options |= {"tripwire": tripwire, "faults": faults} | ({"driver": cuda.path} if cuda else {})
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(slot_bytes=ALIGNMENT, most_slots=slots, **options)
        try:
            schedule = Schedule(engine, Path(folder), cuda)
            for number, step in steps:
                schedule.take(number, step)
            schedule.end()
        finally:
            if cuda:
                cuda.let_go()
            engine.close()
            if cuda:
                cuda.close()
