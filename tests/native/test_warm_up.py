"""Staging memory before the first save: made in the background, page-locked once the program uses CUDA."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_datastates.config import MIB, Options
from megatron_datastates.engine import staging
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.report import Listener
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.fake_cuda.provider import DeviceTensors, label_as_device
from tests.native.harness import see_in_time
from tests.support.waiting import eventually

POOL = 8 * MIB


class Program:
    """Torch, as far as the engine asks it, over the fake driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
        self.uses_cuda, self.stream = False, cuda.new_stream()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.uses_cuda)
        monkeypatch.setattr(staging, "_current_stream", lambda device: self.stream)
        label_as_device(monkeypatch)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> Program:
    return Program(monkeypatch, cuda)


def new_saver(cuda: FakeCuda) -> Saver:
    options = Options(staging_memory=POOL, slot_size=MIB, driver=cuda.path, tripwire=False)
    return Saver(options, SaveSession())


@pytest.fixture
def saver(cuda: FakeCuda, program: Program) -> Iterator[Saver]:
    made = new_saver(cuda)
    yield made
    cuda.let_go()
    made.close()
    assert FENCE._standing == []


def wait_for_slots(saver: Saver) -> None:
    eventually(lambda: saver._get_engine().pool_facts()["staging_bytes"] == POOL, "all slots")


def device_state() -> DeviceTensors:
    return DeviceTensors({"w": torch.arange(3 * MIB, dtype=torch.uint8)})


def test_memory_is_page_locked_at_once_where_cuda_is_used(
    cuda: FakeCuda, program: Program, saver: Saver
) -> None:
    program.uses_cuda = True
    saver.warm_up()
    eventually(lambda: cuda.registered_bytes == POOL, "page-locked")
    assert cuda.live_streams == 0, "a stream of its own is for saves"


def test_cuda_is_not_initialized_for_it(cuda: FakeCuda, program: Program, saver: Saver) -> None:
    saver.warm_up()
    wait_for_slots(saver)
    FENCE.wait("a step")
    assert cuda.log() == []


def test_memory_is_page_locked_at_the_first_step_of_a_program_that_uses_cuda_later(
    cuda: FakeCuda, program: Program, saver: Saver
) -> None:
    saver.warm_up()
    saver.warm_up()  # arguments may be parsed twice
    wait_for_slots(saver)
    program.uses_cuda = True
    FENCE.wait("the first step")
    eventually(lambda: cuda.registered_bytes == POOL, "page-locked")
    FENCE.wait("the second step")
    assert len(cuda.calls("cuMemHostRegister")) == 1


@pytest.fixture
def automatic(cuda: FakeCuda, program: Program, monkeypatch: pytest.MonkeyPatch) -> Iterator[Saver]:
    """A budget of 256 MiB that the user did not choose."""
    monkeypatch.setattr(staging, "most_slots", lambda *_: 256)
    made = Saver(Options(slot_size=MIB, driver=cuda.path, tripwire=False), SaveSession())
    yield made
    cuda.let_go()
    made.close()
    assert FENCE._standing == []


def slots_of(saver: Saver, count: int) -> None:
    eventually(lambda: saver._get_engine().native.pool()["slots"] == count, f"{count} slots")
    assert not saver._get_engine().native.pool()["trouble"]


