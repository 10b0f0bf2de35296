"""Held time: what counts towards which save, on a clock of our own."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.engine import fence as fence_module
from megatron_datastates.engine.fence import Fence
from megatron_datastates.pipeline.saving import held, rank_save
from megatron_datastates.pipeline.saving.held import HeldTime, charge_open_intervals, trainer_held
from megatron_datastates.pipeline.saving.rank_save import RankSave
from tests.support.bytecodes import interrupted
from tests.unit.states import SMALL


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Save:
    def __init__(self) -> None:
        self.held = HeldTime()
        self.releases: list[float] = []  # the total at each

    def on_trainer_released(self) -> None:
        self.releases.append(self.held.total)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(held, "time", clock)
    return clock


def test_spans_of_a_save_add_up(clock):
    save = Save()
    for part, seconds in (("start", 1.0), ("polls", 0.25), ("polls", 0.5)):
        with trainer_held(part, save):
            clock.sleep(seconds)
        clock.sleep(10.0)  # the trainer trains
    assert save.held.total == 1.75
    assert save.held.parts == {"start": 1.0, "polls": 0.75}
    assert save.releases == [1.0, 1.25, 1.75]


def test_nested_spans_count_once_towards_the_total(clock):
    save = Save()
    with trainer_held("save_checkpoint", save):
        clock.sleep(1.0)
        with trainer_held("start", save):
            clock.sleep(2.0)
        assert save.releases == []
    assert save.held.total == 3.0
    assert save.held.parts == {"save_checkpoint": 3.0, "start": 2.0}
    assert save.releases == [3.0]


def test_open_intervals_are_charged_to_the_save_that_begins_in_them(clock):
    save = Save()
    with trainer_held("save_checkpoint"):
        clock.sleep(1.0)
        with trainer_held("start"):
            charge_open_intervals(save)
            clock.sleep(2.0)
    assert save.held.total == 3.0
    assert save.held.parts == {"save_checkpoint": 3.0, "start": 2.0}


def test_a_span_that_belongs_to_a_save_is_not_charged_to_another(clock):
    first, second = Save(), Save()
    with trainer_held("fence", first):
        charge_open_intervals(second)
        clock.sleep(1.0)
    assert (first.held.total, second.held.total, second.held.parts) == (1.0, 0.0, {})


def test_a_span_without_a_save_is_charged_to_nobody(clock):
    save = Save()
    with trainer_held("save_checkpoint"):
        clock.sleep(1.0)
    with trainer_held("polls", save):
        clock.sleep(0.5)
    assert save.held.total == 0.5


def test_a_span_that_ends_in_an_exception_counts(clock):
    save = Save()
    with pytest.raises(KeyError), trainer_held("start", save):
        clock.sleep(1.0)
        raise KeyError
    assert save.held.total == 1.0
    with trainer_held("polls", save):
        clock.sleep(1.0)
    assert save.releases == [1.0, 2.0]


# -- the fence --------------------------------------------------------------------------------------------


class Fenced:
    def __init__(self, log: list[object], name: str) -> None:
        self.log, self.name = log, name

    def fence(self, reason: str) -> None:
        self.log.append((self.name, reason))


def test_standing_saves_pass_the_fence_once_and_oldest_first():
    log: list[object] = []
    fence = Fence()
    for name in ("one", "two"):
        fence.add(Fenced(log, name))
    fence.wait("the step")
    fence.wait("the step")
    assert log == [("one", "the step"), ("two", "the step")]


def test_an_interrupted_fence_forgets_no_save():
    """The program may catch the interrupt, and step again."""
    number = 1
    while True:
        log: list[object] = []
        fence = Fence()
        fence.add(Fenced(log, "one"))
        was_interrupted = interrupted(
            lambda fence=fence: fence.wait("the step"), fence_module.__file__, number
        )
        fence.wait("the next step")
        assert log, f"interrupted before bytecode {number}"
        if not was_interrupted:
            break
        number += 1
    assert number > 10


def test_another_thread_waits_for_a_save_that_is_being_fenced():
    fence, may_end, log = Fence(), threading.Event(), []

    class Slow(Fenced):
        def fence(self, reason: str) -> None:
            may_end.wait(10.0)
            super().fence(reason)

    fence.add(Slow(log, "one"))
    first = threading.Thread(target=fence.wait, args=("one thread",))
    first.start()
    threading.Timer(0.1, may_end.set).start()
    fence.wait("another thread")
    assert log
    first.join()


def test_a_save_that_was_discarded_is_not_waited_for():
    log: list[object] = []
    fence = Fence()
    save = Fenced(log, "one")
    fence.add(save)
    fence.discard(save)
    fence.discard(save)
    fence.wait("the step")
    assert log == []


def test_a_save_that_begins_while_another_holds_the_trainer_is_released_too(clock):
    """A finalize function may save. What waits for the release would else begin a minute later."""
    first, second = Save(), Save()
    with trainer_held("finalize", first), trainer_held("start"):
        charge_open_intervals(second)
        clock.sleep(1.0)
    assert first.releases == [1.0] and second.releases == [0.0]
    assert second.held.parts == {"start": 1.0}


def test_after_an_interrupted_interval_the_next_one_counts_and_releases(clock):
    number = 1
    while True:
        save = Save()

        def hold(save: Save = save) -> None:
            with trainer_held("start", save):
                clock.sleep(1.0)

        was_interrupted = interrupted(hold, held.__file__, number)
        later = Save()
        with trainer_held("polls", later):
            clock.sleep(1.0)
        assert later.held.total == 1.0 and later.releases == [1.0], f"interrupted before bytecode {number}"
        if not was_interrupted:
            break
        number += 1
    assert number > 10


def test_an_interrupt_while_a_save_is_made_stays_one(tmp_path, monkeypatch):
    def claims_and_is_interrupted(save: RankSave) -> bool:
        charge_open_intervals(save)
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_save, "charge_open_intervals", claims_and_is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        ds.save({"w": torch.ones(10)}, tmp_path / "c", **SMALL)


def test_a_part_that_ended_before_the_save_began_counts_as_a_part_of_it(clock):
    save = Save()
    with trainer_held("save_checkpoint"):
        with trainer_held("state_dict"):
            clock.sleep(1.0)
            with trainer_held("inner"):
                clock.sleep(0.5)
        charge_open_intervals(save)
        clock.sleep(2.0)
    assert save.held.total == 3.5
    assert save.held.parts == {"inner": 0.5, "state_dict": 1.5, "save_checkpoint": 3.5}


def test_parts_of_a_call_that_saved_nothing_are_forgotten(clock):
    with trainer_held("save_checkpoint"), trainer_held("state_dict"):
        clock.sleep(1.0)
    save = Save()
    with trainer_held("save_checkpoint"):
        charge_open_intervals(save)
    assert save.held.parts == {"save_checkpoint": 0.0}


def test_calls_of_programs_are_held_time(tmp_path):
    state = {"w": torch.ones(1 << 20), "x": 1}
    begin = time.perf_counter()
    report = ds.save(state, tmp_path / "a", **SMALL)
    elapsed = (time.perf_counter() - begin) * 1e3
    assert set(report["held_parts_ms"]) == {"save", "start", "polls"}
    assert report["published_ms"] <= report["held_ms"] <= elapsed
    handle = ds.async_save(state, tmp_path / "b", **SMALL)
    report = handle.wait()
    parts = report["held_parts_ms"]
    assert set(parts) == {"start", "wait", "polls"} and parts["polls"] <= parts["wait"]
    assert report["held_ms"] == pytest.approx(parts["start"] + parts["wait"], abs=0.01)


def test_threads_are_held_apart():
    """An interval that is open on one thread is not charged to a save that another one begins."""
    entered, may_end = threading.Event(), threading.Event()

    def hold():
        with trainer_held("save_checkpoint"):
            entered.set()
            assert may_end.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(30)
    assert not charge_open_intervals(SimpleNamespace(held=HeldTime()))
    may_end.set()
    thread.join()
