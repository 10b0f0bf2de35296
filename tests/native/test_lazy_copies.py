"""When the lazy copies of a save from a device begin, on the fake driver."""

import time
from pathlib import Path

import pytest
import torch

from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.report import save_report
from megatron_datastates.pipeline.saving.held import trainer_held
from tests.native.device_trainer import AFTER, SLOT, Trainer, assert_published, samples_of
from tests.native.device_trainer import trainer as trainer
from tests.native.fake_cuda.provider import DeviceTensors
from tests.support.waiting import eventually


@pytest.mark.parametrize("begin", ["poll", "fence"])
def test_lazy_copies_begin_at_the_first_poll_or_fence(trainer: Trainer, tmp_path: Path, begin: str) -> None:
    """Megatron's timers synchronize the device between the save and its next iteration."""
    saver = trainer.saver(lazy_delay=3600.0, fence_deadline=10.0)
    publication = saver.start(tmp_path, DeviceTensors(trainer.model))
    trainer.cuda.synchronize_device()
    time.sleep(0.2)
    assert trainer.cuda.copies_to_host == samples_of(trainer)
    if begin == "poll":
        publication.poll()
        eventually(lambda: trainer.cuda.copies_to_host > samples_of(trainer), "the copies begin")
    trainer.optimizer_step()
    assert trainer.cuda.copies_to_host > samples_of(trainer)
    assert_published(publication, tmp_path, trainer.initial)


def test_lazy_copies_begin_by_themselves_in_a_loop_that_neither_polls_nor_fences(
    trainer: Trainer, tmp_path: Path
) -> None:
    publication = trainer.saver(lazy_delay=0.05).start(tmp_path, DeviceTensors(trainer.model))
    eventually(lambda: publication.save.times()["staging"] > 0, "the copies are over")
    assert_published(publication, tmp_path, trainer.initial)


def test_the_delay_of_lazy_copies_counts_from_the_end_of_save_checkpoint(
    trainer: Trainer, tmp_path: Path
) -> None:
    """That call may take long, since it waits for other ranks."""
    with trainer_held("save_checkpoint"):
        publication = trainer.saver(lazy_delay=0.05).start(tmp_path, DeviceTensors(trainer.model))
        time.sleep(0.3)
        assert trainer.cuda.copies_to_host == samples_of(trainer)
    eventually(lambda: trainer.cuda.copies_to_host > samples_of(trainer), "the copies begin")
    assert_published(publication, tmp_path, trainer.initial)


def test_the_report_says_how_long_the_trainers_stream_waited(trainer: Trainer, tmp_path: Path) -> None:
    saver = trainer.saver(tripwire=False, lazy_delay=3600.0)
    publication = saver.start(tmp_path, DeviceTensors(trainer.model))
    trainer.cuda.hold_copies()
    trainer.optimizer_step()
    time.sleep(0.02)  # as a rule, the stream waits by now
    trainer.cuda.release_copies()
    trainer.cuda.synchronize(trainer.stream)
    assert_published(publication, tmp_path, trainer.initial)
    report = save_report(publication, "async")
    assert report["stream_wait_ms"] == report["ranks_ms"]["stream_wait"]["max"] > 0


def test_the_report_counts_bytes_on_the_device_and_on_the_host(trainer: Trainer, tmp_path: Path) -> None:
    publication = trainer.saver().start(tmp_path, DeviceTensors(trainer.model))
    trainer.optimizer_step()
    assert_published(publication, tmp_path, trainer.initial)
    share = save_report(publication, "async")["providers"][""]
    total = sum(tensor.nbytes for tensor in trainer.initial.values())
    assert share["host_bytes"] == 0 and share["device_bytes"] == share["lazy_bytes"] == total


def test_memory_may_be_unmapped_when_a_save_that_is_not_lazy_returns(
    trainer: Trainer, tmp_path: Path
) -> None:
    """Some frameworks put a model to sleep right after its save."""
    blocks = [trainer.cuda.allocate(SLOT) for _ in range(4)]
    model = {f"w{i}": torch.frombuffer(block, dtype=torch.uint8) for i, block in enumerate(blocks)}
    wanted = {key: tensor.random_(0, 256).clone() for key, tensor in model.items()}
    trainer.cuda.delay_copies(seconds=0.02)
    publication = trainer.saver(lazy=False).start(tmp_path, DeviceTensors(model))
    for block in blocks:
        trainer.cuda.free(block)
        block[:] = AFTER
    assert_published(publication, tmp_path, wanted)


@pytest.mark.parametrize("owner", ["nothing to save", "failed start"])
def test_what_follows_save_checkpoint_counts_for_every_save(
    trainer: Trainer, tmp_path: Path, owner: str
) -> None:
    """All ranks' times are compared, those without tensors, and those where the start failed, included."""
    nothing = owner == "nothing to save"
    saver = trainer.saver() if nothing else trainer.saver(driver="/nowhere/libcuda.so.1")
    with trainer_held("save_checkpoint"):
        publication = saver.start(tmp_path, DeviceTensors({} if nothing else trainer.model))
    time.sleep(0.1)
    assert publication.wait() is (Outcome.PUBLISHED if nothing else Outcome.FAILED)
    assert 0.1 <= publication.save.held.parts["until_poll"] < publication.save.held.total


def test_a_poll_for_an_earlier_save_lets_a_later_ones_copies_begin(trainer: Trainer, tmp_path: Path) -> None:
    """Megatron's queue polls its head alone."""
    saver = trainer.saver(lazy_delay=3600.0)
    first = saver.start(tmp_path / "first", DeviceTensors(trainer.model))
    with trainer_held("save_checkpoint"):
        second = saver.start(tmp_path / "second", DeviceTensors(trainer.model))
    first.poll()
    eventually(lambda: second.save.times()["staging"] > 0, "the later save's copies are over")
    assert "until_poll" in second.save.held.parts
    for publication in (first, second):
        assert publication.wait() is Outcome.PUBLISHED