def test_an_automatic_pool_grows_by_what_is_free_when_it_grows(
    program: Program, automatic: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the program started, its model and optimizer were not there: an optimizer may be in the host."""
    program.uses_cuda = True
    automatic.warm_up(lambda: 100 * MIB)
    slots_of(automatic, 64)
    monkeypatch.setattr(staging, "most_slots", lambda *_: 10)
    FENCE.wait("the first step")
    FENCE.wait("the second step")
    slots_of(automatic, 74)
    monkeypatch.setattr(staging, "most_slots", lambda *_: 2)
    engine = automatic._get_engine()
    engine.grow(100 * MIB)  # no more than before
    engine.grow(200 * MIB)
    slots_of(automatic, 76)
    monkeypatch.setattr(staging, "most_slots", lambda *_: 1000)
    engine.grow(300 * MIB)
    slots_of(automatic, 256)


@pytest.mark.parametrize("seen_at", ["warm-up", "the first fence", "the end of the first step"])
def test_the_pool_grows_to_the_size_of_the_shard_once_a_step_is_over(
    cuda: FakeCuda, program: Program, automatic: Saver, seen_at: str
) -> None:
    shard = 100 * MIB + 1
    program.uses_cuda = seen_at == "warm-up"
    automatic.warm_up(lambda: shard)
    slots_of(automatic, 64)
    program.uses_cuda = True
    if seen_at == "the end of the first step":
        FENCE.witness_mutation("stepped without a fence")
    else:
        FENCE.wait("the first step")
        assert automatic._get_engine().native.pool()["slots"] == 64, "there are no optimizer states yet"
        FENCE.wait("the second step")
    slots_of(automatic, 101 + 4)  # header, tail and gaps
    shard = 10_000 * MIB
    FENCE.wait("another step")
    slots_of(automatic, 256)
    for _ in range(10):
        FENCE.wait("many more")
    assert FENCE._standing == []
    eventually(lambda: cuda.registered_bytes == 256 * MIB, "page-locked")


def test_a_program_without_cuda_makes_no_more_before_its_first_save(
    program: Program, automatic: Saver
) -> None:
    automatic.warm_up()
    for _ in range(3):
        FENCE.wait("a step")
    assert FENCE._standing == []
    slots_of(automatic, 64)


def test_a_shard_whose_size_cannot_be_known_does_not_end_training(
    program: Program, automatic: Saver, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> int:
        raise RuntimeError("no such statistics")

    program.uses_cuda = True
    automatic.warm_up(refuse)
    for _ in range(3):
        FENCE.wait("a step")
    assert caplog.text.count("no such statistics") == 1


def test_a_save_that_waits_for_its_memory_reports_so_and_logs_it_once(
    cuda: FakeCuda, program: Program, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program.uses_cuda = True

    def is_reported(milliseconds: int) -> bool:
        saver, reports = new_saver(cuda), list[dict]()
        saver.reporter.listeners.append(Listener(reports.append))
        cuda.hold_call("cuMemHostRegister")
        caplog.clear()
        for number in range(2):
            publication = saver.start(tmp_path / f"{milliseconds}-{number}", device_state())
            publication.poll()  # the copies begin
            time.sleep(0.0 if number else milliseconds / 1000)  # in which the wait is to begin
            cuda.release_call("cuMemHostRegister")
            FENCE.wait("the step")
            assert publication.wait() is Outcome.PUBLISHED
        saver.close()
        first, second = (report["memory_wait_ms"] for report in reports)
        assert second == 0 and reports[0]["slot_wait_ms"] >= first
        return first > 100 and caplog.text.count("fixed size, as in --datastates-staging-memory") == 1

    with caplog.at_level("INFO"):
        see_in_time(is_reported)


def test_a_first_step_that_no_hook_saw_serves_as_well(cuda: FakeCuda, program: Program, saver: Saver) -> None:
    saver.warm_up()
    program.uses_cuda = True
    FENCE.witness_mutation("stepped without a fence")
    eventually(lambda: cuda.registered_bytes == POOL, "page-locked")


def test_nobody_waits_for_page_locking(cuda: FakeCuda, program: Program, saver: Saver) -> None:
    program.uses_cuda = True
    cuda.hold_call("cuMemHostRegister")
    saver.warm_up()
    eventually(lambda: cuda.calls("cuMemHostRegister"), "it has begun")
    FENCE.wait("a step")
    assert cuda.registered_bytes == 0


def test_page_locking_that_fails_is_logged_once_and_reported(
    cuda: FakeCuda, program: Program, saver: Saver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[dict] = []
    saver.reporter.listeners.append(Listener(reports.append))
    program.uses_cuda = True
    cuda.fail("cuMemHostRegister", nth=0)
    saver.warm_up()
    for number in range(2):
        publication = saver.start(tmp_path / str(number), device_state())
        FENCE.wait("the step")
        assert publication.wait() is Outcome.PUBLISHED
    assert caplog.text.count("staging memory is not page-locked") == 1
    assert [report["page_locked_bytes"] for report in reports] == [0, 0]
    assert all("cuMemHostRegister" in report["staging_trouble"] for report in reports)


def test_a_report_says_what_is_page_locked(
    cuda: FakeCuda, program: Program, saver: Saver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[dict] = []
    saver.reporter.listeners.append(Listener(reports.append))
    program.uses_cuda = True
    saver.warm_up()
    eventually(lambda: cuda.registered_bytes == POOL, "page-locked")
    publication = saver.start(tmp_path / "c", device_state())
    FENCE.wait("the step")
    assert publication.wait() is Outcome.PUBLISHED
    facts = {"staging_bytes": POOL, "page_locked_bytes": POOL, "staging_trouble": ""}
    assert facts.items() <= reports[0].items()
    assert "page-locked" not in caplog.text


def test_a_missing_driver_is_no_trouble_before_a_save_needs_it(
    program: Program, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program.uses_cuda = True
    saver = Saver(Options(staging_memory=POOL, slot_size=MIB, driver="no such library"), SaveSession())
    saver.warm_up()
    FENCE.wait("a step")
    publication = saver.start(tmp_path / "c", device_state())
    assert publication.wait() is Outcome.FAILED
    assert "a tensor on a GPU cannot be saved or loaded without it" in str(publication.error)
    assert "page-locked" not in caplog.text
    saver.close()
